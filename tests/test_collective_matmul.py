"""Collective matmul: rings of permutes with the products between their hops."""

import dataclasses

import jax
import optax
import pytest
from parity import BATCH, LLAMA, MOE, SEQ, by_arrow, predicted_by_arrow

from llmpar.inspect.census import census_hlo, read_program
from llmpar.inspect.jaxpr import census_jaxpr
from llmpar.inspect.sent import unordered
from llmpar.parallel.mesh import make_mesh
from llmpar.plan.plan import Plan
from llmpar.predict import traffic
from llmpar.training.step import Step

RINGS = {"stream b s d -> attention b s d", "attention b s d +n -> stream b s d"}
RINGS |= {"stream b s d -> ffn b s d", "ffn b s d +m -> stream b s d"}


def overlapped(mesh, **fields):
    return Plan(mesh, tp_sequence=True, tp_comm_overlap=True, **fields)


def traced(config, plan):
    plan.resolve(config, None, BATCH, SEQ)
    step = Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    return step, step.run.trace(step.abstract_state, step.abstract_batch(BATCH, SEQ)).jaxpr


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=lambda config: config.name)
def test_a_ring_sends_the_bytes_of_the_collective_that_it_replaces(config):
    """Arrow by arrow: n - 1 hops of a block each. What no product goes with stays as it is. (Whatever is
    recomputed: the lines of plans.txt.)"""
    plan = overlapped("fsdp=2 tp=4", remat="selective")
    waits = dataclasses.replace(plan, tp_comm_overlap=False)
    found, before = (
        predicted_by_arrow(traffic.step_traffic(p.resolve(config), BATCH, SEQ)) for p in (plan, waits)
    )
    assert by_arrow(census_jaxpr(traced(config, plan)[1], plan.mesh.sizes)) == found
    rings = {text for _, kind, text in found if kind == "collective-permute"}
    assert rings == {text for text in RINGS if "ffn" not in text or not config.experts}
    sums = {"all-gather": [0, 0], "reduce-scatter": [0, 0]}
    for (axis, kind, text), (count, sent) in before.items():
        if axis == "tp" and text in rings:
            sums[kind] = [sums[kind][0] + count, sums[kind][1] + sent]
        else:
            assert found[axis, kind, text] == (count, sent)
    permutes = [row for (_, kind, _), row in found.items() if kind == "collective-permute"]
    hops = [sum(column) for column in zip(*permutes, strict=True)]
    (gathers, gathered), (scatters, scattered) = sums.values()
    assert hops == [3 * (gathers + scatters), gathered + scattered]


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

    _, jaxpr = traced(LLAMA, overlapped("tp=4"))
    walk(jaxpr.jaxpr)
    assert found == [True] * (8 * 3)  # four rings forward, four backward


@pytest.mark.long
def test_data_orders_the_rings_on_simulated_devices():
    """They take two permutes of one program for one another where nothing says which is first."""
    step, _ = traced(LLAMA, overlapped("fsdp=2 tp=4", remat="block"))
    compiled, text = read_program(step.lower(BATCH, SEQ))
    for program in (text, compiled.as_text()):
        pairs = unordered(program, step.mesh)
        assert not [pair for pair in pairs if {c.kind for c in pair} == {"collective-permute"}]
    assert sum(c.count for c in census_hlo(text, step.mesh) if c.kind == "collective-permute")
