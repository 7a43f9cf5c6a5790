"""What moves: formula = jaxpr = partitioned HLO, in kind, axes, count and bytes."""

import dataclasses
import math

import optax
import pytest
from parity import LLAMA, by_arrow, predicted_by_arrow

from llmpar.inspect.census import arrow_rows, arrow_text, census_hlo, partitioned_hlo
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.parallel.mesh import abstract_mesh, make_mesh
from llmpar.plan.plan import Plan
from llmpar.predict import formulas, traffic
from llmpar.training.step import Step

BATCH, SEQ, MIXED = 16, 32, "dp=2 fsdp=2 tp=2"


def predicted(config, plan):
    return predicted_by_arrow(traffic.step_traffic(plan.resolve(config), BATCH, SEQ))


def lowered(config, plan):
    plan.resolve(config, None, BATCH, SEQ)
    step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    return step, step.lower(BATCH, SEQ)


def test_an_arrow_sends_the_same_before_and_after_the_compiler():
    """By arrow and direction: the traced step, and the partitioned program. test_plans.py has all fields."""
    plan = Plan(MIXED, tp_sequence=True, remat="block")
    step, program = lowered(LLAMA, plan)
    jaxpr = step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr
    traced, sent = census_jaxpr(jaxpr, plan.mesh.sizes), census_hlo(partitioned_hlo(program), step.mesh)
    assert by_arrow(traced) == predicted(LLAMA, plan)
    by_text = lambda rows: sorted(map(str, rows))
    assert by_text(arrow_rows(traced)) == by_text(arrow_rows(sent))
    directions = {(c.arrow, c.kind): c.direction for c in sent if c.kind == "reduce-scatter"}
    # Korthikanti et al. 2022: what is scattered forward is gathered backward
    assert directions["ffn b s d +m -> stream b s d", "reduce-scatter"] == "forward"
    assert directions["stream b s d -> ffn b s d", "reduce-scatter"] == "backward"
    gathers = {c.direction for c in sent if c.arrow == "ffn d m" and c.kind == "all-gather"}
    assert gathers == {"forward", "recomputed"}
    assert {c.direction for c in sent if c.arrow.startswith(("gradient", "loss"))} == {""}
    lines, total = arrow_text(sent, most=3).splitlines(), f"{sum(c.bytes_sent for c in sent):,} B"
    assert len(lines) == min(len(arrow_rows(sent)), 4) + 1 and lines[-1].startswith("in all")
    assert lines[-1].endswith(total)


def test_weights_kept_for_a_step_are_gathered_once_and_their_gradients_scattered_once():
    """In a pipeline: however many microbatches, each weight of a stage is one gather, its gradient one
    reduce-scatter, in float32."""
    config = dataclasses.replace(LLAMA, num_layers=4)
    for schedule in ("1f1b", "zb-h1"):
        for microbatches in (4, 8):
            plan = Plan(
                "pp=2 fsdp=4", schedule=schedule, microbatches=microbatches, reshard_after_forward=False
            )
            sent = traffic.step_traffic(plan.resolve(config), 32, SEQ)
            held = sum(
                math.prod(w.shape) // (2 if path.startswith("blocks.") else 1)
                for path, w in config.weights().items()
            )
            for kind in ("all-gather", "reduce-scatter"):
                assert sent["fsdp", kind].count == len(config.weights())
                assert sent["fsdp", kind].bytes_sent == 4 * held * 3 // 4


@pytest.mark.parametrize("mesh", ["fsdp=16 tp=3", "tp=6 dp=16"])
def test_groups_that_divide_no_message_are_counted_alike(mesh):
    """A message of 4 bytes has no third and no sixteenth: formula and traced step round the same way."""
    config = dataclasses.replace(
        LLAMA, num_heads=6, num_kv_heads=6, head_width=10, ffn_width=102, vocab_size=258
    )
    plan = Plan(mesh, zero=0 if "fsdp" not in mesh else 3, reshard_after_forward=False)
    step = Step(config, plan, abstract_mesh(plan.mesh), optax.adamw(1e-3))
    jaxpr = step.run.trace(step.abstract_state, step.abstract_batch(48, 15)).jaxpr
    census = census_jaxpr(jaxpr, plan.mesh.sizes)
    assert by_arrow(census) == predicted_by_arrow(traffic.step_traffic(plan.resolve(config), 48, 15))
    exact = lambda kind, message, axes: formulas.sent_bytes(
        kind, message, math.prod(plan.mesh.sizes[a] for a in axes)
    )
    assert any(exact(e.kind, math.prod(e.shape) * 4, e.axes) % 1 for e in census if e.kind == "all-reduce")


@pytest.mark.parametrize("zero, volumes", [(0, "2Ψ"), (1, "2Ψ"), (2, "(a+1)Ψ"), (3, "3aΨ")])
def test_zero_moves_what_the_paper_says_with_accumulation(zero, volumes):
    """Of blocks, by N/(N-1): Rajbhandari et al. 2020, section 7. With a microbatches 2Ψ, 2Ψ, (a+1)Ψ, 3aΨ."""
    for a in (1, 2, 4):
        plan = Plan("fsdp=4", zero=zero, microbatches=a, remat="block")
        blocks = dataclasses.replace(LLAMA, num_layers=4)
        deep, shallow = (
            traffic.step_traffic(plan.resolve(c), BATCH, SEQ).total_bytes for c in (blocks, LLAMA)
        )
        difference = deep - shallow
        psi = 4 * (blocks.num_params - LLAMA.num_params)
        factor = {"2Ψ": 2, "(a+1)Ψ": a + 1, "3aΨ": 3 * a}[volumes]
        assert difference == factor * psi * 3 // 4
