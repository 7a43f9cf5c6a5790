"""Exercises of lesson 12: layouts of an explicit program, and the arrows that it must name."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from llmpar.exercises import Exercise
from llmpar.inspect.explain import explain
from llmpar.mesh import abstract_mesh, as_type, explicit, from_type
from llmpar.notation import Arrow, Dim, Layout, parse_layout

GIVEN = {"b/dp s d": (4, 8, 16), "b/dp s m/tp": (4, 8, 32), "d m/tp": (16, 32), "m/tp d": (32, 16)}
"""The lesson's values by layout, and their shapes."""
OPEN = P("dp", None, None, unreduced={"tp"})
WHOLE = P("dp", None, None)


def unfinished() -> Exercise:
    """Ask for the layout of a product over a dim that is cut, before anything is sent."""
    return Exercise(
        level="core",
        solution="b/dp s d +tp",
        observe=lambda text: str(parse_layout(text)),
        wrong=[
            ("b s d +tp", "dp still cuts b: the product does nothing to the rows."),
            (
                "b/dp s d",
                (
                    "That is the finished sum. Nothing has been sent yet: each rank of tp has added up its"
                    " own m."
                ),
            ),
            ("b/dp s d/tp", "No rank has a slice of d: each has all of d, but only some terms of every sum."),
            ("b/dp s m/tp", "That is the hidden value h. The product sums over m, and m is gone."),
            ("b/dp s/tp d", "That is after a reduce-scatter. Nothing has been sent yet, so nothing was cut."),
            (
                "b/dp s m +tp",
                "The sum is open over tp, but m is the dim that was summed. The product ends in d.",
            ),
            ("b/dp s m d +tp", "m was summed, so it is gone; what is left of its cut is the + alone."),
        ],
        nudges=["Each device has some of the m. Is what it adds up the finished y?"],
        because=(
            "m was cut by tp and is summed: each rank has added up its own terms, and the sum is open"
            " over tp."
        ),
        hint="Which dims does y have? The axis that cut the dim that was summed now stands behind a +.",
    )


def scattered() -> Exercise:
    """Ask for the product that ends cut by tp along s: a reduce-scatter."""

    def solution(h, down):
        y = jnp.matmul(h, down, out_sharding=OPEN)
        return reshard(y, P("dp", "tp", None))

    def whole(h, down):
        return reshard(jnp.matmul(h, down, out_sharding=OPEN), WHOLE)

    def twice(h, down):
        return reshard(whole(h, down), P("dp", "tp", None))

    def columns(h, down):
        return reshard(jnp.matmul(h, down, out_sharding=OPEN), P("dp", None, "tp"))

    def left_open(h, down):
        return jnp.matmul(h, down, out_sharding=OPEN)

    def gathered(h, down):
        whole_h, whole_down = reshard(h, WHOLE), reshard(down, P(None, None))
        return reshard(whole_h @ whole_down, P("dp", "tp", None))

    def by_columns(h, down):
        return reshard(columns(h, down), P("dp", "tp", None))

    def without_dp(h, down):
        return reshard(jnp.matmul(h, down, out_sharding=OPEN), P(None, "tp", None))

    def moved_first(h, down):
        return reshard(h, P("dp", "tp", None)) @ reshard(down, P(None, None))

    return Exercise(
        level="stretch",
        solution=solution,
        observe=lambda answer: traced(answer, "b/dp s m/tp", "m/tp d"),
        wrong=[
            (whole, "The sum is finished, but whole on every rank of tp. Asked for is `b/dp s/tp d`."),
            (
                twice,
                (
                    "The layout is right, but an all-reduce sends twice what is needed: go from `+tp` to"
                    " `s/tp` at once."
                ),
            ),
            (columns, "That is cut along d. The next layer's norm needs whole rows: cut s."),
            (left_open, "The sum is still open. Now the arrow: jax.sharding.reshard(y, P(…))."),
            (
                gathered,
                (
                    "The layout is right, but the hidden values and the weight travelled. Multiply the"
                    " shards, then move y."
                ),
            ),
            (by_columns, "You cut d first, and then move the cut to s by an all-to-all. Cut s at once."),
            (without_dp, "dp must go on cutting b: without it in P(…) the rows are gathered over dp."),
            (
                moved_first,
                "The layout is right, but the weight was gathered and h dealt out anew. Multiply first.",
            ),
        ],
        nudges=["Which one collective finishes a sum and leaves each rank a slice of it?"],
        because=(
            "From an open sum to a cut is one reduce-scatter, half of what an all-reduce sends. Each rank"
            " receives only the positions that it keeps."
        ),
        hint=(
            "Two lines: the product with unreduced={'tp'} in its out_sharding, then one reshard to P('dp',"
            " 'tp', None)."
        ),
    )


def residual() -> Exercise:
    """Ask for a repaired feed-forward with its residual: one all-reduce, before the addition."""

    def solution(x, up, down):
        y = jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN)
        return x + reshard(y, WHOLE)

    def forgotten(x, up, down):
        return reshard(jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN), WHOLE)

    def gathers_hidden(x, up, down):
        return x + reshard(jax.nn.silu(x @ up), WHOLE) @ reshard(down, P(None, None))

    def through_slices(x, up, down):
        y = jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN)
        return x + reshard(reshard(y, P("dp", "tp", None)), WHOLE)

    def stays_cut(x, up, down):
        y = jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN)
        return reshard(x, P("dp", "tp", None)) + reshard(y, P("dp", "tp", None))

    def added_twice(x, up, down):
        return x + solution(x, up, down)

    def left_open(x, up, down):
        return jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN)

    def columns(x, up, down):
        return reshard(x, P("dp", None, "tp")) + reshard(left_open(x, up, down), P("dp", None, "tp"))

    return Exercise(
        level="expert",
        solution=solution,
        observe=lambda answer: traced(answer, "b/dp s d", "d m/tp", "m/tp d"),
        wrong=[
            (
                lambda x, up, down: forgotten(x, up, down) + forgotten(x, up, down),
                "That adds y twice, and x not at all.",
            ),
            (forgotten, "Where is the residual? The result is x + y."),
            (
                gathers_hidden,
                (
                    "The value is right, but the hidden values and a weight were gathered: the most that"
                    " could be sent."
                ),
            ),
            (
                through_slices,
                "A reduce-scatter and an all-gather are an all-reduce, in two steps; say it in one.",
            ),
            (stays_cut, "The value is right, and cut by tp along s. The next layer takes `b/dp s d`."),
            (columns, "The value is right, and cut by tp along d. A norm needs whole rows: `b/dp s d`."),
            (left_open, "The sum is still open over tp, and x is not added yet."),
            (added_twice, "One addition too many. The result is x + y, each of them once."),
        ],
        nudges=["Which of the two addends has a sum that is not finished?"],
        because=(
            "The sum is finished once, before x is added: one all-reduce, and x counts once whatever tp is."
        ),
        hint="JAX's complaint names the line: y is `+tp` there. Finish it first, then add x.",
    )


def traced(function, *layouts: str) -> dict:
    """Trace a function on explicit axes, dp=2 and tp=4: the layout of its result, the collectives that its
    types ask for, and how many additions of whole values it has. A sharding error is told as the missing
    arrow."""
    mesh = explicit(abstract_mesh("dp=2 tp=4"))
    args = [
        jax.ShapeDtypeStruct(
            GIVEN[text], jnp.float32, sharding=NamedSharding(mesh, as_type(parse_layout(text)))
        )
        for text in layouts
    ]
    with jax.sharding.use_abstract_mesh(mesh), explain():
        lines = jax.make_jaxpr(function)(*args)
    sent = [move.kind for line in lines.eqns for move in moves(line) if move.kind != "slice"]
    added = sum(line.primitive.name == "add" for line in lines.eqns)
    return {"layout": str(from_type(lines.out_avals[0], "bsd")), "sends": sorted(sent), "additions": added}


def moves(line) -> tuple:
    """What one line of a trace moves: a reshard, or a product that finishes its own sum, or gathers what one
    factor alone has cut."""
    after = from_type(line.outvars[0].aval)
    if line.primitive.name == "reshard":
        return Arrow(from_type(line.invars[0].aval), after).moves
    if line.primitive.name != "dot_general":
        return ()
    (left, right), _ = line.params["dimension_numbers"]
    cuts = [from_type(x.aval).dims[i].axes for x, (i, *_) in zip(line.invars, (left, right), strict=True)]
    if cuts[0] != cuts[1]:
        return Arrow(Layout((Dim("m", cuts[0] or cuts[1]),)), Layout((Dim("m"),))).moves
    summed = tuple(axis for axis in cuts[0] if axis not in after.sums)
    before = [Dim(d.name, tuple(a for a in d.axes if a not in summed)) for d in after.dims]
    return Arrow(Layout(tuple(before), after.sums + summed), after).moves
