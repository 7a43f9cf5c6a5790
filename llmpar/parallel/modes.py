"""The modes: classes of ``par``, the object that the model calls to multiply, move and sum. `Solo` runs on
one device, and `Manual` inside shard_map. `llmpar.parallel.partitioned` has two more: `Auto`, under XLA's
partitioner, and `Explicit`, under JAX's sharding types. The model's code is the same in all four, and never
names a mesh axis:

    weights  par.weight(p)             a parameter, as it is needed for computing
             par.with_weight(f, x, p)  f(x, weight), elementwise. Use it in place of x * weight and the like,
                                       for which JAX would broadcast the weight: in `Explicit` the gradient
                                       of a broadcast cannot be an unfinished sum
             par.plus(x, p)            x plus a bias; x itself where p is None
    moves    par.move(x, arrow)        x in another layout: of another region, or with its sum finished
             par.max(x, arrow)         the maximum over devices, without a gradient
             par.ragged(x, …, arrow)   an all-to-all that may send only the first rows of each block
    matmuls  par.move_matmul(x, arrow, *ws)   a move, then matmuls of what was moved
             par.matmul_move(x, w, arrow)     a matmul, then a move of its result
    sums     g = par.summed(f, …, arrow)   g(x) calls f(par, x), this device's term of a sum, and adds the
                                       terms of all devices by the arrow
             par.total(x, layout)      the sum over all dims; in `Manual` only this device's term of it,
                                       which `Step` finishes
    islands  par.local(f, …)           f on a device's own blocks, an *island*. In `Solo` and `Manual` values
                                       are such blocks already. `Auto` and `Explicit` have global arrays, and
                                       enter a shard_map. If f itself moves values, give it par.island:
                                       the mode inside, `Manual` in all but `Solo`
             par.parts(layout)         into how many blocks a dim is cut; par.axes(layout), by which mesh axes
             par.index(layout)         the index of this device's block of a dim; in `Auto` and `Explicit`
                                       outside an island 0, since arrays are global
    loops    par.layers(fs, x, ws)     a scan over layers. Where kinds of layers alternate (window, full), an
                                       iteration runs one period; par.periods(ws, times) groups the stacked
                                       weights by period
             par.chunked(f, xs, n)     a scan over pieces of a sequence

`Solo` lacks these, which the training step and pipelines call. In `Manual` they take and return a device's
own shards, in the other modes global arrays (the function that `over_devices` returns takes global arrays in
every mode):

    par.carry_out(x, arrow)    x moved by an arrow over mesh axes
    par.over_devices(f, …)     f in a shard_map over all axes; in `Auto` and `Explicit` f itself
    par.unfinished(w, weight)  w, the stored array of a `Weight`, typed so that autodiff leaves its gradient
                               an unfinished sum
    par.zeros(shape, layout)   zeros with a layout, to add to
    par.gather(shard, dims)    a stored shard, cast and gathered (`Manual` alone, as the next two)
    par.count_once(x)          x on one of its replicas, 0 on the others
    par.sum_over_devices(tree) one all-reduce of small values

`Manual` runs each of an arrow's `moves` as a collective or a slice, in a named scope with the arrow's text.
By that scope a census of the compiled program (`llmpar.inspect.census`) knows the arrow of each collective.
Autodiff writes the backward collectives, except those in custom gradients: ring attention, the rings of
`tp_comm_overlap`, `ragged`, and narrow dtypes (`llmpar.parallel.wire`). All-gather and reduce-scatter are
each other's transpose.

In shard_map the type of a value says along which axes it may differ between devices: it *varies*
over them, and so does its gradient. Where x is the same along tp, and each device multiplies it by
its own weights, the gradient of x must be summed over tp. `vary` (`lax.pcast`) marks the place.
Forward it changes the type alone, to varying. Backward it is this all-reduce (operator f of
Megatron-LM, Shoeybi et al. 2019, section 3). These transposes are right only with shard_map's check
of varying axes, which stays on.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int

from llmpar.parallel import wire
from llmpar.parallel.collective_matmul import Ring, gather_matmul, matmul, matmul_scatter, matmuls
from llmpar.parallel.collectives import MOVED, WEIGHT, dim_of, ragged, scope, send, vary, varying
from llmpar.parallel.mesh import spec
from llmpar.parallel.remat import HIDDEN, NAME_OF_REGION, with_remat
from llmpar.plan.layout import METRICS, WHOLE, Arrow, Layout, parse_arrow, parse_layout
from llmpar.plan.model_config import Weight
from llmpar.plan.plan import Plan, Resolved


class Solo:
    """One device: moves do nothing. The reference for tests of whole models, and the base class of the other
    modes: an argument ``par: Solo`` may be any of them."""

    # None in training. When serving, par is a `serve.decode._Cached`, a mode that stores keys and values: it
    # sets `cache` to itself. (`Any`, since that class is not imported here.)
    cache: Any = None

    def __init__(self, plan: Resolved | None = None, mesh: Any = None):
        self.plan = plan = plan or Plan().resolve()
        self.mesh = mesh  # jax's, concrete or abstract; needed where the mode enters a shard_map
        self.dtype = jnp.dtype(plan.dtype)
        self.live = plan.mesh.live(*plan.mesh.sizes)  # the axes of more than one device

    def weight(self, param: nnx.Variable) -> Array:
        """Return the parameter in the computing dtype."""
        return param[...].astype(self.dtype)

    def with_weight(self, f: Callable, x: Array, param: nnx.Variable | Array) -> Array:
        """Return ``f(x, weight)``, element by element along the last dims of ``x``. ``param`` is a parameter,
        or an array that `weight` has returned."""
        weight = param if isinstance(param, Array) else self.weight(param)
        return f(x, jnp.expand_dims(weight, range(x.ndim - weight.ndim)))

    def plus(self, x: Array, bias: nnx.Variable | Array | None) -> Array:
        """Return ``x`` plus a bias, in the dtype of ``x``; without a bias ``x`` itself."""
        return x if bias is None else self.with_weight(lambda x, b: x + b.astype(x.dtype), x, bias)

    def move(self, x: Array, arrow: str) -> Array:
        """Return ``x`` itself: on one device nothing moves."""
        return x

    def max(self, x: Array, arrow: str) -> Array:
        """Return ``x`` itself, behind a stop_gradient."""
        return lax.stop_gradient(x)

    def ragged(
        self, x: Array, sent: Int[Array, " g"], received: Int[Array, " g"], arrow: str
    ) -> Array:
        """Return ``x`` itself, as `move` does."""
        return x

    def move_matmul(
        self, x: Array, arrow: str, *weights: Any, biases: Sequence[Any] = ()
    ) -> list[Array]:
        """Move ``x``, ``b s …``, multiply it by each of the weights (`matmul`), and add that weight's bias,
        if it has one: ``biases`` has a bias or None for each weight, or is empty. Name the results
        for `Plan.remat` (`named`)."""
        ring = self.ring(arrow, "all-gather")
        if ring:
            results = gather_matmul(ring, x, weights)
        else:
            results = matmuls(self.move(x, arrow), *weights)
        pairs = zip(results, biases or [None] * len(results), strict=True)
        return self.named([self.plus(y, bias) for y, bias in pairs], arrow)

    def matmul_move(self, x: Array, weight: Any, arrow: str) -> Array:
        """Multiply ``x`` by a weight (`matmul`), then move the result: the mirror image of `move_matmul`."""
        ring = self.ring(arrow, "reduce-scatter")
        return matmul_scatter(ring, x, weight) if ring else self.move(matmul(x, weight), arrow)

    def ring(self, arrow: str, kind: str) -> Ring | None:
        """Return the ring that replaces an arrow's collective of this ``kind``: in `Manual` with
        `Plan.tp_comm_overlap`, elsewhere none."""
        return None

    def named(self, results: list[Array], arrow: str) -> list[Array]:
        """Give the results of a region's first matmuls the checkpoint name by which remat saves them. The
        hidden values of a feed-forward in chunks get none, so that they are not saved."""
        name = NAME_OF_REGION[parse_arrow(arrow).after.region]
        if name == HIDDEN and self.plan.ffn_chunks > 1:
            return results
        return [checkpoint_name(y, name) for y in results]

    def summed(self, f: Callable, layouts: list[str], arrow: str) -> Callable:
        """Return a function g. ``g(*args)`` computes this device's term of a sum,
        ``f(par, *args)``, and finishes the sum by the arrow. f must use the par that it is
        given: in `Explicit` it runs in an island. ``layouts`` are those of ``args``; only
        `Explicit` reads them."""
        return lambda *args: self.move(f(self, *args), arrow)

    def total(self, x: Array, layout: str) -> Array:
        """Sum over all dims of a value with this ``layout``. In `Manual` the result is this device's term of
        the sum, which `Step` finishes."""
        return x.sum()

    def local(self, f: Callable, layouts: Sequence[Any], result: Any) -> Callable:
        """Return a function that runs ``f`` on each device's own blocks. ``layouts`` are those of its
        arguments, and ``result`` is that of its result; each is a layout, or a tree of them. A ``+`` in
        ``result`` is a sum that ``f`` leaves unfinished: it stays so in `Manual`, and in the types of
        `Explicit`; `Auto` finishes it."""
        return f

    @property
    def island(self) -> "Solo":
        """The mode inside an island (`local`), where a device sees only its own blocks."""
        return self

    def index(self, layout: str) -> int | Int[Array, ""]:
        """Return 0: there is one block."""
        return 0

    def parts(self, layout: str) -> int:
        """Return the number of blocks of the layout's one dim."""
        return self.plan.mesh.along(self.axes(layout))

    def axes(self, layout: str) -> tuple[str, ...]:
        """Return the mesh axes that cut the one dim of a layout such as ``keys s``."""
        return self.plan.place(layout).axes

    def layers(self, blocks: Sequence[Callable], x: Any, stack: Any) -> tuple[Any, Any]:
        """Scan over the leading dim of ``stack``. An iteration runs ``blocks``, one layer each: it
        calls ``x, aux = block(x, weights)`` with the weights of the whole iteration, of which each
        block picks those of its layer (`llama.of_kind`). For its backward pass a block saves what
        `Plan.remat` says (`with_remat`). Return the last x, and the auxiliary results stacked in
        the order of the layers; None if there are none."""
        length = jax.tree.leaves(stack)[0].shape[0]
        no_loop = self.plan.unroll == 0 or self.plan.unroll >= length
        # without a loop XLA would merge the recomputation with the forward pass
        blocks = [with_remat(self.plan, block, no_loop) for block in blocks]
        x, outputs = lax.scan(chain(blocks), x, stack, unroll=self.plan.unroll or length)
        # outputs[j][i] is of block j in iteration i; layers are in the order of i, then j
        interleave = lambda *parts: jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
        if len(outputs) > 1:
            return x, jax.tree.map(interleave, *outputs)
        return x, outputs[0] if outputs else None

    def periods(self, stack: Any, times: int) -> Any:
        """Reshape weights from ``layers, …`` to ``times, layers / times, …``: a row for each period."""
        return jax.tree.map(lambda w: w.reshape(times, -1, *w.shape[1:]), stack)

    def chunked(self, f: Callable, xs: Any, num_chunks: int, recompute: bool = False) -> Any:
        """Cut ``xs`` along dim 1 into ``num_chunks`` pieces, apply ``f`` to one after the other, and join the
        results along dim 1. So intermediate values of ``f``, such as logits, exist for one piece only.

        A piece has every ``num_chunks``-th position, not neighbouring ones: where arrays are
        global, each device then has an equal part of every piece. (The pieces are the same in all
        modes.) With several pieces, or with ``recompute``, f is checkpointed: the forward pass
        saves nothing as large as the logits, and the backward pass runs f again. Results of moves
        (`MOVED`) are saved, so the backward pass of `Manual` sends nothing a second time; that of
        `Explicit` sends the maximum of logits again, which has no such name; in `Auto` XLA decides.
        `prevent_cse` is False: a scan needs no barrier. A single piece has no scan, and XLA may
        keep values in place of computing them again: the result is the same.
        """
        if recompute or num_chunks > 1:
            policy = jax.checkpoint_policies.save_only_these_names(MOVED)
            f = jax.checkpoint(f, policy=policy, prevent_cse=False)
        if num_chunks == 1:
            return f(xs)
        # b (s n) … -> n b s …, with n pieces, and back
        cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, num_chunks, *x.shape[2:]), 2, 0)
        join = lambda y: jnp.moveaxis(y, 0, 2).reshape(y.shape[1], -1, *y.shape[3:])
        _, out = lax.scan(lambda _, piece: (None, f(piece)), None, jax.tree.map(cut, xs))
        return jax.tree.map(join, out)


def chain(blocks: Sequence[Callable]) -> Callable:
    """Return a function that runs blocks one after the other, and lists their auxiliary results."""

    def run(x: Any, weights: Any) -> tuple[Any, list[Any]]:
        outputs = []
        for block in blocks:
            x, aux = block(x, weights)
            outputs.append(aux)
        return x, [aux for aux in outputs if aux is not None]

    return run


# ----------------------------------------------------------------------------------------------------- Manual


class Manual(Solo):
    """Inside `jax.shard_map` over all axes: arrows are collectives, each in the `scope` of its arrow."""

    def weight(self, param: nnx.Variable) -> Array:
        """Return the weight as it is used: gathered from its stored shard (`gather`), or as it is where
        a pipeline has gathered it once for the step.

        In the backward pass the transpose of the gather is a reduce-scatter of the gradient over
        the axes of ZeRO, in the computing dtype or `Plan.reduce_dtype`. The shard's gradient is
        also summed over `WeightLayouts.replica_axes`, along which devices have the same shard and
        use it on different values:

        - With ``reduce="layer"`` (never with pp), in the backward pass. `vary` types the shard as
          varying over these axes, and the transpose of that is an all-reduce of the shard's
          gradient in float32.
        - Else by `Step`, at the end of the step; at ZeRO 2 over ZeRO's axes after each microbatch. `Step`
          has typed the parameter as varying already (`unfinished`), so `vary` changes nothing here.
        """
        region = parse_layout(param.dims).region
        with scope(param.dims):  # names the all-reduce that the backward pass makes of `vary`
            x = vary(param[...], self.plan.varying(region))
        # gathered once a step: `pipeline.executor` has cast and gathered it
        used = x if self.plan.gather_per == "step" else self.gather(x, param.dims)
        return checkpoint_name(used, WEIGHT)

    def gather(self, shard: Array, dims: str) -> Array:
        """Cast a weight's stored shard, then gather it if it is stored cut (ZeRO 3)."""
        return self.carry_out(shard.astype(self.dtype), self.plan.layouts_of(dims).gather)

    def move(self, x: Array, arrow: str) -> Array:
        """Carry out the physical arrow, and give what has moved the checkpoint name
        `MOVED`."""
        physical = self.plan.physical(arrow)
        x = self.carry_out(x, physical)
        return checkpoint_name(x, MOVED) if physical.moves else x

    def carry_out(self, x: Array, arrow: Arrow, *, invariant: bool = False) -> Array:
        """Run the collectives of a physical arrow (`llmpar.plan.layout.Arrow.moves`) in
        order, then type the result as varying over the axes of the region where the arrow
        ends (`Arrow.varying`). ``invariant``: type what an all-gather returns as the same
        along its axes (JAX's ``to="invarying"``). It is for values of which no gradient is
        taken, such as updated weights."""
        # The letters of the dims of ``x``. An arrow between layouts without dims (``+dp -> whole``)
        # has none, and fits any value: it is an all-reduce, which needs no dim.
        letters = arrow.before.letters or arrow.after.letters
        for axis in arrow.before.sums + arrow.before.axes:
            if axis not in varying(x):
                raise ValueError(
                    f"arrow '{arrow.text or arrow}' starts with {axis} in its layout, but the value is the"
                    f" same all over {axis}; it was reduced already, or never cut"
                )
        to: Literal["varying", "invarying"] = "invarying" if invariant else "varying"
        with scope(arrow.name()):
            for move in arrow.moves:
                if (arrow.wire or arrow.gradient_wire) and move.kind != "slice":
                    dim = dim_of(move.gathers or move.cuts, letters)
                    x = wire.send_narrow(x, move, dim, arrow, arrow.name(backward=True))
                else:
                    x = send(x, move, letters, to)
            # The transpose all-reduces the gradient over those axes that are new. So `stream b s d -> ffn
            # b s d` without tp_sequence sends nothing forward, and all-reduces over tp backward.
            return vary(x, arrow.varying)

    def max(self, x: Array, arrow: str) -> Array:
        """All-reduce by maximum over the axes that the arrow would sum over (its ``+v``); a constant to
        autodiff."""
        axes = self.plan.physical(arrow).before.sums
        x = lax.stop_gradient(x)
        if not axes:
            return x
        with scope(arrow):
            return checkpoint_name(lax.pmax(x, axes), MOVED)

    def ragged(
        self, x: Array, sent: Int[Array, " g"], received: Int[Array, " g"], arrow: str
    ) -> Array:
        """Run an all-to-all of a buffer over an axis a of g ranks,
        ``b/a e c … -> b e/a c …`` or the reverse. Its first two dims, whatever their letters
        (b e, u e or n e), count the senders and the receivers. With ``dispatch="ragged"`` this
        rank sends only the first ``sent[j]`` rows of the block for rank j, and receives
        ``received[j]`` from it; the rows after these are undefined. XLA has this collective
        for GPUs and TPUs, not for CPUs."""
        if self.plan.dispatch != "ragged":
            return self.move(x, arrow)
        physical = self.plan.physical(arrow)
        # A device has shape (1, g, …) before the arrow and (g, 1, …) after it, or the reverse. So a reshape
        # swaps the two dims.
        axis = physical.moves[0].axes[0]
        rows = vary(x, physical.varying).reshape(-1, *x.shape[3:])
        with scope(arrow):
            y = ragged(rows, sent, received, axis)
        return checkpoint_name(y.reshape(x.shape[1], x.shape[0], *x.shape[2:]), MOVED)

    def ring(self, arrow: str, kind: str) -> Ring | None:
        """Return the ring that replaces an arrow's collective, or None. A plan with `tp_comm_overlap` has one
        where the arrow is one collective of this ``kind``: a block is multiplied while another block, or a
        partial sum, is sent."""
        moves = self.plan.physical(arrow).moves if self.plan.tp_comm_overlap else ()
        if [move.kind for move in moves] != [kind]:
            return None
        return Ring(moves[0].axes, arrow, self.plan.hop)

    def local(self, f: Callable, layouts: Sequence[Any], result: Any) -> Callable:
        """Return ``f``; on simulated devices with a barrier before it. Without it XLA hoists
        values that no layer changes out of the loop over layers, together with the
        collectives that ``f`` runs on them, and these crash JAX 0.10.2: a rendezvous
        counts too many participants. (XLA for CPUs drops the barrier later, but
        only after the pass that hoists.) Accelerators need none, and it would make ``f`` wait for
        all its weights."""
        barrier = lambda *args: f(*lax.optimization_barrier(args))
        return barrier if self.plan.platform == "cpu" else f

    def index(self, layout: str) -> int | Int[Array, ""]:
        """Return the position of this device's block among the blocks of the layout's one dim."""
        axes = self.axes(layout)
        return lax.axis_index(axes) if axes else 0

    def over_devices(self, f: Callable, layouts: Any, results: Any) -> Callable:
        """Return ``f`` in a shard_map: its arguments and results are a device's own shards. ``layouts`` and
        ``results`` are trees of their physical layouts."""
        layouts, results = jax.tree.map(spec, (layouts, results))
        return jax.shard_map(f, mesh=self.mesh, in_specs=layouts, out_specs=results)

    def unfinished(self, w: Array, weight: Weight) -> Array:
        """Type a stored weight as varying over ``unreduced.sums`` (`WeightLayouts`), the axes over which its
        gradient stays an unfinished sum. A gradient has the type of its weight, so each device along these
        axes keeps its own term."""
        return vary(w, self.plan.layouts_of(weight.dims).unreduced.sums)

    def zeros(self, shape: tuple[int, ...], layout: Layout) -> Array:
        """Return this device's zeros of a global ``shape``, which vary over all axes of the layout."""
        zeros = jnp.zeros(layout.shard_shape(shape, self.plan.mesh.sizes))
        return vary(zeros, layout.axes + layout.sums)

    def count_once(self, x: Array) -> Array:
        """Return ``x`` on one of its replicas and 0 on the others, so that a sum over all devices counts it
        once. The replicas are along the axes over which ``x`` does not vary; the first of them keeps it."""
        same = tuple(a for a in self.live if a not in varying(x))
        return vary(jnp.where(lax.axis_index(same) == 0, x, 0) if same else x, self.live)

    def sum_over_devices(self, values: Any) -> Any:
        """Sum small values over all devices in one all-reduce. Since it takes all these values, it runs after
        every collective that they depend on. Separate all-reduces could run beside these collectives, in an
        order that differs between devices."""
        flat, restore = ravel_pytree(jax.tree.map(self.count_once, values))
        return restore(self.carry_out(flat, Arrow(Layout((), self.live), WHOLE, text=METRICS)))
