"""What moves: formula = jaxpr = partitioned HLO; and rings of permutes travel beside products."""

import dataclasses
import math

import jax
import optax
import pytest
from parity import BATCH, LLAMA, SEQ, by_arrow, predicted, predicted_by_arrow

from llmpar.inspect.census import arrow_rows, arrow_text, census_hlo, partitioned_hlo, read_program
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.inspect.sent import unordered
from llmpar.parallel.mesh import abstract_mesh, make_mesh
from llmpar.plan.plan import Plan
from llmpar.predict import formulas, traffic
from llmpar.training.step import Step


def step_of(plan):
    plan.resolve(LLAMA, None, BATCH, SEQ)
    return Step(LLAMA, plan, make_mesh(plan.mesh), optax.adamw(1e-3))


def traced(step):
    return step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr


def test_an_arrow_sends_the_same_before_and_after_the_compiler():
    plan = Plan("dp=2 fsdp=2 tp=2", tp_sequence=True, remat="block")
    step = step_of(plan)
    jaxpr, text = census_jaxpr(traced(step), plan.mesh.sizes), partitioned_hlo(step.lower(BATCH, SEQ))
    sent = census_hlo(text, step.mesh)
    assert by_arrow(jaxpr) == predicted(LLAMA, plan)
    by_text = lambda rows: sorted(map(str, rows))
    assert by_text(arrow_rows(jaxpr)) == by_text(arrow_rows(sent))
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


def test_each_hop_travels_beside_a_product_and_no_product_waits_for_it():
    """A barrier joins what a hop brings with what was multiplied meanwhile: neither may come later."""
    found = []

    def walk(jaxpr):
        made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

        def before(v, seen):  # the equations that a value follows from, back to the last barrier
            eqn = None if hasattr(v, "val") else made.get(v)
            if eqn is None or id(eqn) in seen or eqn.primitive.name == "optimization_barrier":
                return seen
            seen[id(eqn)] = eqn
            for operand in eqn.invars:
                before(operand, seen)
            return seen

        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "optimization_barrier":
                chains = [list(before(v, {}).values()) for v in eqn.invars]
                hops = [any(e.primitive.name == "ppermute" for e in chain) for chain in chains]
                if any(hops):
                    others = [chain for chain, is_hop in zip(chains, hops, strict=True) if not is_hop]
                    beside = " ".join(str(e) for e in sum(others, []))
                    found.append(sum(hops) == 1 and "dot_general" in beside)
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(traced(step_of(Plan("tp=4", tp_sequence=True, tp_comm_overlap=True))).jaxpr)
    assert found == [True] * (8 * 3)  # four rings forward, four backward


def test_a_program_that_the_cache_has_is_read_all_the_same():
    """A program from the cache would skip the pass whose text is read."""
    mesh, whole = make_mesh("tp=8"), jax.P()
    total = jax.shard_map(lambda x: jax.lax.psum(x, "tp"), mesh=mesh, in_specs=jax.P("tp"), out_specs=whole)
    texts = [partitioned_hlo(jax.jit(total).lower(jax.numpy.ones(24))) for _ in range(2)]
    assert [len(census_hlo(text, mesh)) for text in texts] == [1, 1]


@pytest.mark.long
def test_data_orders_the_rings_on_simulated_devices():
    """They take two permutes of one program for one another where nothing says which is first."""
    step = step_of(Plan("fsdp=2 tp=4", tp_sequence=True, tp_comm_overlap=True, remat="block"))
    compiled, text = read_program(step.lower(BATCH, SEQ))
    for program in (text, compiled.as_text()):
        pairs = unordered(program, step.mesh)
        assert not [pair for pair in pairs if {c.kind for c in pair} == {"collective-permute"}]
    assert sum(c.count for c in census_hlo(text, step.mesh) if c.kind == "collective-permute")
