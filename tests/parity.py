"""One batch, one set of weights, and what most tests ask: does a plan give what one device gives?"""

import collections
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils
from jax.interpreters import partial_eval

from llmpar.inspect.census import arrow_rows, census_hlo, census_table, compiled_memory, read_program
from llmpar.inspect.sent import unordered
from llmpar.model import attention, llama
from llmpar.model.weights import model_graph, trainable_params
from llmpar.parallel.mesh import make_mesh, platform_of
from llmpar.parallel.modes import Solo
from llmpar.plan.backend import SUITS
from llmpar.plan.model_config import kind_of
from llmpar.plan.plan import Plan
from llmpar.plan.presets import described_model, preset
from llmpar.plan.timetable import branch_shares
from llmpar.predict import memory, traffic
from llmpar.predict.tolerance import Unit, tolerance
from llmpar.training import balance, layer_order
from llmpar.training.step import State, Step

BATCH, SEQ = 16, 16
LLAMA = dataclasses.replace(preset("tiny"), num_layers=2)
MOE = dataclasses.replace(preset("tiny-moe"), num_layers=2)
QWEN = dataclasses.replace(LLAMA, name="tiny-qwen", tied=True, qkv_bias=True, qk_norm=True, head_width=8)


FIXTURES = pathlib.Path(__file__).parent / "fixtures"


@functools.cache
def family(name: str, vocab_size: int = 256):
    """The small model of a family whose layers are not Llama's, as its fixture describes it."""
    with np.load(FIXTURES / f"hf_{name}.npz") as file:
        raw = json.loads(str(file["config"])) | {"vocab_size": vocab_size}
    if raw.get("rms_norm_eps", 0) > 0.01:  # a large one hides what a layer adds
        raw["rms_norm_eps"] = 0.01
    return described_model(name, raw).must_run()


def by_arrow(census):
    """What a census counted, as {(axes, kind, arrow): (executions, bytes)}."""
    found: dict[tuple, list[int]] = {}
    for c in census:
        row = found.setdefault((",".join(c.axes), c.kind, c.arrow), [0, 0])
        row[0], row[1] = row[0] + c.count, row[1] + c.bytes_sent
    return {key: tuple(row) for key, row in found.items()}


def of_either(rows):
    """Gradients of attention and a feed-forward beside it may travel once: one row, of both."""
    found = {}
    for (axes, kind, arrow), numbers in rows.items():
        key = axes, kind, arrow.replace("attention b s d +n ->", "ffn b s d +m ->")
        found[key] = tuple(map(sum, zip(found.get(key, (0, 0)), numbers, strict=True)))
    return found


def predicted_by_arrow(traffic):
    return {(*key, text): tuple(line) for key, row in traffic.items() for text, line in row.arrows.items()}


def predicted(config, plan: Plan):
    """What is predicted of a step, as `predicted_by_arrow` says it."""
    return predicted_by_arrow(traffic.step_traffic(plan.resolve(config), BATCH, SEQ))


def full_rows(tokens, targets=None):
    """A batch of rows of one document each."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    known = {"tokens": tokens, "positions": positions, "segments": np.ones_like(positions)}
    return known if targets is None else known | {"targets": targets}


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
    told = {"tokens": tokens[:, :-1], "targets": targets}
    return told | {"positions": np.array(positions), "segments": segments}


@functools.cache
def weights(config):
    """Fresh weights with biases and scales that are not trivial; NumPy compiles nothing."""
    rng = np.random.default_rng(2)
    draw = lambda w: rng.normal(0.0 if w.std else w.fill, math.hypot(w.std, 0.05), w.shape)
    flat = {path: draw(w).astype(np.float32) for path, w in config.weights().items()}
    return unflatten_dict(flat, sep=".")


@functools.cache
def reference(config):
    """Loss, what the routers tell, and gradients of what is trained, by `oracle` in float64."""
    with oracle.in_float64():
        start = {
            path: np.asarray(w, np.float64) for path, w in flatten_dict(weights(config), sep=".").items()
        }
        loss = lambda w: oracle.loss(w, batch(), config, np.zeros(SEQ, int))
        (value, told), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(start)
    told, grads = jax.tree.map(np.asarray, (told, grads))
    return float(value), told, trainable_params(unflatten_dict(grads, sep="."), config)


def solo(config):
    """Loss and gradients of one device."""
    return reference(config)[::2]


@functools.cache
def logits_of(config):
    """The logits of (weights, batch) by `Solo`, in float32."""

    def logits(params, batch):
        x, head, _ = nnx.merge(model_graph(config), params).hidden_and_head(batch, Solo())
        return attention.capped(llama.logits_of(x, head), config.variant.logit_cap)

    return jax.jit(logits)


def gradients_of(config, plan: Plan, step_class=Step):
    """A step, and its compiled gradients of weights and a batch: one program for all of them."""
    mesh = make_mesh(str(plan.mesh))
    plan = plan.resolve(config, platform_of(mesh), BATCH, SEQ)
    step = step_class(config, plan, mesh, optax.adamw(1e-3))
    return step, jax.jit(step.gradients)


def answer(step: Step, run, data):
    """Loss, global norm and gradients, whole, layers and positions in natural order again."""
    given = put(padded(step), step.shardings.params), put(dealt(data, step.plan), step.batch_sharding)
    grads, metrics = run(*given)
    return float(metrics["loss"]), float(metrics["grad_norm"]), natural(step, jax.tree.map(whole, grads))


def spread(config, plan: Plan, step_class=Step):
    return answer(*gradients_of(config, plan, step_class), batch())


def padded(step: Step, params=None):
    """The weights as stages hold them, and weights where none should be used."""
    firsts = [np.minimum(order, n - 1) for order, n in zip(step.layer_orders, counts(step), strict=True)]
    start = arranged(weights(step.config) if params is None else params, firsts)
    return jax.tree.map(lambda w, like: w.astype(like.dtype), start, step.abstract_state.params)


def natural(step: Step, params):
    """Weights or gradients of stages with their layers in the model's order."""
    pairs = zip(step.layer_orders, counts(step), strict=True)
    return arranged(params, [np.argsort(order, stable=True)[:n] for order, n in pairs])


def counts(step: Step) -> list[int]:
    return [count for count, _ in step.config.blocks]


def state_of(step: Step) -> State:
    """A state with these weights and a memory of zeros, as most optimizers begin: nothing is compiled."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.abstract_state.optimizer)
    return put(State(padded(step), zeros, np.int32(0)), step.shardings)


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


def arranged(params, orders):
    """Weights or gradients with the layers of each kind in another order."""
    in_order = lambda path, w: np.asarray(w)[layer_order.order_of(path, orders)]
    return params | jax.tree_util.tree_map_with_path(in_order, {"blocks": params["blocks"]})


def allowed(config, plan: Plan, products: Unit = "float32") -> dict[str, float]:
    """How far from one device's, relative: as sums in another order are; gradients in float32 by 1e-5."""
    fresh = {"logits": 0.5, "loss": math.log(config.vocab_size)}
    spread = tolerance(plan.resolve(config), BATCH, SEQ, products, **fresh)
    exact = products == plan.dtype == "float32"
    found = {what: spread.bound(what, 1e-5 if exact else 1.0) for what in ("loss", "grad_norm", "gradient")}
    return found | ({"gradient": 2e-5} if exact else {})


def assert_same(config, plan: Plan, products: Unit = "float32", step_class=Step):
    """Loss, norm and every gradient as one device's; ``products``: what devices round float32 operands to."""
    compare_leaves(config, plan, *spread(config, plan, step_class), products)


def compare_leaves(config, plan: Plan, loss: float, norm: float, got, products: Unit = "float32"):
    """The comparison itself, of a gradient to its largest element or 1 % of the largest of all."""
    tolerances = allowed(config, plan, products)
    want_loss, want = solo(config)
    assert abs(loss - want_loss) < tolerances["loss"] * want_loss, f"loss {loss} for {want_loss}"
    floor = 0.01 * max(np.abs(w).max() for w in jax.tree.leaves(want))
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = np.abs(g - w).max() / max(np.abs(w).max(), floor)
        assert error < tolerances["gradient"], (
            f"gradient of {jax.tree_util.keystr(path)} is off by {error:.1e}"
        )
    want_norm = math.sqrt(sum((w**2).sum() for w in jax.tree.leaves(want)))
    assert abs(norm - want_norm) < tolerances["grad_norm"] * want_norm, f"norm {norm} for {want_norm}"


ONCE, KEPT = "loss, tokens and norm", optax.trace(0.0)
"""What is summed once needs everything, so that no device can enter it early."""


def compiled_step(config, plan: Plan, rule=KEPT, clip: float | None = None):
    """A step, its program, and the program's partitioned text; the usual rule keeps the gradients."""
    mesh = make_mesh(str(plan.mesh))
    step = Step(config, plan.resolve(config, platform_of(mesh), BATCH, SEQ), mesh, rule, clip)
    return step, *read_program(step.lower(BATCH, SEQ))


def first_step(step: Step, compiled):
    """The state, the metrics and the gradients of a step that keeps them."""
    state, metrics = compiled(state_of(step), put(dealt(batch(), step.plan), step.batch_sharding))
    return state, metrics, natural(step, jax.tree.map(np.asarray, state.optimizer.trace))


def assert_sent(step: Step, text: str) -> None:
    """Each stage sends what is predicted, arrow by arrow, and a table adds arrows up."""
    config, plan = step.config, step.plan
    rows = of_either if all(block.reads_one_norm for _, block in config.blocks) else dict
    for stage in range(plan.mesh.pp):
        census = census_hlo(text, step.mesh, branch_shares(plan.pipeline, config.layer_kinds)[stage])
        want = predicted_by_arrow(traffic.step_traffic(plan, BATCH, SEQ, stage))
        assert rows(by_arrow(census)) == rows(want), f"stage {stage}"
        assert not any(c.conditional for c in census) and all(c.arrow for c in census)
        sums = {}
        for row in arrow_rows(census):
            total = sums.setdefault((row["axis"], row["kind"]), {"count": 0, "bytes_sent": 0})
            total |= {number: total[number] + row[number] for number in total}
        assert sums == census_table(census)


def check(config, plan: Plan, within: float = math.inf, loss: float = 1e-5) -> None:
    """What a step holds (temporaries ``within`` a factor), sends and gives: all of it as predicted."""
    cpu, (step, compiled, text) = plan.resolve(config, "cpu", BATCH, SEQ), compiled_step(config, plan)
    given = memory.argument_bytes(cpu, BATCH, SEQ, moments=1, scalars=1)
    program, estimate = compiled_memory(compiled), memory.temp_bytes(cpu, BATCH, SEQ)
    assert program["argument_bytes"] == sum(given.values())
    apart = (sum(given.values()) + estimate) / (program["argument_bytes"] + program["temp_bytes"])
    assert 1 / within < apart < within, f"temporaries: {estimate} B, and compiled {program['temp_bytes']} B"
    if plan.mode == "manual":  # the others leave it to XLA
        assert ONCE not in {c.arrow for pair in unordered(text, step.mesh) for c in pair}
        assert_sent(step, text)
    joined = plan.zero == 1 and max(plan.mesh.sp, plan.mesh.ep) > 1  # XLA joins the sums over two axes
    if plan.mode == "explicit" and not joined:
        compare_with_manual(step, text)
    state, metrics, grads = first_step(step, compiled)
    assert abs(float(metrics["loss"]) / solo(config)[0] - 1) <= loss or plan.dtype != "float32"
    compare_leaves(config, plan, float(metrics["loss"]), float(metrics["grad_norm"]), grads)
    if config.experts:
        params = natural(step, jax.tree.map(np.asarray, state.params))
        check_routers(config, plan, jax.tree.map(np.asarray, metrics), params)


ISLANDS = {"tokens b s e -> routing b s e", "slots c d -> experts c d", "experts c d +m -> slots c d +m"}
ISLANDS |= {"tokens u c k -> nodes u c k", "nodes n c k -> slots n c k"}


def compare_with_manual(step: Step, text: str) -> None:
    """`Explicit` sends what `Manual` would, arrow by arrow. But XLA for CPUs finishes and cuts a sum by an
    all-reduce and a slice, twice a reduce-scatter, outside of islands; JAX's own sums are under no arrow."""
    found = by_arrow(census_hlo(text, step.mesh))
    want = collections.defaultdict(lambda: np.zeros(2, int))
    manual = predicted_by_arrow(traffic.step_traffic(step.plan, BATCH, SEQ))
    for (axes, sort, arrow), (count, sent) in manual.items():
        twice = sort == "reduce-scatter" and arrow not in ISLANDS
        want[axes, "all-reduce" if twice else sort, arrow] += count, sent * (1 + twice)
    own = [key for key in found if key[2] in ("", ONCE)]
    tokens = BATCH * SEQ * step.plan.mesh.tp // step.plan.mesh.size  # two maxima of 4 bytes, sent twice
    assert sum(found.pop(key)[1] for key in own) < 800 + 16 * tokens
    want = {key: tuple(line) for key, line in want.items() if key[2] != ONCE}
    if step.plan.zero == 1 and step.plan.tp_sequence:  # XLA joins a norm's sums over tp and over other axes
        norms = {key for key in (*found, *want) if key[2].startswith("gradient stream")}
        found, want = ({key: x[key] for key in x.keys() - norms} for x in (found, want))
    softmax = [key for key in want if key[2] == "vocab b s +v -> data b s"]
    for key in softmax:  # a maximum and two sums, each of 4 bytes a token
        want[key] = tuple(n * 2 // 3 for n in want[key])
    assert found == want


def check_routers(config, plan: Plan, metrics: dict, after: dict) -> None:
    """Each layer's experts got what one device's router gives them; biases follow, if not frozen."""
    load, experts = metrics["load"], config.experts
    assert (load.sum(1) == experts.top_k * BATCH * SEQ).all() and not np.any(metrics["dropped"])
    if plan.dtype == "float32":  # else a router chooses otherwise now and then
        told = reference(config)[1]
        assert np.array_equal(load, told["load"])
        np.testing.assert_allclose(metrics["router_entropy"], told["router_entropy"], rtol=1e-5)
    if experts.bias_rate is not None:
        ups = np.sign(load.sum(1, keepdims=True) - experts.num_experts * load) * (not config.lora)
        flat, kinds = flatten_dict(weights(config), sep="."), np.array(config.kinds_of_routed_layers)
        for path, bias in flatten_dict(after, sep=".").items():
            if path.endswith("experts.bias"):
                own = experts.bias_rate * ups[kinds == max(kind_of(path), 0)]
                np.testing.assert_allclose(bias - flat[path], own, rtol=0, atol=1e-6)


def emulated_ragged_all_to_all(x, out, begin, send, mine, recv, *, axis_name):
    """`lax.ragged_all_to_all` from gathers: rows from ``begin[j]`` on come to rank j from ``mine[j]`` on."""
    rank, rows = jax.lax.axis_index(axis_name), jnp.arange(x.shape[0])[None]
    sent, starts, sizes, ends = (jax.lax.all_gather(y, axis_name) for y in (x, begin, send, mine))
    starts, sizes, ends = (y[:, rank, None] for y in (starts, sizes, ends))
    here = (rows >= ends) & (rows < ends + sizes)  # ranks × rows
    row = rows - ends + starts + x.shape[0] * jnp.arange(len(sent))[:, None]
    source = jnp.where(here, row, sent.size).min(0)
    arrived = sent.reshape(-1, *x.shape[1:]).at[source].get(mode="fill", fill_value=0)
    return jnp.where(here.any(0)[:, None], arrived, out)


@contextlib.contextmanager
def ragged_on_cpus(ragged=emulated_ragged_all_to_all):
    """Plans may ask CPUs for the ragged all-to-all, which XLA lacks there, and this one does."""
    taken = mock.patch.dict(SUITS["dispatch"], cpu=("padded", "ragged"))
    with taken, mock.patch.object(jax.lax, "ragged_all_to_all", ragged):
        yield


def live(jaxpr):
    """The jaxpr without what nobody reads, which a compiler leaves out."""
    return partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))[0]


def name(plan: Plan) -> str:
    """A plan's id in the list of tests: what differs from the defaults."""
    fields = [f for f in dataclasses.fields(plan) if f.name != "mesh" and getattr(plan, f.name) != f.default]
    return " ".join([str(plan.mesh), *(f"{f.name}={getattr(plan, f.name)}" for f in fields)])
