"""One model text, four readings: `Solo` on one device, `Manual` inside shard_map, `Auto` under XLA's
partitioner, `Explicit` with layouts as types.

The model calls these methods and never names a mesh axis:

    par.weight(p)          a parameter, as it is needed for computing
    par.move(x, arrow)     a value moves: from one region to another, from an unfinished sum to a finished one
    par.enter, par.leave   moves with the products that come right behind, or right before
    par.max(x, arrow)      the same for a maximum, through which no gradient flows
    par.beside(f, x, p)    f of a value and a parameter that it is multiplied with, or that is added to it
    par.summed(f, …)       a function that gives, on each device, one term of an unfinished sum
    par.total(x, layout)   the sum of all that is here
    par.index(layout)      which block of a dim this device holds; par.parts(layout): of how many
    par.layers(f, x, ws)   a stack of blocks
    par.chunked(f, xs, n)  pieces of a sequence, one after the other
    par.local(f, …)        an island: code that works on one device's blocks and talks to the others
                           itself, with the arrows of par.explicit, over the axes that par.axes(layout) names

In `Manual` every arrow becomes the named collective, in a scope that carries its text into the compiled
program: a census of that program (`llmpar.inspect.census`) is the record of what moves, and says for which
line of the model.
Autodiff writes the backward collectives: all-gather and reduce-scatter are each other's transpose, and the
transpose of "from here on, devices differ" (`lax.pcast`, free in the forward pass) is the all-reduce that
Megatron calls f (Shoeybi et al. 2019, section 3). shard_map's varying-axes check is what makes those
transposes right; it stays on.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array, Int

from llmpar.mesh import from_type, kind, sharding, spec
from llmpar.notation import Arrow, Layout, Move, parse_layout
from llmpar.plan import Plan, Resolved

WEIGHT, MOVED = "weight", "moved"
"""Names under which remat policies know gathered weights and the results of communication."""
PROJECTED, STREAM, HIDDEN = "projected", "stream", "hidden"
"""Names of what is dear to compute again: queries, keys and values before RoPE; the stream between attention
and feed-forward; the feed-forward's first products. Attention names its own results."""
SAVED = {"block": (), "ffn": (PROJECTED, STREAM, "attention_out", "attention_lse")}
SAVED["selective"] = *SAVED["ffn"], HIDDEN
"""What a block's forward pass keeps for the backward pass, by `Plan.remat`. Per byte, in FLOPs, a product
costs the width that it sums over, attention more, norms, RoPE and SwiGLU next to nothing. Moved values are
sent again, but for attention's last reduction, which is in the stream."""


class Solo:
    """One device: moves do nothing. The reference that every test compares with."""

    cache: Any = None  # keeps keys and values where tokens come one at a time, and attends (`serve.decode`)

    def __init__(self, plan: Resolved | None = None):
        self.plan = plan = plan or Plan().resolve()
        self.platform = plan.platform  # of the devices: cpu, gpu or tpu
        self.dtype = jnp.dtype(plan.dtype)

    def weight(self, param):
        """The parameter in the computing dtype."""
        return param[...].astype(self.dtype)

    def beside(self, f: Callable, x: Array, param) -> Array:
        """``f(x, weight)``, number by number along the last dims of ``x``."""
        weight = self.weight(param)
        return f(x, jnp.expand_dims(weight, range(x.ndim - weight.ndim)))

    def move(self, x: Array, arrow: str) -> Array:
        """``x`` itself: it is where it should be."""
        return x

    def enter(self, multiply: Callable, x: Array, arrow: str, *weights: Array) -> Any:
        """``multiply(x, *weights)`` of ``x`` moved: products that treat each position by itself, each with
        the dims ``b s`` first."""
        return multiply(self.move(x, arrow), *weights)

    def leave(self, multiply: Callable, x: Array, arrow: str, *weights: Array) -> Array:
        """``multiply(x, *weights)``, moved: the mirror image of `enter`."""
        return self.move(multiply(x, *weights), arrow)

    def ragged(self, x: Array, send: Int[Array, " g"], come: Int[Array, " g"], arrow: str) -> Array:
        """As `move`."""
        return x

    def max(self, x: Array, arrow: str) -> Array:
        """``x`` itself, behind a stop_gradient."""
        return lax.stop_gradient(x)

    def summed(self, f: Callable, layouts: list[str], arrow: str) -> Callable:
        """``f(par, …)`` as a function of values laid out as ``layouts`` say. On each device it gives a term
        of a sum; the arrow finishes it."""
        return lambda *args: self.move(f(self, *args), arrow)

    def total(self, x: Array, layout: str) -> Array:
        """The sum over all dims of what is here, laid out as ``layout`` says."""
        return x.sum()

    def index(self, layout: str) -> int | Int[Array, ""]:
        """0: the one block that there is."""
        return 0

    def axes(self, layout: str) -> tuple[str, ...]:
        """The mesh axes that cut the layout's one dim, for an island that must name them; none on one
        device."""
        return ()

    def parts(self, layout: str) -> int:
        """How many blocks the layout's one dim is cut into."""
        return self.plan.mesh.along(self.axes(layout))

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """``f`` as a function of whole values laid out as ``layouts`` say, giving one laid out as ``result``
        (or several)."""
        return f

    explicit = property(
        lambda self: self, doc="The reading for moves inside an island, where a device sees its blocks only."
    )

    def layers(self, block: Callable, x: Any, stack: Any) -> tuple[Any, Any]:
        """Run ``x, aux = block(x, weights)`` once per layer: a scan over the leading dim of ``stack``,
        rematerialised as planned. The layers' auxiliary results are stacked."""
        plan, length = self.plan, jax.tree.leaves(stack)[0].shape[0]
        alone = not 0 < plan.unroll < length  # no loop keeps XLA from merging the two computations
        keep = plan.gathers == "block" and not plan.reshard_after_forward
        if plan.remat != "none":
            policy = functools.partial(_named, SAVED[plan.remat] + (WEIGHT,) * keep)
            block = jax.checkpoint(block, policy=policy, prevent_cse=alone)
        elif plan.gathers == "block" and not keep:
            block = jax.checkpoint(block, policy=_all_but_gathered_weights, prevent_cse=alone)
        return lax.scan(block, x, stack, unroll=plan.unroll or length)

    def chunked(self, f: Callable, xs: Any, num_chunks: int) -> Any:
        """Apply ``f`` to ``num_chunks`` pieces of ``xs``, one after the other, and join what comes out, all
        along dim 1.

        The backward pass recomputes a piece but repeats no communication. Bounds the memory of what ``f``
        makes of a piece, such as logits. A piece takes every ``num_chunks``-th position, so that it is cut
        over devices as the whole is.
        """
        policy = jax.checkpoint_policies.save_only_these_names(MOVED)
        f = jax.checkpoint(f, policy=policy, prevent_cse=False)
        if num_chunks == 1:
            return f(xs)
        pieces = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, num_chunks, *x.shape[2:]), 2, 0), xs
        )
        _, out = lax.scan(lambda _, piece: (None, f(piece)), None, pieces)
        return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 2).reshape(y.shape[1], -1, *y.shape[3:]), out)


def _named(names: tuple[str, ...], prim, *_, **params) -> bool:
    """Save what has one of the names. cuDNN's kernel stands for attention's: JAX names nothing inside."""
    if prim.name == "dot_product_attention_fwd_wrapper":
        return "attention_out" in names
    return prim.name == "name" and params["name"] in names


def _all_but_gathered_weights(prim, *_, **params) -> bool:
    """Save everything except gathered weights (and their renamed copies, also beyond the barrier before an
    island, and typed anew inside it): no recomputing, but gathering again. What else is gathered is saved
    under its name."""
    if prim.name == "name":
        return params["name"] != WEIGHT
    return not prim.name.startswith(("all_gather", "reshard", "optimization_barrier", "reduced_vary_cast"))


# ----------------------------------------------------------------------------------------------------- Manual


class Manual(Solo):
    """Inside `jax.shard_map` over all axes: arrows are the named collectives, each in the `scope` of its
    arrow's text."""

    def weight(self, param):
        """The weight as it is used: from its stored shard (`gather`), unless a pipeline has done that for the
        step.

        What the backward pass does is the mirror image: reduce-scatter over the axes of ZeRO in the computing
        dtype, then one float32 all-reduce of the shard over every other axis on which the region's values
        differ.
        """
        region = parse_layout(param.dims).region
        x = self._vary(param[...], self.plan.varying(region), param.dims)
        whole = x.astype(self.dtype) if self.plan.gathers == "step" else self.gather(x, param.dims)
        return checkpoint_name(whole, WEIGHT)

    def gather(self, shard: Array, dims: str) -> Array:
        """A weight's stored shard, cast, then gathered if it is stored cut (ZeRO-3)."""
        return self.carry_out(shard.astype(self.dtype), self.plan.life(dims).gather, dims)

    def move(self, x: Array, arrow: str) -> Array:
        """Carry out the physical arrow: the collectives that :attr:`llmpar.notation.Arrow.moves` lists, in
        that order."""
        physical = self.plan.physical(arrow)
        x = self.carry_out(x, physical, arrow)
        region = parse_layout(arrow.partition("->")[2].strip()).region
        x = self._vary(x, self.plan.varying(region), arrow) if region else x
        return checkpoint_name(x, MOVED) if physical.moves else x

    def enter(self, multiply: Callable, x: Array, arrow: str, *weights: Array) -> Any:
        """With `Plan.tp_comm_overlap` a ring of permutes in place of the all-gather: one block is multiplied
        while the next one travels."""
        if ring := self._ring(arrow, "all-gather"):
            return _enter(multiply, ring, x, weights)
        return super().enter(multiply, x, arrow, *weights)

    def leave(self, multiply: Callable, x: Array, arrow: str, *weights: Array) -> Array:
        """With `Plan.tp_comm_overlap` a ring of permutes in place of the reduce-scatter: the sum of one block
        travels while this device's share of the next one is multiplied."""
        if ring := self._ring(arrow, "reduce-scatter"):
            return _leave(multiply, ring, x, weights)
        return super().leave(multiply, x, arrow, *weights)

    def _ring(self, arrow: str, kind: str) -> _Ring | None:
        """The ring that an arrow is, where the plan asks for one and the arrow is such a collective."""
        moves = self.plan.physical(arrow).moves
        if not self.plan.tp_comm_overlap or [move.kind for move in moves] != [kind]:
            return None
        return _Ring(moves[0].axes, arrow, self.plan.hop)

    def ragged(self, x: Array, send: Int[Array, " g"], come: Int[Array, " g"], arrow: str) -> Array:
        """An all-to-all ``b/a e c … -> b e/a c …`` or back, in which this rank sends rank j the first
        ``send[j]`` rows of its block alone, and gets ``come[j]``; behind them stands whatever was there. XLA
        has it for GPUs and TPUs, not for CPUs."""
        ((axis,),) = (move.axes for move in self.plan.physical(arrow).moves)
        rows = vary(x, self.plan.varying(parse_layout(arrow.partition("->")[2].strip()).region)).reshape(
            -1, *x.shape[3:]
        )
        with scope(arrow):
            y = _ragged(rows, send, come, axis)
        return checkpoint_name(y.reshape(x.shape[1], x.shape[0], *x.shape[2:]), MOVED)

    def max(self, x: Array, arrow: str) -> Array:
        """An all-reduce by maximum over the axes of the arrow's unfinished dims; a constant to autodiff."""
        axes = self.plan.physical(arrow).before.sums
        x = lax.stop_gradient(x)
        if not axes:
            return x
        with scope(arrow):
            return checkpoint_name(lax.pmax(x, axes), MOVED)

    def axes(self, layout: str) -> tuple[str, ...]:
        """The mesh axes that cut the layout's one dim."""
        return self.plan.place(layout).axes

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """``f`` itself: everything here works on one device's blocks. On simulated devices its collectives
        stay where they are written; elsewhere they would wait there for weights that are still on their
        way."""
        return (lambda *args: f(*_together(args))) if self.platform == "cpu" else f

    def index(self, layout: str) -> int | Int[Array, ""]:
        """The position of this device's block among the blocks of the layout's one dim."""
        axes = self.axes(layout)
        return lax.axis_index(axes) if axes else 0

    def carry_out(self, x: Array, arrow: Arrow, text: str = "", invariant: bool = False) -> Array:
        """Run the collectives of a physical arrow. ``invariant`` marks gathered results as equal on all
        devices."""
        position = {d.name: i for i, d in enumerate(arrow.before.dims or arrow.after.dims)}
        for axis in arrow.before.sums + arrow.before.axes:
            if axis not in varying(x):
                where = f"arrow '{text or arrow}' starts with {axis} in its layout"
                raise ValueError(
                    f"{where}, but the value is the same all over {axis}; it was reduced already, or"
                    " never cut"
                )
        with scope(text or str(arrow)):
            for move in arrow.moves:
                x = _collective(x, move, position, "invarying" if invariant else "varying")
        return x

    def _vary(self, x: Array, axes: tuple[str, ...], text: str) -> Array:
        """From here on ``x`` may differ along ``axes``: free now, an all-reduce of the gradient in the
        backward pass."""
        with scope(text):
            return vary(x, axes)


def scope(text: str):
    """The scope of a collective: the arrow that it carries out, as a census of the compiled program finds it
    again."""
    return jax.named_scope(f"arrow[{text}]")


def _collective(x, move: Move, position: dict[str, int], to: str):
    """The one lax call that a move is."""
    if move.kind == "all-reduce":
        return lax.psum(x, move.axes)
    if move.kind == "reduce-scatter":
        return lax.psum_scatter(x, move.axes, scatter_dimension=position[move.cuts], tiled=True)
    if move.kind == "all-gather":
        return lax.all_gather(x, move.axes, axis=position[move.gathers], tiled=True, to=to)
    if move.kind == "all-to-all":
        return lax.all_to_all(x, move.axes, position[move.cuts], position[move.gathers], tiled=True)
    dim = position[move.cuts]  # a slice: each device keeps its own block
    size = x.shape[dim] // lax.axis_size(move.axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(move.axes) * size, size, dim)


def hop(x: Array, axis: str | tuple[str, ...], way: str) -> Array:
    """What the rank before on a ring holds, sent as `Plan.hop` says."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    if way != "exchange":
        return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
    to_next = (jnp.arange(n) == (me + 1) % n).reshape(-1, *[1] * x.ndim)
    arrived = lax.all_to_all(jnp.where(to_next, x, jnp.zeros_like(x)), axis, 0, 0)
    return lax.dynamic_index_in_dim(arrived, (me - 1) % n, keepdims=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _ragged(rows, send, come, axis: str):
    """Of every rank's block for me the rows that are full. The gradient goes back as it came, by the same
    numbers turned around; JAX's own transpose would first exchange offsets that every rank knows."""
    slots = rows.shape[0] // len(send)
    begin = slots * jnp.arange(len(send), dtype=jnp.int32)
    mine = jnp.full_like(begin, slots * lax.axis_index(axis).astype(jnp.int32))
    return lax.ragged_all_to_all(rows, _room(rows), begin, send, mine, come, axis_name=axis)


# Unwritten room for as much as its argument holds, in a call that autodiff does not look into: it would make
# the room once for all layers, and XLA a copy of it in each.
_room = jax.custom_batching.custom_vmap(lambda x: vary(lax.empty(x.shape, x.dtype), varying(x)))
_room.def_vmap(lambda size, mapped, x: (_room(x), True))
_ragged.defvjp(
    lambda rows, send, come, axis: (_ragged(rows, send, come, axis), (send, come)),
    lambda axis, sizes, grad: (_ragged(grad, *sizes[::-1], axis), None, None),
)


# ------------------------------------------------------------------------------------------ collective matmul


@dataclass(frozen=True)
class _Ring:
    """A ring of the ranks along some axes, for values ``b s …`` whose positions they cut.

    Blocks are counted as they come round: block i is that of the rank i before this one, block 0 its own.
    """

    axis: tuple[str, ...]
    arrow: str
    way: str

    def hop(self, x: Array) -> Array:
        """What the rank before sends."""
        with scope(self.arrow):
            return checkpoint_name(hop(x, self.axis, self.way), MOVED)

    def gather(self, x: Array, use: Callable[[int, Array], Any]) -> tuple[list[Array], list]:
        """The blocks of all ranks, in n - 1 hops, and what ``use`` makes of each while the next one
        travels."""
        blocks, made = [x], []
        for i in range(1, lax.axis_size(self.axis)):
            arrived, done = _together((self.hop(blocks[-1]), use(i - 1, blocks[-1])))
            blocks.append(arrived)
            made.append(done)
        return blocks, [*made, use(len(made), blocks[-1])]

    def scatter(self, part: Callable[[int], Array]) -> Array:
        """The sum of all ranks' parts of this rank's block, in n - 1 hops: each block's sum sets out from the
        rank behind its own, and the next part is made while it travels."""
        total = part(1)
        for i in range(2, (n := lax.axis_size(self.axis)) + 1):
            total = operator.add(*_together((self.hop(total), part(i % n))))
        return total

    def _places(self) -> Array:
        """Which block lies at each place of the sequence, and at which place each block."""
        n = lax.axis_size(self.axis)
        return (lax.axis_index(self.axis) - jnp.arange(n)) % n

    def join(self, *blocks: Array) -> Array:
        """The whole sequence of blocks."""
        stacked = jnp.stack(blocks, 1).at[:, self._places()].get(mode="promise_in_bounds")
        return stacked.reshape(stacked.shape[0], -1, *stacked.shape[3:])

    def block(self, x: Array, i: int) -> Array:
        """One block of a whole sequence."""
        size = x.shape[1] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(x, self._places()[i] * size, size, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _enter(multiply, ring: _Ring, x, weights):
    """Gather, then multiply, block by block. For the gradient of ``x`` the backward pass is `_leave`."""
    return _entering(multiply, ring, x, weights)[0]


def _entering(multiply, ring, x, weights):
    blocks, made = ring.gather(x, lambda _, block: multiply(block, *weights))
    return jax.tree.map(ring.join, *made), (blocks, weights)


def _entering_backward(multiply, ring, saved, dy):
    blocks, weights = saved
    cut = lambda i: jax.tree.map(lambda y: ring.block(y, i), dy)
    pull = _Pull(multiply, weights)
    return ring.scatter(lambda i: pull(blocks[i], cut(i))), pull.gradients()


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _leave(multiply, ring: _Ring, x, weights):
    """Multiply, then reduce and scatter, block by block. For the gradient of ``x`` the backward pass is
    `_enter`."""
    return ring.scatter(lambda i: multiply(ring.block(x, i), *weights))


def _leaving(multiply, ring, x, weights):
    return _leave(multiply, ring, x, weights), (x, weights)


def _leaving_backward(multiply, ring, saved, dy):
    x, weights = saved
    pull = _Pull(multiply, weights)
    # To simulated devices all permutes are one channel: where x is computed again, nothing else would order
    # the rings that it takes before this one.
    dy = lax.platform_dependent(x, dy, cpu=after, default=lambda _, dy: dy)
    _, parts = ring.gather(dy, lambda i, block: pull(ring.block(x, i), block))
    return ring.join(*parts), pull.gradients()


_enter.defvjp(_entering, _entering_backward)
_leave.defvjp(_leaving, _leaving_backward)


class _Pull:
    """The gradients of ``multiply(x, *weights)``, block by block: each call gives that of one block, and
    keeps what the block adds to those of the weights."""

    def __init__(self, multiply, weights):
        self.multiply, self.weights, self.found = multiply, weights, []

    def __call__(self, x, dy):
        dx, *more = jax.vjp(self.multiply, x, *self.weights)[1](dy)
        self.found.append(more)
        return dx

    def gradients(self) -> tuple[Array, ...]:
        """Those of the weights, summed over the blocks in float32."""
        add = lambda *parts: sum(x.astype(jnp.float32) for x in parts).astype(parts[0].dtype)
        return tuple(add(*parts) for parts in zip(*self.found, strict=True))


def after(known: Array, held: Array) -> Array:
    """What is held, but not before ``known`` is: a true dependence, because XLA for CPUs drops optimization
    barriers. A NaN in ``known``, which shows anyway, makes zeros of what is held."""
    return jnp.where(known.max() <= jnp.inf, held, jnp.zeros((), held.dtype))


def at(tree: Any, index: Any) -> Any:
    """What lies at one place of a tree's leading dim."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(tree: Any, index: Any, values: Any) -> Any:
    """The tree with values in one place of its leading dim."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0), tree, values)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which shard_map's type of ``x`` (or this type) says that devices may hold different
    values."""
    kind = (jax.typeof(x) if isinstance(x, jax.Array) else x).manual_axis_type
    return kind.varying if kind else frozenset()


def vary(x: Array, axes: Iterable[str]) -> Array:
    """``x`` typed as varying over ``axes`` too. Its transpose sums over those that are new."""
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree, like=()):
    """``tree``, every leaf typed as varying over each mesh axis over which any leaf does, of ``like`` too:
    loops and branches insist."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves((tree, like)))))
    return jax.tree.map(lambda x: vary(x, axes), tree)


def _together(values):
    """The values, none to be used before all are there: XLA may then not hoist one that no layer changes, and
    what an island sends of it, out of the loop over layers. (On simulated devices JAX 0.10.2 crashes when
    collectives that were hoisted run beside a loop with others: a rendezvous counts too many
    participants.)"""
    return lax.optimization_barrier(values)


# ------------------------------------------------------------------------------------------------------- Auto


class Auto(Solo):
    """Under `jax.jit`: every arrow is a sharding constraint, and XLA's partitioner chooses the
    collectives."""

    def __init__(self, plan: Resolved, mesh: Mesh | AbstractMesh):
        super().__init__(plan)
        self.mesh = mesh

    def weight(self, param):
        """The parameter laid out as it is used."""
        return checkpoint_name(self.constrain(super().weight(param), self.plan.place(param.dims)), WEIGHT)

    def move(self, x: Array, arrow: str) -> Array:
        """``x`` laid out as the arrow ends; an unfinished sum is finished wherever the partitioner likes."""
        return self.constrain(x, self.plan.physical(arrow).after) if x.ndim else x

    axes = Manual.axes

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """``f`` inside shard_map, on each device's blocks; sums that it leaves unfinished are finished."""
        given, ends = tuple(spec(self.plan.place(x)) for x in layouts), jax.tree.map(self.plan.place, result)
        block = self.explicit.local(f, layouts, result)

        def inside(*args):
            return jax.tree.map(lambda y, end: lax.psum(y, end.sums) if end.sums else y, block(*args), ends)

        return jax.shard_map(inside, mesh=self.mesh, in_specs=given, out_specs=jax.tree.map(spec, ends))

    explicit = property(lambda self: Manual(self.plan), doc="`Manual`: an island is inside shard_map.")

    def constrain(self, x: Array, layout: Layout) -> Array:
        """Pin a value's layout."""
        return lax.with_sharding_constraint(x, sharding(self.mesh, layout))

    def carry_out(self, x: Array, arrow: Arrow, text: str = "") -> Array:
        """``x`` laid out as a physical arrow ends."""
        return self.constrain(x, arrow.after)


# --------------------------------------------------------------------------------------------------- Explicit


class Explicit(Auto):
    """On a mesh of explicit axes: a layout is a type, an arrow is `jax.sharding.reshard`, and JAX checks.

    An unfinished sum ``+a`` is ``unreduced={a}`` in the type. What `Manual` calls varying is ``reduced={a}``:
    a value that is the same all over a, and is used there on values that are not. Its gradient is a sum over
    a, unfinished until the move that set the mark finishes it on the way back. `seen` has every region that a
    value was in, the layout there, what the type says, and the type itself.
    """

    def __init__(self, plan: Resolved, mesh: Mesh | AbstractMesh):
        super().__init__(plan, mesh)
        self.seen: dict[tuple[str, str, str, str], None] = {}

    def weight(self, param):
        """The weight as it is used. Where the step has marked the stored one, its gradient stays a sum."""
        life, dims = self.plan.life(param.dims), param.dims
        shard = self.lay(param[...], life.stored, dims, marked=True).astype(self.dtype)
        return checkpoint_name(self.note(self.lay(shard, life.used, dims, marked=True), dims), WEIGHT)

    def beside(self, f: Callable, x: Array, param) -> Array:
        """``f(x, weight)``, with the weight spread as ``x`` is, by an outer product with ones: the gradient
        of that is an unfinished sum, which JAX's rule for broadcasting lacks. Nothing of it is kept."""
        weight = self.weight(param)
        lead = x.ndim - weight.ndim
        cuts = PartitionSpec(*jax.typeof(x).sharding.spec.partitions[:lead])
        ones = jnp.ones(x.shape[:lead], x.dtype, out_sharding=cuts)
        spread = lambda w: lax.dot_general(ones, w, (((), ()), ((), ())), precision="highest")
        return jax.checkpoint(lambda x, w: f(x, spread(w)))(x, weight)

    def move(self, x: Array, arrow: str) -> Array:
        """``x`` with the type in which the arrow ends."""
        before, _, after = arrow.partition("->")
        physical = self.plan.physical(arrow)
        x = self.lay(
            self.note(x, before), physical.after, arrow, marked=jnp.issubdtype(x.dtype, jnp.floating)
        )
        return checkpoint_name(self.note(x, after), MOVED) if physical.moves else x

    def note(self, x: Array, text: str, layout: Layout | None = None) -> Array:
        """``x``, whose type is the layout of what ``text`` names; refused where it is not."""
        layout = layout or self.plan.place(text.strip())
        found, kind = from_type(x, layout.letters or None), str(jax.typeof(x))
        if set(found.sums) != set(layout.sums) or found.dims != layout.dims:
            raise ValueError(f"'{text.strip()}' is '{layout}' here, but the type {kind} is '{found}'")
        self.seen[text.strip(), str(layout), str(found), kind] = None
        return x

    def lay(self, x: Array, layout: Layout, text: str, marked: bool = False) -> Array:
        """``x`` typed as a layout says; ``marked`` as used in the region in which ``text`` ends."""
        region = parse_layout(text.rpartition("->")[2].strip()).region if marked else ""
        differ = (*self.plan.varying(region), *from_type(x).axes) if region else ()
        marks = [a for a in differ if a not in layout.axes + layout.sums]
        with scope(text):
            # XLA books a collective under what is before it, there and back: without barriers, a product.
            x = reshard(lax.optimization_barrier(x), NamedSharding(self.mesh, kind(layout, marks)))
            return lax.optimization_barrier(x)

    def carry_out(self, x: Array, arrow: Arrow, text: str = "") -> Array:
        """``x`` with the type in which a physical arrow ends."""
        return self.note(self.lay(x, arrow.after, text or str(arrow)), text, arrow.after)

    def leave(self, multiply: Callable, x: Array, arrow: str, *weights: Array) -> Array:
        """``multiply(x, *weights)`` as an unfinished sum, moved."""
        return self.move(multiply(x, *weights, out_sharding=kind(self.plan.physical(arrow).before)), arrow)

    def summed(self, f: Callable, layouts: list[str], arrow: str) -> Callable:
        """An island whose result is typed as an unfinished sum, moved."""
        island = self.local(functools.partial(f, self.explicit), layouts, arrow.partition("->")[0].strip())
        return lambda *args: self.move(island(*args), arrow)

    def total(self, x: Array, layout: str) -> Array:
        """The sum over all dims, finished."""
        place, text = self.plan.place(layout), "loss, tokens and norm"
        sums = Layout((), place.axes + place.sums)
        return self.carry_out(
            lax.reduce_sum(x, range(x.ndim), out_sharding=kind(sums)), Arrow(sums, Layout(())), text
        )

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """``f`` inside shard_map, on each device's blocks; the sums that it leaves unfinished stay so."""
        ends = jax.tree.map(self.plan.place, result)

        def unfinished(y, end):
            return lax.pcast(vary(y, end.sums), end.sums, to="unreduced") if end.sums else y

        def call(*args):
            marks = [jax.typeof(x).sharding.spec.reduced for x in map(self.note, args, layouts)]
            given = tuple(kind(self.plan.place(x), mark) for x, mark in zip(layouts, marks, strict=True))
            block = self.explicit.local(f, layouts, result)
            inside = lambda *args: jax.tree.map(unfinished, block(*map(vary, args, marks)), ends)
            out = jax.shard_map(inside, mesh=self.mesh, in_specs=given, out_specs=jax.tree.map(kind, ends))(
                *args
            )
            return jax.tree.map(self.note, out, result)

        return call
