"""Every timetable runs: loss and gradients of one device, what is sent, what is held; and the tables that are refused."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parity
import pytest
from parity import BATCH, LLAMA, QWEN, SEQ, solo, weights

from llmpar import attention, hlo, pipeline
from llmpar.mesh import make_mesh
from llmpar.notation import Arrow, Dim, Layout
from llmpar.plan import Plan
from llmpar.schedule import from_text, make, slots, timetable
from llmpar.step import WHOLE, Step

DEEP = dataclasses.replace(LLAMA, num_layers=4)


class Piped(Plan):
    """A plan that knows pp: it cuts the layers, and what it does not cut is summed over it."""

    def place(self, layout):
        placed = super().place(layout)
        return Layout(tuple(Dim(d.name, self.live("pp")) if d.name == "l" else d for d in placed.dims), placed.sums)

    def unreduced(self, dims):
        layout = super().unreduced(dims)
        return Layout(layout.dims, tuple(a for a in self.live("pp") if a not in layout.axes) + layout.sums)


class PipedStep(Step):
    """A step whose gradients come out of a pipeline."""

    def __init__(self, config, plan, schedule, save=False):
        self.schedule, self.save = schedule, save
        super().__init__(config, plan, make_mesh(plan.mesh), optax.sgd(1.0))

    def _accumulate(self, par, params, batch, total):
        loss, grads = pipeline.gradients(self.config, self.plan, self.schedule, par, params, batch, total, self.save)
        return par.carry_out(loss, Arrow(Layout((), ("pp",)), WHOLE), "loss"), grads


def trace(config, plan, schedule, rows=BATCH, seq=SEQ, **how):
    """The traced gradients of `PipedStep`, nothing compiled."""
    step = PipedStep(config, Piped(plan), schedule, **how)
    return jax.jit(step.gradients).trace(step.abstract_state.params, step.abstract_batch(rows, seq))


def assert_same(config, plan, schedule, step_class=PipedStep, order=None, **how):
    """As `parity.assert_same`, the blocks stored in `layer_order`."""
    plan = Piped(plan) if isinstance(plan, str) else plan
    pipeline.check(config, plan, schedule, BATCH)
    order = pipeline.layer_order(schedule, config.num_layers) if order is None else order
    dealt = attention.order(plan.order, SEQ, plan.mesh.sp) if plan.mesh.sp > 1 else np.arange(SEQ)
    batch = {name: x[:, dealt] for name, x in parity.batch().items()}
    step = step_class(config, plan, schedule, **how)
    params = jax.device_put(pipeline.arrange(weights(config), order), step.shardings.params)
    grads, metrics = jax.jit(step.gradients)(params, jax.device_put(batch, step.batch_sharding))
    got = pipeline.arrange(jax.tree.map(np.asarray, grads), np.argsort(order))
    want_loss, want = solo(config)
    assert abs(float(metrics["loss"]) - want_loss) < 1e-5
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(g - w).max() / np.abs(w).max()
        assert error < 1e-5, f"gradient of {jax.tree_util.keystr(path)} is off by {error:.1e}"
    norm = float(np.sqrt(sum((np.asarray(w, np.float64) ** 2).sum() for w in jax.tree.leaves(want))))
    assert abs(float(metrics["grad_norm"]) - norm) < 1e-5 * norm


# Written by hand: the second microbatch overtakes nobody, but stage 1 puts its weights' gradients off to the end.
WRITTEN = from_text("F0 F1 F2 F3 B0 B1 W0 B2 W1 B3 W2 W3\nF0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3")
CASES = {
    "gpipe, m = p, tp": (LLAMA, "pp=2 dp=2 tp=2", make("gpipe", 2, 2), {}),
    "1f1b, m = 2p, fsdp": (DEEP, "pp=4 fsdp=2", make("1f1b", 4, 8), {}),
    "1f1b, m = 2p, tied, biases, tp_sequence": (QWEN, Piped("pp=2 fsdp=2 tp=2", tp_sequence=True), make("1f1b", 2, 4), {}),
    "1f1b, sp, remat": (LLAMA, Piped("pp=2 sp=2 dp=2", sequence="ulysses", remat="block"), make("1f1b", 2, 2), {}),
    "interleaved, m = 2p, ZeRO-2": (DEEP, Piped("pp=2 dp=2 fsdp=2", zero=2), make("interleaved", 2, 4), {}),
    "zb-h1, m = p, tp_sequence": (DEEP, Piped("pp=4 tp=2", tp_sequence=True), make("zb-h1", 4, 4), {}),
    "zb-v, m = 2p, fsdp tp": (DEEP, "pp=2 fsdp=2 tp=2", make("zb-v", 2, 4), {}),
    "written by hand, saved": (LLAMA, "pp=2 dp=2", WRITTEN, {"save": True}),
    "1f1b, saved": (LLAMA, "pp=2 tp=2", make("1f1b", 2, 4), {"save": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pipeline_gives_the_loss_and_gradients_of_one_device(case):
    config, plan, schedule, how = CASES[case]
    assert_same(config, plan, schedule, **how)


EIGHT = dataclasses.replace(LLAMA, num_layers=8)
NAMES = "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "dualpipev"
INSIDE = "dp=2", "fsdp=2", "tp=2", "sp=2"


EVERY = list(itertools.product(NAMES, (2, 4), (1, 2), INSIDE, (False, True)))


@pytest.mark.full
@pytest.mark.parametrize("name, p, times, inside, save", EVERY)
def test_every_pipeline_gives_the_loss_and_gradients_of_one_device(name, p, times, inside, save):
    assert_same(EIGHT, f"pp={p} {inside}", make(name, p, times * p), save=save)


# ----------------------------------------------------------------------------------------------------- what is sent


@functools.cache
def traced(name, p, m, inside="", save=False):
    """The jaxpr of a pipeline's gradients and the executor that wrote it."""
    seen, run = [], pipeline._Executor.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline._Executor, "run", lambda self: (seen.append(self), run(self))[1])
        config = EIGHT if name == "interleaved" else DEEP
        jaxpr = trace(config, f"pp={p} {inside}", make(name, p, m), save=save).jaxpr
    return jaxpr, seen[-1]


def inner(eqn):
    return [x for x in jax.tree.leaves(eqn.params) if hasattr(x, "eqns")]


def permutes(jaxpr):
    for eqn in jaxpr.eqns:
        yield from [eqn.params["perm"]] if eqn.primitive.name == "ppermute" else []
        for sub in inner(eqn):
            yield from permutes(sub)


@pytest.mark.parametrize("name, p, m", [("gpipe", 2, 4), ("1f1b", 4, 8), ("interleaved", 4, 4), ("zb-v", 2, 4)])
def test_what_is_sent_is_what_the_table_says(name, p, m):
    """A permute per direction in the loop's body, between the pairs that the table has, left out in ticks without a sender."""
    if name != "1f1b" and p == 4:
        table = timetable(make(name, p, m))
        assert table.hops[p - 1, 0] == m and table.hops[0, p - 1] == m  # round the end, for the second chunk
    jaxpr, executor = traced(name, p, m)
    table, send = timetable(executor.schedule), executor.slots.send
    assert {pair for perm in permutes(jaxpr) for pair in perm} == {tuple(pair) for pair in np.argwhere(table.hops).tolist()}
    rows = hlo.census_table(hlo.census_jaxpr(jaxpr, Piped(f"pp={p}").mesh.sizes))
    stream = BATCH // m * SEQ * DEEP.width * 4
    count = 2 * len(table.ticks)
    assert rows["pp", "collective-permute"] == {"count": count, "bytes_sent": count * stream}
    assert rows["pp", "all-reduce"]["count"] == 5  # embedding, head and last norm; the loss; the norm of the gradients
    sending = [(send == way).any(1).sum() for way in (1, -1)]
    assert sum(sending) < count and (send != 0).sum() == table.hops.sum()
    assert name != "gpipe" or sending == [m, m]


def test_a_copy_of_the_layers_travels_nowhere():
    """Weights of blocks stay on their stage: only whole weights are summed over pp, once each."""
    jaxpr, _ = traced("1f1b", 4, 8)
    found = [c for c in hlo.census_jaxpr(jaxpr, Piped("pp=4").mesh.sizes) if c.kind == "all-reduce"]
    assert sorted(c.shape for c in found) == [(), (), (64,), (264, 64), (264, 64)] and all(c.count == 1 for c in found)


# ----------------------------------------------------------------------------------------------------- what is computed


def flops(jaxpr):
    """FLOPs of the matrix products, loops multiplied, of branches the dearest."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
        elif subs := [flops(sub) for sub in inner(eqn)]:
            total += max(subs) if eqn.primitive.name == "cond" else sum(subs) * eqn.params.get("length", 1)
    return total


def test_w_is_the_weights_products_and_nothing_runs_twice():
    """B recomputes F, and B and W together are the joint backward; with ``save`` nothing is recomputed at all."""
    _, whole = traced("1f1b", 4, 8)
    _, zero_bubble = traced("zb-h1", 4, 8)
    _, saved = traced("1f1b", 4, 8, save=True)
    _, both = traced("zb-h1", 4, 8, save=True)
    joint = flops(whole.b.jaxpr)
    layer = sum(int(np.prod(shape[1:])) for path, (dims, shape) in DEEP.param_shapes().items() if len(shape) > 2)
    assert flops(zero_bubble.w.jaxpr) == 2 * BATCH // 8 * SEQ * layer == flops(both.w.jaxpr)
    assert flops(zero_bubble.b.jaxpr) + flops(zero_bubble.w.jaxpr) == joint
    assert flops(saved.f.jaxpr) + flops(saved.b.jaxpr) == joint
    assert flops(both.f.jaxpr) + flops(both.b.jaxpr) + flops(both.w.jaxpr) == joint


def test_a_cut_function_gives_the_same_bits_and_no_product_twice():
    """Any function: here the gradients of two layers and a scan, cut between those of its input and its weights."""

    def f(weights, x, dy):
        def g(w, x):
            y = jnp.tanh(x @ w["first"]) @ w["second"]
            return jax.lax.scan(lambda y, w: (jnp.sin(y @ w), None), y, w["more"])[0]

        dw, dx = jax.vjp(g, weights, x)[1](dy)
        return dx, dw

    key = iter(jax.random.split(jax.random.key(0), 5))
    w = {name: jax.random.normal(next(key), shape) for name, shape in dict(first=(4, 8), second=(8, 4), more=(3, 4, 4)).items()}
    x, dy = (jax.random.normal(next(key), (5, 4)) for _ in "xy")
    whole, shape = pipeline.trace(f, w, x, dy)
    leaves = jax.tree.leaves((w, x, dy))
    first, second, crossing = pipeline.split(whole, 1, 3, 5)
    dx, *kept = first(*leaves)
    got = jax.tree.unflatten(jax.tree.structure(shape), [dx, *second(*leaves[:3], *kept)])
    assert len(kept) == len(crossing) > 0
    jax.tree.map(np.testing.assert_array_equal, got, f(w, x, dy))
    assert flops(first.jaxpr) + flops(second.jaxpr) == flops(whole.jaxpr) and flops(second.jaxpr) == 2 * 2 * 5 * 4 * 8


# ----------------------------------------------------------------------------------------------------- what is held


def test_saved_inputs_are_as_many_as_stages_for_1f1b_and_as_microbatches_for_gpipe():
    for m in (4, 8, 64):
        count = lambda name: slots(timetable(make(name, 4, m))).num_saved.tolist()  # noqa: B023
        assert count("1f1b") == [4, 3, 2, 1] and count("gpipe") == [m] * 4 and count("zb-h1") == [4] * 4


def test_compiled_memory_of_1f1b_is_flat_in_m_and_gpipes_grows_by_an_input_per_microbatch():
    """Temporary bytes at two rows per microbatch. 1 %: bookkeeping of ticks and tokens, and the compiler's alignment."""

    def temp(name, m):
        compiled = trace(LLAMA, "pp=2", make(name, 2, m), rows=2 * m).lower().compile()
        return hlo.compiled_memory(compiled)["temp_bytes"]

    stream, tokens = 2 * SEQ * LLAMA.width * 4, 2 * SEQ * 4 * 4
    assert temp("1f1b", 8) == pytest.approx(temp("1f1b", 64), rel=0.01)
    assert temp("gpipe", 64) - temp("gpipe", 8) == pytest.approx(56 * (stream + tokens), rel=0.02)


# ----------------------------------------------------------------------------------------------------- what is refused

TINY = dict(config=LLAMA, plan="pp=2", schedule=make("1f1b", 2, 4), batch_size=BATCH)
REFUSED = {
    "stage 1 never runs B1": dict(schedule=from_text("F0 F1 B0 B1\nF0 B0 F1")),
    "Cycle: B0 on stage 0 -> B0 on stage 1 -> F1 on stage 1": dict(schedule=from_text("F0 B0 F1 B1\nF0 F1 B0 B1")),
    "runs F0 twice": dict(schedule=from_text("F0 F0 B0\nF0 B0")),
    "has 4 stages but mesh 'pp=2' has pp=2; use pp=4": dict(schedule=make("1f1b", 4, 4)),
    "2 layers are no multiple of stages·chunks = 4; use 4 layers": dict(schedule=make("interleaved", 2, 4)),
    "two copies of the model, which is not implemented; use dualpipev": dict(schedule=make("dualpipe", 2, 4)),
    "microbatches·dp·fsdp·ep = 4; use 8": dict(batch_size=6),
    "reading='auto' does not go": dict(plan=Plan("pp=2", reading="auto")),
    "accumulate=2 does not go": dict(plan=Plan("pp=2", accumulate=2)),
    "reduce='layer' does not go": dict(plan=Plan("pp=2", zero=0, reduce="layer")),
    "use sequence='ulysses' or 'gather'": dict(plan="pp=2 sp=2"),
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_run_is_refused_before_compilation(sentence):
    asked = TINY | REFUSED[sentence]
    plan = asked["plan"] if isinstance(asked["plan"], Plan) else Plan(asked["plan"])
    with pytest.raises(ValueError) as refusal:
        pipeline.check(asked["config"], plan, asked["schedule"], asked["batch_size"])
    assert sentence in str(refusal.value)


def test_a_wrong_table_is_not_even_traced():
    with pytest.raises(ValueError, match="never runs B1"):
        trace(LLAMA, "pp=2", from_text("F0 F1 B0 B1\nF0 B0 F1"))


# --------------------------------------------------------------------------------------------------------------- faults


def test_layers_in_another_order_are_noticed():
    config, plan, schedule, _ = CASES["interleaved, m = 2p, ZeRO-2"]
    assert pipeline.layer_order(schedule, 4).tolist() == [0, 2, 1, 3]
    assert pipeline.layer_order(make("zb-v", 2, 4), 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    with pytest.raises(AssertionError):
        assert_same(config, plan, schedule, order=np.arange(4))


def test_a_slot_given_away_too_early_is_noticed(monkeypatch):
    def cramped(table):
        return dataclasses.replace(slots(table), saved=np.minimum(slots(table).saved, 0))

    monkeypatch.setattr(pipeline, "slots", cramped)
    with pytest.raises(AssertionError, match="is off by"):
        assert_same(LLAMA, "pp=2 dp=2", make("1f1b", 2, 4))


def test_a_missing_sum_over_stages_is_noticed():
    class Forgetful(Piped):
        def unreduced(self, dims):
            return Plan.unreduced(self, dims)

    with pytest.raises((ValueError, TypeError)):
        assert_same(LLAMA, Forgetful("pp=2 dp=2"), make("1f1b", 2, 4))
