"""`par`, by which the model's text multiplies, moves and sums: here `Solo`, on one device, and `Manual`,
inside shard_map; in `llmpar.parallel.partitioned` `Auto`, under XLA's partitioner, and `Explicit`, with
layouts as types. The text is the same in all four modes, and never names a mesh axis:

    weights  par.weight(p)             a parameter, as it is needed for computing
             par.beside(f, x, p)       f(x, weight) element by element: adds a bias, multiplies by a scale
    moves    par.move(x, arrow)        to another region, or from an unfinished sum to a finished one
             par.max(x, arrow)         the same for a maximum, through which no gradient flows
             par.ragged(x, …, arrow)   an all-to-all of which each block is sent in part
    matmuls  par.move_matmul(x, arrow, *ws)   a move, and the matmuls right behind it
             par.matmul_move(x, w, arrow)     a matmul, and the move right behind it
    sums     par.summed(f, …, arrow)   a function: f gives each device's term of a sum, the arrow finishes it
             par.total(x, layout)      the sum over all dims
    islands  par.local(f, …)           f on a device's own blocks. Inside f moves go by `par.island`;
                                       par.index(layout) is the number of the device's block of a dim,
                                       par.parts(layout) of how many, par.axes(layout) the axes that cut it
    loops    par.layers(fs, x, ws)     over layers; where their kinds alternate (window, full), an iteration
                                       runs one period, for which par.periods(ws, times) reshapes the weights
             par.chunked(f, xs, n)     over pieces of a sequence

In `Manual` every move of an arrow becomes a collective or a slice, in a scope of the arrow's text, by which a
census of the compiled program (`llmpar.inspect.census`) tells what moves for which line of the model.
Autodiff writes the backward collectives: all-gather and reduce-scatter are each other's transpose, and the
transpose of "from here on, devices differ" (`lax.pcast`, free in the forward pass) is the all-reduce of
Megatron's operator f (Shoeybi et al. 2019, section 3). shard_map's varying-axes check is what makes those
transposes right; it stays on.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Int

from llmpar.parallel import wire
from llmpar.parallel.collective_matmul import Ring, gather_matmul, matmul, matmul_scatter, matmuls
from llmpar.parallel.collectives import MOVED, WEIGHT, barrier, ragged, scope, send, vary, varying
from llmpar.parallel.remat import HIDDEN, OF_REGION, saving
from llmpar.plan.layout import Arrow, parse_arrow, parse_layout
from llmpar.plan.plan import Plan, Resolved


class Solo:
    """One device: moves do nothing. The reference that every test compares with."""

    # in serving an object that keeps keys and values and attends to them (`serve.decode`)
    cache: Any = None

    def __init__(self, plan: Resolved | None = None):
        self.plan = plan = plan or Plan().resolve()
        self.platform = plan.platform  # of the devices: cpu, gpu or tpu
        self.dtype = jnp.dtype(plan.dtype)

    def weight(self, param: nnx.Variable) -> Array:
        """Return the parameter in the computing dtype."""
        return param[...].astype(self.dtype)

    def beside(self, f: Callable, x: Array, param: nnx.Variable) -> Array:
        """Return ``f(x, weight)``, element by element along the last dims of ``x``."""
        weight = self.weight(param)
        return f(x, jnp.expand_dims(weight, range(x.ndim - weight.ndim)))

    def move(self, x: Array, arrow: str) -> Array:
        """Return ``x`` itself: one device has it."""
        return x

    def max(self, x: Array, arrow: str) -> Array:
        """Return ``x`` itself, behind a stop_gradient."""
        return lax.stop_gradient(x)

    def ragged(
        self, x: Array, send: Int[Array, " g"], receive: Int[Array, " g"], arrow: str
    ) -> Array:
        """Return ``x`` itself, as `move` does."""
        return x

    def move_matmul(
        self, x: Array, arrow: str, *weights: Any, biases: Sequence[nnx.Variable] = ()
    ) -> list[Array]:
        """Move ``x``, ``b s …``, multiply it by each of the weights (`matmul`), and add their biases. Remat
        knows the results by the region's name (`OF_REGION`)."""
        ring = self.ring(arrow, "all-gather")
        results = (
            gather_matmul(ring, x, weights) if ring else matmuls(self.move(x, arrow), *weights)
        )
        if biases:
            results = [
                self.beside(jnp.add, y, bias) for y, bias in zip(results, biases, strict=True)
            ]
        name = OF_REGION[parse_arrow(arrow).after.region]
        if name == HIDDEN and self.plan.ffn_chunks > 1:
            return results  # without a name: no chunk's hidden values are saved
        return [checkpoint_name(y, name) for y in results]

    def matmul_move(self, x: Array, weight: Any, arrow: str) -> Array:
        """Multiply ``x`` by a weight (`matmul`), then move the result: the mirror image of `move_matmul`."""
        ring = self.ring(arrow, "reduce-scatter")
        return matmul_scatter(ring, x, weight) if ring else self.move(matmul(x, weight), arrow)

    def ring(self, arrow: str, kind: str) -> Ring | None:
        """Return None: on one device a matmul has no collective beside it."""
        return None

    def summed(self, f: Callable, layouts: list[str], arrow: str) -> Callable:
        """Return a function that calls ``f(par, …)`` on values with these ``layouts`` (which `Explicit`
        reads) and moves the result: on each device it is one term of a sum, which the arrow finishes."""
        return lambda *args: self.move(f(self, *args), arrow)

    def total(self, x: Array, layout: str) -> Array:
        """Sum over all dims of a value with this ``layout``. In `Manual` this is the device's own term."""
        return x.sum()

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """Return ``f`` as a function of whole values with these ``layouts``, and a result with that one."""
        return f

    @property
    def island(self) -> "Solo":
        """The mode inside an island, where a device sees its blocks."""
        return self

    def index(self, layout: str) -> int | Int[Array, ""]:
        """Return 0: there is one block."""
        return 0

    def parts(self, layout: str) -> int:
        """Return the number of blocks of the layout's one dim."""
        return self.plan.mesh.along(self.axes(layout))

    def axes(self, layout: str) -> tuple[str, ...]:
        """Return the mesh axes that cut the layout's one dim, for an island that must name them."""
        return ()

    def layers(self, blocks: Sequence[Callable], x: Any, stack: Any) -> tuple[Any, Any]:
        """Run ``x, aux = block(x, weights)`` once per layer: a scan over the leading dim of ``stack``. An
        iteration runs all ``blocks``, one after the other, each for one layer. The auxiliary results are
        stacked in the order of the layers."""
        length = jax.tree.leaves(stack)[0].shape[0]
        no_loop = self.plan.unroll == 0 or self.plan.unroll >= length
        blocks = [saving(self.plan, block, no_loop) for block in blocks]
        x, outputs = lax.scan(chain(blocks), x, stack, unroll=self.plan.unroll or length)
        interleave = lambda *parts: jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
        if len(outputs) > 1:
            return x, jax.tree.map(interleave, *outputs)
        return x, outputs[0] if outputs else None

    def periods(self, stack: Any, times: int) -> Any:
        """Return the weights of layers with a leading dim for ``times`` periods."""
        return jax.tree.map(lambda w: w.reshape(times, -1, *w.shape[1:]), stack)

    def chunked(self, f: Callable, xs: Any, num_chunks: int, recompute: bool = False) -> Any:
        """Apply ``f`` to ``num_chunks`` pieces of ``xs``, one after the other, and join the results, all
        along dim 1. It bounds the memory of what ``f`` computes of a piece, such as logits.

        A piece is every ``num_chunks``-th position, not a stretch: so each device has an equal part of every
        piece. The backward pass computes a piece again, but repeats no communication. With ``recompute``
        that holds of one piece too, unless XLA merges it with the forward pass.
        """
        if recompute or num_chunks > 1:
            policy = jax.checkpoint_policies.save_only_these_names(MOVED)
            f = jax.checkpoint(f, policy=policy, prevent_cse=False)
        if num_chunks == 1:
            return f(xs)
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
        """Return the weight as it is used: gathered from its stored shard (`gather`), or only cast where a
        pipeline has gathered it once for the step.

        The backward pass is the mirror image: reduce-scatter over the axes of ZeRO in the computing dtype.
        With ``reduce="layer"`` a float32 all-reduce of the shard follows, over every other axis on which the
        region's values differ: the transpose of `_vary` below. Else `Step` has typed the parameter as varying
        over these axes before, `_vary` changes nothing, and `Step` sums over them at the end.
        """
        region = parse_layout(param.dims).region
        x = self._vary(param[...], self.plan.varying(region), param.dims)
        whole = x.astype(self.dtype) if self.plan.gathers == "step" else self.gather(x, param.dims)
        return checkpoint_name(whole, WEIGHT)

    def gather(self, shard: Array, dims: str) -> Array:
        """Cast a weight's stored shard, then gather it if it is stored cut (ZeRO-3)."""
        return self.carry_out(shard.astype(self.dtype), self.plan.layouts_of(dims).gather, dims)

    def move(self, x: Array, arrow: str) -> Array:
        """Carry out the physical arrow: the collectives of `llmpar.plan.layout.Arrow.moves` in order."""
        physical = self.plan.physical(arrow)
        x = self.carry_out(x, physical, arrow)
        x = self._vary(x, physical.varying, arrow)
        return checkpoint_name(x, MOVED) if physical.moves else x

    def carry_out(self, x: Array, arrow: Arrow, text: str = "", invariant: bool = False) -> Array:
        """Run the collectives of a physical arrow. ``invariant``: gathered results are typed as equal on all
        devices, which they are."""
        dims = arrow.before.dims or arrow.after.dims  # the layout of a whole value names none
        position = {d.name: i for i, d in enumerate(dims)}
        for axis in arrow.before.sums + arrow.before.axes:
            if axis not in varying(x):
                raise ValueError(
                    f"arrow '{text or arrow}' starts with {axis} in its layout, but the value is the same"
                    f" all over {axis}; it was reduced already, or never cut"
                )
        to: Literal["varying", "invarying"] = "invarying" if invariant else "varying"
        with scope(arrow.named(text)):
            for move in arrow.moves:
                dim = position.get(move.gathers or move.cuts, 0)
                if (arrow.wire or arrow.gradient_wire) and move.kind != "slice":
                    x = wire.send_narrow(x, move, dim, arrow, arrow.named(text, backward=True))
                else:
                    x = send(x, move, position, to)
        return x

    def _vary(self, x: Array, axes: tuple[str, ...], text: str) -> Array:
        """Let ``x`` differ along ``axes`` from now on: backward, an all-reduce of its gradient."""
        with scope(text):
            return vary(x, axes)

    def max(self, x: Array, arrow: str) -> Array:
        """All-reduce by maximum over the axes of the arrow's unfinished dims; a constant to autodiff."""
        axes = self.plan.physical(arrow).before.sums
        x = lax.stop_gradient(x)
        if not axes:
            return x
        with scope(arrow):
            return checkpoint_name(lax.pmax(x, axes), MOVED)

    def ragged(
        self, x: Array, send: Int[Array, " g"], receive: Int[Array, " g"], arrow: str
    ) -> Array:
        """Run an all-to-all ``b/a e c … -> b e/a c …`` or back, in which this rank sends only the first
        ``send[j]`` rows of the block for rank j, and receives ``receive[j]`` from it; the rows after these
        are undefined. XLA has it for GPUs and TPUs, not for CPUs."""
        physical = self.plan.physical(arrow)
        # One move, over one axis. A device has b e = 1 n before and n 1 after: a reshape exchanges them.
        axis = physical.moves[0].axes[0]
        rows = vary(x, physical.varying).reshape(-1, *x.shape[3:])
        with scope(arrow):
            y = ragged(rows, send, receive, axis)
        return checkpoint_name(y.reshape(x.shape[1], x.shape[0], *x.shape[2:]), MOVED)

    def ring(self, arrow: str, kind: str) -> Ring | None:
        """Return the ring of an arrow, where the plan has `tp_comm_overlap` and the arrow is a collective of
        this kind: one block is multiplied while another, or its sum, travels."""
        moves = self.plan.physical(arrow).moves
        if not self.plan.tp_comm_overlap or [move.kind for move in moves] != [kind]:
            return None
        return Ring(moves[0].axes, arrow, self.plan.hop)

    def local(self, f: Callable, layouts: list[str], result: Any) -> Callable:
        """Return ``f``. On simulated devices the arguments of ``f`` pass a `barrier`, which keeps XLA from
        moving the collectives of ``f`` out of a loop. Other devices have no barrier: there ``f`` would wait
        for weights that are still being gathered."""
        return (lambda *args: f(*barrier(args))) if self.platform == "cpu" else f

    def index(self, layout: str) -> int | Int[Array, ""]:
        """Return the position of this device's block among the blocks of the layout's one dim."""
        axes = self.axes(layout)
        return lax.axis_index(axes) if axes else 0

    def axes(self, layout: str) -> tuple[str, ...]:
        """Return the mesh axes that cut the layout's one dim."""
        return self.plan.place(layout).axes
