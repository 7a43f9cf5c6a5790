"""One batch, one set of weights, and what most tests ask: does a plan give what one device gives?"""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.interpreters import partial_eval

from llmpar import moe
from llmpar.config import preset
from llmpar.execution import SUITS
from llmpar.inspect.census import arrow_rows, census_hlo, census_table, compiled_memory, read_program
from llmpar.inspect.look import unordered
from llmpar.mesh import make_mesh
from llmpar.notation import MeshShape
from llmpar.par import Solo
from llmpar.plan import Plan, Resolved
from llmpar.predict import memory, traffic
from llmpar.predict.tolerance import Unit, tolerance
from llmpar.step import State, Step
from llmpar.timetable import branch_shares
from llmpar.training import balance
from llmpar.weights import init_params, model_graph, trained

BATCH, SEQ = 16, 16
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
MOE = dataclasses.replace(preset("tiny-moe"), num_layers=2)
QWEN = dataclasses.replace(LLAMA, name="tiny-qwen", tied=True, qkv_bias=True, qk_norm=True, head_width=8)


def planted(kind: type[Resolved], plan: Plan, config):
    """A plan as a class of `Resolved` that plants a fault has it; a `Step` takes it as it is."""
    decided = plan.resolve(config)
    return kind(**{field.name: getattr(decided, field.name) for field in dataclasses.fields(decided)})


def by_arrow(census):
    """What a census counted, as {(axes, kind, arrow): (executions, bytes)}."""
    found: dict[tuple, list[int]] = {}
    for c in census:
        row = found.setdefault((",".join(c.axes), c.kind, c.arrow), [0, 0])
        row[0], row[1] = row[0] + c.count, row[1] + c.bytes_sent
    return {key: tuple(row) for key, row in found.items()}


def predicted_by_arrow(traffic):
    """The same of a prediction."""
    return {(*key, text): tuple(line) for key, row in traffic.items() for text, line in row.arrows.items()}


@functools.cache
def batch(seed: int = 0):
    """Random tokens, two documents a row, targets left out unevenly: a mean of means is another number."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (BATCH, SEQ + 1)).astype(np.int32)
    targets = np.where(rng.random((BATCH, SEQ)) < 0.2, -1, tokens[:, 1:]).astype(np.int32)
    targets[0] = -1
    border = rng.integers(1, SEQ, (BATCH, 1))
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), (BATCH, SEQ))
    segments = np.where(positions < border, 1, 2).astype(np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "positions": np.array(positions),
        "segments": segments,
    }


@functools.cache
def weights(config):
    """Fresh weights with biases and scales that are not trivial."""
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(1))
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda w: np.asarray(w) + 0.05 * rng.standard_normal(w.shape).astype(np.float32), params
    )


def every_expert(experts, par, x, weights, chosen, gate, up, down):
    """`moe.visit` without sending or sorting: all tokens through all experts, most with weight 0."""
    share = jnp.einsum("bske,bsk->bse", jax.nn.one_hot(chosen, experts.num_experts), weights)
    y = jax.nn.silu(jnp.einsum("bsd,edm->bsem", x, gate)) * jnp.einsum("bsd,edm->bsem", x, up)
    return jnp.einsum("bsem,emd,bse->bsd", y, down, share.astype(x.dtype))


@functools.cache
def solo(config, dtype: str = "float32"):
    """Loss and gradients of `Solo`: the reference. Experts are all evaluated densely."""
    par = Solo(Plan(dtype=dtype).resolve())

    def loss(params, batch):
        total = (batch["targets"] >= 0).sum().astype(jnp.float32)
        return nnx.merge(model_graph(config), params).loss(batch, par)[0] / total

    with mock.patch.object(moe, "visit", every_expert):
        value, grads = jax.jit(jax.value_and_grad(loss))(weights(config), batch())
    return float(value), jax.tree.map(np.asarray, trained(grads, config))


@functools.cache
def logits_of(config):
    """The logits of (weights, batch) by `Solo`, in float32."""
    return jax.jit(lambda params, batch: nnx.merge(model_graph(config), params).logits(batch, Solo()))


def spread(config, plan: Plan, step_class=Step):
    """Loss, global norm and gradients of a step, whole, layers and positions in natural order again."""
    plan.check(config, BATCH, SEQ)
    step = step_class(config, plan, make_mesh(plan.mesh), optax.adamw(1e-3))
    data = put(dealt(batch(), plan), step.batch_sharding)
    # weights where none should be used
    padded = arranged(weights(config), np.minimum(step.layer_order, config.num_layers - 1))
    grads, metrics = jax.jit(step.gradients)(put(padded, step.shardings.params), data)
    grads = arranged(
        jax.tree.map(whole, grads), np.argsort(step.layer_order, stable=True)[: config.num_layers]
    )
    return float(metrics["loss"]), float(metrics["grad_norm"]), grads


def put(tree, where):
    """Lay host arrays out on devices; of several processes each takes its own pieces of them."""
    if jax.process_count() == 1:
        return jax.device_put(tree, where)
    shardings = jax.tree.map(lambda _: where, tree) if isinstance(where, jax.sharding.Sharding) else where
    on = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
    return jax.tree.map(on, tree, shardings)


def whole(x):
    """All of an array, in every process."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def dealt(data, plan: Plan):
    """A batch, each row in the order that the plan asks for."""
    places = balance.row_orders(plan.sequence_order, data["segments"], plan.mesh.sp)
    return {k: np.take_along_axis(x, places, 1) for k, x in data.items()}


def arranged(params, order):
    """Weights or gradients with their layers in another order."""
    return params | {"blocks": jax.tree.map(lambda w: w[order], params["blocks"])}


def with_reading(reading):
    """A `Step` whose plan is read by another class, one with a planted fault."""

    class Faulty(Step):
        def gradients(self, params, batch):
            return self._gradients(reading(self.plan), params, batch)

    return Faulty


def allowed(config, plan: Plan, products: Unit = "float32") -> dict[str, float]:
    """How far loss, norm and each gradient may be from `Solo`'s, relative: as far as sums in another order
    are expected to be, and in float32 never more than 1e-5, of whatever size the model is."""
    fresh = {"logits": 0.5, "loss": math.log(config.vocab_size)}
    spread = tolerance(plan.resolve(config), BATCH, SEQ, products, **fresh)
    cap = 1e-5 if products == plan.dtype == "float32" else 1.0
    return {what: spread.bound(what, cap) for what in ("loss", "grad_norm", "gradient")}


def assert_same(config, plan: Plan, products: Unit = "float32", step_class=Step):
    """Loss, global norm, and every gradient leaf by its largest element, as near to `Solo`'s as `allowed`.

    ``products`` says what the devices round operands of float32 products to.
    """
    compare_leaves(config, plan, *spread(config, plan, step_class), products)


def compare_leaves(config, plan: Plan, loss: float, norm: float, got, products: Unit = "float32"):
    """The comparison itself."""
    tolerances = allowed(config, plan, products)
    want_loss, want = solo(config)
    assert abs(loss - want_loss) < tolerances["loss"] * want_loss, f"loss {loss} for {want_loss}"
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(g - w).max() / (np.abs(w).max() or 1)
        told = f"gradient of {jax.tree_util.keystr(path)} is off by {error:.1e}"
        assert error < tolerances["gradient"], told
    want_norm = float(np.sqrt(sum((np.asarray(w, np.float64) ** 2).sum() for w in jax.tree.leaves(want))))
    assert abs(norm - want_norm) < tolerances["grad_norm"] * want_norm, f"norm {norm} for {want_norm}"


ONCE = "loss, tokens and norm"
"""What is summed once needs everything, so that no device can enter it early."""


def check(config, plan: Plan, within: float = math.inf) -> None:
    """The state of an optimizer that remembers the last gradient is the gradient. ``within`` this factor is
    what a device holds in all: whether it fits is said as the compiled program has it, but for what lies
    between."""
    plan.check(config, BATCH, SEQ)
    step = Step(config, plan, make_mesh(plan.mesh), optax.trace(0.0), clip=None)
    compiled, text = read_program(step.lower(BATCH, SEQ))
    given = memory.argument_bytes(plan.resolve(config), BATCH, SEQ, moments=1, scalars=1)
    program, estimate = compiled_memory(compiled), memory.temp_bytes(plan.resolve(config), BATCH, SEQ)
    assert program["argument_bytes"] == sum(given.values())
    apart = (sum(given.values()) + estimate) / (program["argument_bytes"] + program["temp_bytes"])
    assert 1 / within < apart < within, f"temporaries: {estimate} B, and compiled {program['temp_bytes']} B"
    if plan.reading == "manual":  # the others leave it to XLA (test_explicit.py has the fourth's)
        assert ONCE not in {c.arrow for pair in unordered(text, step.mesh) for c in pair}
        for stage in range(plan.mesh.pp):
            taken = branch_shares(plan.pipeline, config.num_layers)[stage]
            census = census_hlo(text, step.mesh, taken)
            want = predicted_by_arrow(traffic.step_traffic(step.plan, BATCH, SEQ, stage))
            assert by_arrow(census) == want, f"stage {stage}"
            assert not any(c.conditional for c in census) and all(c.arrow for c in census)
            sums = {}
            for row in arrow_rows(census):
                total = sums.setdefault((row["axis"], row["kind"]), {"count": 0, "bytes_sent": 0})
                total |= {number: total[number] + row[number] for number in total}
            assert sums == census_table(census)
    # Weights where none should be used.
    start = arranged(weights(config), np.minimum(step.layer_order, config.num_layers - 1))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.abstract_state.optimizer)
    start = jax.tree.map(lambda w, like: w.astype(like.dtype), start, step.abstract_state.params)
    state = put(State(start, zeros, np.int32(0)), step.shardings)
    state, metrics = compiled(state, put(dealt(batch(), plan), step.batch_sharding))
    natural = np.argsort(step.layer_order, stable=True)[: config.num_layers]
    grads = arranged(jax.tree.map(np.asarray, state.optimizer.trace), natural)
    compare_leaves(config, plan, float(metrics["loss"]), float(metrics["grad_norm"]), grads)
    if config.experts:
        each = config.experts.top_k * BATCH * SEQ
        assert (np.asarray(metrics["load"]).sum(1) == each).all() and not np.any(metrics["dropped"])


def emulated_ragged_all_to_all(x, out, begin, send, mine, recv, *, axis_name):
    """`lax.ragged_all_to_all` from gathers, after its documentation: rows ``begin[j] : begin[j] + send[j]``
    of rank i arrive at rank j from its row ``mine[j]`` on."""
    rank, rows = jax.lax.axis_index(axis_name), jnp.arange(x.shape[0])[None]
    sent, starts, sizes, ends = (jax.lax.all_gather(y, axis_name) for y in (x, begin, send, mine))
    starts, sizes, ends = (y[:, rank, None] for y in (starts, sizes, ends))
    here = (rows >= ends) & (rows < ends + sizes)  # ranks × rows
    source = jnp.where(
        here, rows - ends + starts + x.shape[0] * jnp.arange(len(sent))[:, None], sent.size
    ).min(0)
    arrived = sent.reshape(-1, *x.shape[1:]).at[source].get(mode="fill", fill_value=0)
    return jnp.where(here.any(0)[:, None], arrived, out)


def ragged_on_cpus():
    """A context in which plans may ask CPUs for the ragged all-to-all."""
    return mock.patch.dict(SUITS["dispatch"], cpu=("padded", "ragged"))


def live(jaxpr):
    """The jaxpr without what nobody reads, which a compiler leaves out."""
    return partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[0]


def all_plans(products=(1, 2, 4, 8)):
    """Every mesh of dp, fsdp and tp with these products, at every ZeRO stage and with and without sequence
    parallelism, where these make a difference."""
    for dp, fsdp, tp in itertools.product((1, 2, 4, 8), repeat=3):
        if dp * fsdp * tp in products:
            for zero in (0, 1, 2, 3) if fsdp > 1 else (0,):
                for tp_sequence in (False, True) if tp > 1 else (False,):
                    yield Plan(MeshShape(dp=dp, fsdp=fsdp, tp=tp), zero=zero, tp_sequence=tp_sequence)


def name(plan: Plan) -> str:
    """A plan's id in the list of tests: what differs from the defaults."""
    changed = [
        f"{f.name}={getattr(plan, f.name)}"
        for f in dataclasses.fields(plan)
        if f.name != "mesh" and getattr(plan, f.name) != f.default
    ]
    return " ".join([str(plan.mesh), *changed])
