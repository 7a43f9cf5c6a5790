"""The modes in which XLA's partitioner writes the collectives: `Auto`, where an arrow is a sharding
constraint, and `Explicit`, where a layout is a type, an arrow is `jax.sharding.reshard`, and JAX checks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, reshard
from jaxtyping import Array

from llmpar.parallel.collective_matmul import matmul
from llmpar.parallel.collectives import MOVED, WEIGHT, scope, vary
from llmpar.parallel.mesh import as_type, from_type, sharding, spec
from llmpar.parallel.modes import Manual, Solo
from llmpar.plan.layout import METRICS, WHOLE, Arrow, Layout, parse_layout
from llmpar.plan.model_config import Weight
from llmpar.plan.plan import Resolved


class Auto(Solo):
    """Under `jax.jit`: an arrow is a sharding constraint, and XLA's partitioner chooses the collectives."""

    def weight(self, param):
        """Return the parameter, constrained to the layout in which it is used."""
        return checkpoint_name(
            self.constrain(super().weight(param), self.plan.place(param.dims)), WEIGHT
        )

    def move(self, x: Array, arrow: str) -> Array:
        """Constrain ``x`` to the arrow's last layout; the partitioner chooses where a sum is finished."""
        return self.constrain(x, self.plan.physical(arrow).after) if x.ndim else x

    def local(self, f: Callable, layouts: Sequence[Any], result: Any) -> Callable:
        """Run ``f`` inside shard_map, on each device's blocks, and finish its unfinished sums."""
        given = jax.tree.map(lambda x: spec(self.plan.place(x)), tuple(layouts))
        ends = jax.tree.map(self.plan.place, result)
        block = self.island.local(f, layouts, result)

        def inside(*args):
            return jax.tree.map(
                lambda y, end: lax.psum(y, end.sums) if end.sums else y, block(*args), ends
            )

        return jax.shard_map(
            inside, mesh=self.mesh, in_specs=given, out_specs=jax.tree.map(spec, ends)
        )

    island = property(
        lambda self: Manual(self.plan), doc="`Manual`: an island is inside shard_map."
    )

    def constrain(self, x: Array, layout: Layout) -> Array:
        """Pin a value's layout."""
        return lax.with_sharding_constraint(x, sharding(self.mesh, layout))

    def carry_out(self, x: Array, arrow: Arrow, *, invariant: bool = False) -> Array:
        """Constrain ``x`` to a physical arrow's last layout."""
        return self.constrain(x, arrow.after)

    def over_devices(self, f: Callable, layouts: Any, results: Any) -> Callable:
        """Return ``f`` itself, a function of global arrays."""
        return f

    def unfinished(self, w: Array, weight: Weight) -> Array:
        """Return the weight itself: XLA decides when to sum its gradient."""
        return w

    def zeros(self, shape: tuple[int, ...], layout: Layout) -> Array:
        """Return zeros with a layout. A scalar has none: in these modes its sum is always finished."""
        zeros = jnp.zeros(shape)
        return self.carry_out(zeros, Arrow(WHOLE, layout)) if shape else zeros


class Explicit(Auto):
    """On a mesh of explicit axes: a layout is a type, an arrow is `jax.sharding.reshard`, and JAX checks.

    In the type, ``unreduced={a}`` is an unfinished sum ``+a``, and ``reduced={a}`` is what `Manual` calls
    varying: a mark on a value that is the same all over the axis a, and is used with values that are not.
    The gradient of such a value is an unfinished sum over a. In the backward pass the move that set the mark
    finishes it. `seen` has every region that a value was in, its layout, the layout in the type, and the type
    itself.
    """

    def __init__(self, plan: Resolved, mesh: Mesh | AbstractMesh):
        super().__init__(plan, mesh)
        self.seen: dict[tuple[str, str, str, str], None] = {}

    def weight(self, param):
        """Return the weight as it is used. Where the step marked the stored one, its gradient stays a sum."""
        layouts, dims = self.plan.layouts_of(param.dims), param.dims
        shard = self.lay(param[...], layouts.stored, dims, marked=True).astype(self.dtype)
        return checkpoint_name(
            self.note(self.lay(shard, layouts.used, dims, marked=True), dims), WEIGHT
        )

    def with_weight(self, f: Callable, x: Array, param) -> Array:
        """Return ``f(x, weight)``, with the weight spread as ``x`` is, by an outer product with ones: the
        gradient of that is an unfinished sum, which JAX's rule for broadcasting lacks. Nothing is saved."""
        weight = param if isinstance(param, Array) else self.weight(param)
        lead = x.ndim - weight.ndim
        cuts = PartitionSpec(*jax.typeof(x).sharding.spec.partitions[:lead])
        ones = jnp.ones(x.shape[:lead], x.dtype, out_sharding=cuts)
        spread = lambda w: lax.dot_general(ones, w, (((), ()), ((), ())), precision="highest")
        return jax.checkpoint(lambda x, w: f(x, spread(w)))(x, weight)

    def move(self, x: Array, arrow: str) -> Array:
        """Return ``x`` with the type of the arrow's last layout."""
        before, _, after = arrow.partition("->")
        physical = self.plan.physical(arrow)
        marked = jnp.issubdtype(x.dtype, jnp.floating)
        x = self.lay(self.note(x, before), physical.after, arrow, marked)
        return checkpoint_name(self.note(x, after), MOVED) if physical.moves else x

    def note(self, x: Array, text: str, layout: Layout | None = None) -> Array:
        """Return ``x`` after a check that its type is the layout of what ``text`` names."""
        layout = layout or self.plan.place(text.strip())
        typed, says = from_type(x, layout.letters or None), str(jax.typeof(x))
        if set(typed.sums) != set(layout.sums) or typed.dims != layout.dims:
            raise ValueError(
                f"'{text.strip()}' is '{layout}' here, but the type {says} is '{typed}'"
            )
        self.seen[text.strip(), str(layout), str(typed), says] = None
        return x

    def lay(self, x: Array, layout: Layout, text: str, marked: bool = False) -> Array:
        """Reshard ``x`` to a layout. ``marked``: also with ``reduced=`` marks, the axes on which the last
        region of ``text`` sees different values: ``float32[64,176]`` becomes ``float32[64,176]{R:dp}``."""
        region = parse_layout(text.rpartition("->")[2].strip()).region if marked else ""
        differ = (*self.plan.varying(region), *from_type(x).axes) if region else ()
        marks = [a for a in differ if a not in layout.axes + layout.sums]
        with scope(text):
            # XLA may name a collective after the operation before it, in the backward pass too. The barriers
            # keep it under this scope's name.
            x = reshard(
                lax.optimization_barrier(x), NamedSharding(self.mesh, as_type(layout, marks))
            )
            return lax.optimization_barrier(x)

    def carry_out(self, x: Array, arrow: Arrow, *, invariant: bool = False) -> Array:
        """Return ``x`` with the type of a physical arrow's last layout."""
        return self.note(self.lay(x, arrow.after, arrow.name()), arrow.text, arrow.after)

    def unfinished(self, w: Array, weight: Weight) -> Array:
        """Return a stored weight whose type has the marks with which its gradient stays an unfinished sum, if
        it has a gradient and the plan sums gradients at the end."""
        if weight.frozen or self.plan.reduce != "end":
            return w
        return self.lay(w, self.plan.stored(weight.dims), weight.dims, marked=True)

    def matmul_move(self, x: Array, weight: Any, arrow: str) -> Array:
        """Multiply ``x`` by a weight, which gives the type of an unfinished sum, then move the result."""
        return self.move(
            matmul(x, weight, out_sharding=as_type(self.plan.physical(arrow).before)), arrow
        )

    def summed(self, f: Callable, layouts: list[str], arrow: str) -> Callable:
        """Return an island whose result has the type of an unfinished sum, and is then moved."""
        island = self.local(
            functools.partial(f, self.island), layouts, arrow.partition("->")[0].strip()
        )
        return lambda *args: self.move(island(*args), arrow)

    def periods(self, stack: Any, times: int) -> Any:
        """Return the weights with a dim for periods. JAX reshapes no type with marks, and the gradient of a
        stack has no rule for them (0.10): slices, each of a place, are joined."""
        num = jax.tree.leaves(stack)[0].shape[0] // times
        part = lambda w, place: lax.expand_dims(lax.slice_in_dim(w, place, None, num), (1,))
        return jax.tree.map(lambda w: lax.concatenate([part(w, i) for i in range(num)], 1), stack)

    def total(self, x: Array, layout: str) -> Array:
        """Sum over all dims, and finish the sum."""
        place = self.plan.place(layout)
        sums = Layout((), place.axes + place.sums)
        total = lax.reduce_sum(x, range(x.ndim), out_sharding=as_type(sums))
        return self.carry_out(total, Arrow(sums, WHOLE, text=METRICS))

    def local(self, f: Callable, layouts: Sequence[Any], result: Any) -> Callable:
        """Run ``f`` inside shard_map, on each device's blocks; sums that it leaves unfinished stay so."""
        ends = jax.tree.map(self.plan.place, result)

        def unfinished(y, end):
            return lax.pcast(vary(y, end.sums), end.sums, to="unreduced") if end.sums else y

        def call(*args):
            noted = jax.tree.map(self.note, args, tuple(layouts))
            marks = jax.tree.map(lambda x: jax.typeof(x).sharding.spec.reduced, noted)
            given = jax.tree.map(
                lambda x, mark: as_type(self.plan.place(x), mark), tuple(layouts), marks
            )
            block = self.island.local(f, layouts, result)
            varying = lambda args: jax.tree.map(vary, args, marks)
            inside = lambda *args: jax.tree.map(unfinished, block(*varying(args)), ends)
            types = jax.tree.map(as_type, ends)
            island = jax.shard_map(inside, mesh=self.mesh, in_specs=given, out_specs=types)
            return jax.tree.map(self.note, island(*args), result)

        return call
