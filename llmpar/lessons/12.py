"""Exercises of lesson 12 that are computed: layouts of an explicit program, and arrows that it names."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from llmpar.inspect.explain import explain
from llmpar.lessons import Exercise
from llmpar.parallel.mesh import abstract_mesh, as_type, explicit, from_type, make_mesh
from llmpar.plan.layout import Arrow, Dim, Layout, parse_layout

_GIVEN = {"b/dp s d": (4, 8, 16), "b/dp s m/tp": (4, 8, 32), "d m/tp": (16, 32), "m/tp d": (32, 16)}
"""The lesson's values by layout, and their shapes."""
OPEN = P("dp", None, None, unreduced={"tp"})
_WHOLE = P("dp", None, None)
_ROWS, _COLUMNS = P("dp", "tp", None), P("dp", None, "tp")


def unfinished() -> Exercise:
    """Ask for the layout of a product over a dim that is cut, before anything is sent."""
    return Exercise("core", "b/dp s d +tp", observe=lambda text: str(parse_layout(text)))


def scattered() -> Exercise:
    """Ask for the product that ends cut by tp along s: a reduce-scatter."""

    def solution(h, down):
        y = jnp.matmul(h, down, out_sharding=OPEN)
        return reshard(y, P("dp", "tp", None))

    left_open = lambda h, down: jnp.matmul(h, down, out_sharding=OPEN)
    whole = lambda h, down: reshard(left_open(h, down), _WHOLE)
    columns = lambda h, down: reshard(left_open(h, down), _COLUMNS)
    wrong = dict(
        whole=whole,
        twice=lambda h, down: reshard(whole(h, down), _ROWS),
        columns=columns,
        left_open=left_open,
        gathered=lambda h, down: reshard(reshard(h, _WHOLE) @ reshard(down, P(None, None)), _ROWS),
        by_columns=lambda h, down: reshard(columns(h, down), _ROWS),
        without_dp=lambda h, down: reshard(left_open(h, down), P(None, "tp", None)),
        moved_first=lambda h, down: reshard(h, _ROWS) @ reshard(down, P(None, None)),
    )
    return Exercise(
        "stretch", solution, wrong, lambda answer: _traced(answer, "b/dp s m/tp", "m/tp d")
    )


def residual() -> Exercise:
    """Ask for a repaired feed-forward with its residual: one all-reduce, before the addition."""

    def solution(x, up, down):
        y = jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN)
        return x + reshard(y, _WHOLE)

    left_open = lambda x, up, down: jnp.matmul(jax.nn.silu(x @ up), down, out_sharding=OPEN)
    forgotten = lambda x, up, down: reshard(left_open(x, up, down), _WHOLE)

    def gathers_hidden(x, up, down):
        return x + reshard(jax.nn.silu(x @ up), _WHOLE) @ reshard(down, P(None, None))

    def cut(where):
        return lambda x, up, down: reshard(x, where) + reshard(left_open(x, up, down), where)

    wrong = dict(
        y_twice=lambda x, up, down: forgotten(x, up, down) + forgotten(x, up, down),
        forgotten=forgotten,
        gathers_hidden=gathers_hidden,
        stays_cut=cut(_ROWS),
        columns=cut(_COLUMNS),
        left_open=left_open,
        added_twice=lambda x, up, down: x + solution(x, up, down),
    )
    run = lambda answer: _traced(answer, "b/dp s d", "d m/tp", "m/tp d")
    in_two_calls = lambda *given: given[0] + reshard(reshard(left_open(*given), _ROWS), _WHOLE)
    return Exercise("expert", solution, wrong, run, also=dict(in_two_calls=in_two_calls))


def _traced(function, *layouts: str) -> dict:
    """Trace a function on explicit axes, dp=2 and tp=4; return its result's layout, the collectives of its
    types, and its value, as one device computes it. A sharding error is raised as the missing arrow."""
    mesh = explicit(abstract_mesh("dp=2 tp=4"))
    laid = {text: NamedSharding(mesh, as_type(parse_layout(text))) for text in layouts}
    args = [
        jax.ShapeDtypeStruct(_GIVEN[text], jnp.float32, sharding=sharding)
        for text, sharding in laid.items()
    ]
    with jax.sharding.use_abstract_mesh(mesh), explain():
        lines = jax.make_jaxpr(function)(*args)
    sent = [move.kind for line in lines.eqns for move in moves(line) if move.kind != "slice"]
    with jax.set_mesh(explicit(make_mesh("dp=1 tp=1", jax.devices()[:1]))):
        numbers = (jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(args))
        given = [reshard(x, arg.sharding.spec) for x, arg in zip(numbers, args, strict=True)]
        value = function(*given).addressable_shards[0].data
    return {
        "layout": str(from_type(lines.out_avals[0], "bsd")),
        "sends": sorted(sent),
        "value": np.asarray(value),
    }


def moves(line) -> tuple:
    """Return what a line of a trace moves: a reshard; a matmul that sums up, or gathers a cut factor."""
    after = from_type(line.outvars[0].aval)
    if line.primitive.name == "reshard":
        return Arrow(from_type(line.invars[0].aval), after).moves
    if line.primitive.name != "dot_general":
        return ()
    (left, right), _ = line.params["dimension_numbers"]
    cuts = [
        from_type(x.aval).dims[i].axes
        for x, (i, *_) in zip(line.invars, (left, right), strict=True)
    ]
    if cuts[0] != cuts[1]:
        return Arrow(Layout((Dim("m", cuts[0] or cuts[1]),)), Layout((Dim("m"),))).moves
    summed = tuple(axis for axis in cuts[0] if axis not in after.sums)
    before = [Dim(d.name, tuple(a for a in d.axes if a not in summed)) for d in after.dims]
    return Arrow(Layout(tuple(before), after.sums + summed), after).moves
