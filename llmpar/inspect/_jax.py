"""What reading a program takes from JAX without a public name (`llmpar.parallel._jax` has the package's other
such names).

    function                             what it is                       why it is needed
    program_shardings                    a program's executable           the public trees err with Refs
    unreduced_kind                       a type's kind, from JAX 0.12     a maximum is no sum
    scan_parts                           a loop's operands                0.12 has a tree of them
    on_one_device, mesh_of_ones          a program on a mesh of ones      a shard_map has its mesh inside
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np


def program_shardings(compiled: jax.stages.Compiled) -> tuple[list, list, list]:
    """Return types with shardings of a program's arguments (None: dropped), of what it captured, and of its
    results. JAX's own trees fail where a Ref is given, and take the wrong argument's where one is captured.
    """
    program, ran = cast(Any, compiled), cast(Any, compiled)._executable
    before, taken = (
        len(program._params.const_args),
        list(zip(ran.in_avals, ran._in_shardings, strict=True)),
    )
    kept = dict(zip(sorted(ran._kept_var_idx), taken, strict=False))  # captured Refs come last
    arguments = [kept.get(before + i) for i in range(program.in_tree.num_leaves)]
    given = [*zip(ran.out_avals, ran._out_shardings, strict=True)]  # and the last values of Refs
    return arguments, taken[:before] + taken[len(kept) :], given[: program.out_tree.num_leaves]


def unreduced_kind(spec: Any) -> str:
    """Name what is unfinished over a PartitionSpec's unreduced axes: sum, or from JAX 0.12 on max or min."""
    return getattr(getattr(spec, "unreduced_kind", None), "name", "sum")


@contextlib.contextmanager
def on_one_device() -> Iterator[None]:
    """Let every `jax.shard_map` that is traced here see a mesh of ones, with the axes of its own mesh: the
    same text is then the program of one device. No public function gives another mesh to a function that
    has its own. Programs that JAX has traced before are traced again."""
    from jax._src import shard_map
    from jax.experimental.xla_metadata import set_xla_metadata

    shard_map_p: Any = shard_map.shard_map_p
    bind = shard_map_p.bind_with_trace

    def alone(trace, args, avals, params):
        return bind(trace, args, avals, dict(params, mesh=mesh_of_ones(params["mesh"])))

    shard_map_p.bind_with_trace = alone
    try:
        with set_xla_metadata(llmpar_twin=next(_TWINS)):  # it is a part of the key of JAX's caches
            yield
    finally:
        del shard_map_p.bind_with_trace


_TWINS = itertools.count()


def mesh_of_ones(mesh: Any) -> Any:
    """Return a mesh with the names and types of this one's axes, each of size 1: its abstract form within a
    `jax.shard_map`, otherwise on JAX's first device."""
    sizes, kinds = (1,) * len(mesh.axis_names), mesh.axis_types
    if mesh.manual_axes:
        return jax.sharding.AbstractMesh(sizes, mesh.axis_names, axis_types=kinds)
    device = np.array(jax.devices()[:1]).reshape(sizes)
    return jax.sharding.Mesh(device, mesh.axis_names, axis_types=kinds)


def scan_parts(eqn: Any) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are carried. JAX 0.12 has a tree of
    them in the place of two numbers."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))
