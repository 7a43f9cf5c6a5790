"""All that llmpar takes from JAX without a public name, or by a name that JAX is about to change.

One function for each, with the reason. No other file of the package has such a name, and
tests/test_channels.py fails for each of them on the day that JAX changes it.

    function                             what it is                       why it is needed
    install_channels                     how JAX lowers a program         one channel for all collectives
    ATTENTION_KERNEL, OF_SHARDS          names of primitives              a remat policy is given them alone
    is_own_gather                        what is in a custom gradient     the same
    program_shardings                    a program's executable           the public trees err with Refs
    unreduced_kind                       a type's kind, from JAX 0.12     a maximum is no sum
    equations, part_of                   a traced function's equations    ClosedJaxpr becomes Jaxpr
    on_one_device, scan_parts            a program on a mesh of ones      a shard_map has its mesh inside
    processes, let_gloo_listen           how processes join               no public state, no such option
    PARSE_FLAGS                          XLA's reader of XLA_FLAGS        it ends the process at unknown ones
"""

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator
from typing import Any, cast

import jax
import numpy as np

# --------------------------------------------------------------------------------------------- how JAX lowers

# the end of a collective's channel handle; host callbacks have other types
_BETWEEN_DEVICES = "type = 1>"


@functools.cache
def install_channels() -> bool:
    """Give loops and branches of collectives channels of their own in every program that is lowered for
    simulated devices from now on. Warns, and returns False, where this JAX lowers in another function.

    JAX lowers all collectives with one channel id. XLA's executor for CPUs may enter a loop of collectives
    and a later collective in either order where no data orders them, and devices join by group and channel:
    one device's collective inside the loop may join another's outside. The program crashes, hangs or mixes
    values up (docs/simulated-devices.md). Programs for other platforms stay as they are.
    """
    try:
        from jax._src.interpreters import mlir
        from jaxlib.mlir import ir

        lower = mlir.lower_jaxpr_to_module
        ir.Operation.clone  # noqa: B018
        if not {"platforms", "num_partitions"} <= set(inspect.signature(lower).parameters):
            raise AttributeError("lower_jaxpr_to_module takes no platforms")
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"JAX {jax.__version__} lowers in another way than llmpar knows ({error}): collectives of"
            " simulated devices share a channel and may hang where no data orders them",
            stacklevel=2,
        )
        return False

    @functools.wraps(lower)
    def with_channels(*args, **kwargs):
        result = lower(*args, **kwargs)
        if tuple(kwargs["platforms"]) == ("cpu",) and kwargs.get("num_partitions", 1) > 1:
            _number(result.module, ir)
        return result

    mlir.lower_jaxpr_to_module = with_channels
    return True


def _number(module: Any, ir: Any) -> None:
    """Give the collectives of each loop's body and each branch of a lowered module a channel of their own, in
    the order of its text.

    Those in one block keep one channel: a device runs them in order, and the compiler sees which of them are
    equal. A function that the compiler inlines belongs to the block that calls it. One that is called twice
    is copied, for its loops would have their channels twice.
    """
    functions = {op.attributes["sym_name"].value: op.operation for op in module.body.operations}
    communicates: dict[str, bool] = {}  # of the functions that were visited
    channels = itertools.count(1)

    def visit(regions: Any, channel: int) -> bool:
        has_any = False
        for op in (op.operation for region in regions for block in region for op in block):
            handle = (
                str(op.attributes["channel_handle"]) if "channel_handle" in op.attributes else ""
            )
            if op.name == "func.call":
                has_any |= call(op, channel)
            elif handle.endswith(_BETWEEN_DEVICES):
                text = f"#stablehlo.channel_handle<handle = {channel}, {_BETWEEN_DEVICES}"
                op.attributes["channel_handle"] = ir.Attribute.parse(text)
                has_any = True
            else:
                for region in op.regions:
                    inlined = op.name == "sdy.manual_computation"
                    has_any |= visit([region], channel if inlined else next(channels))
        return has_any

    def call(op: Any, channel: int) -> bool:
        name = op.attributes["callee"].value
        if name not in communicates:
            communicates[name] = visit(functions[name].regions, channel)
        elif communicates[name]:
            copy, other = (
                functions[name].clone(ir.InsertionPoint(module.body)),
                f"{name}:{len(functions)}",
            )
            copy.attributes["sym_name"] = ir.StringAttr.get(other)
            op.attributes["callee"] = ir.FlatSymbolRefAttr.get(other)
            functions[other], communicates[other] = copy, visit(copy.regions, channel)
        return communicates[name]

    with module.context, ir.Location.unknown():
        visit(functions["main"].regions, next(channels))


# ---------------------------------------------------------------------------------------- names of primitives


ATTENTION_KERNEL = "dot_product_attention_fwd_wrapper"
"""cuDNN's attention. JAX gives nothing inside it a name for remat."""
OF_SHARDS = ("all_gather", "reshard", "optimization_barrier", "reduced_vary_cast")
"""How the primitives begin that make a whole weight of its shards: the gather, by `Manual` or by `Explicit`;
the barriers around that and before an island; a change of its type inside one."""


def is_own_gather(name: str, params: Any) -> bool:
    """Tell whether a primitive with these parameters is a function with a gradient of its own that gathers
    (`llmpar.parallel.wire`). JAX names no such function for a remat policy."""
    inner = equations(params["call_jaxpr"])[0].eqns if name == "custom_vjp_call" else []
    return any(equation.primitive.name == "all_gather" for equation in inner)


# ------------------------------------------------------------------------------------------ layouts and types


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


# ------------------------------------------------------------------------------------------- traced functions


def equations(closed: Any) -> tuple[Any, list]:
    """Return the equations of a traced function, and its constants. ClosedJaxpr becomes an alias of Jaxpr,
    and its two accessors go."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def part_of(jaxpr: Any, eqns: list, invars: list, outvars: list) -> Any:
    """Return some equations of a jaxpr, from these variables to those, as one of their own."""
    unnamed = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(eqns=eqns, invars=invars, outvars=outvars, debug_info=unnamed)


# ------------------------------------------------------------------------------------ a program on one device


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


# ------------------------------------------------------------------------------------------ several processes

PARSE_FLAGS = "from jaxlib.xla_client import CompileOptions; CompileOptions()"  # without a device


def processes() -> Any:
    """Return JAX's record of a job's processes, also before a device has started: its ``client`` is None
    where this process has joined none."""
    from jax._src import distributed

    return distributed.global_state


def let_gloo_listen(address: str) -> None:
    """Let Gloo, by which CPU processes exchange data, listen on this address, where this JAX has it. By
    itself it takes what the host's name resolves to, 127.0.1.1 or one that is open to others."""
    from jax._src import xla_bridge

    library: Any = getattr(xla_bridge, "_jax", None)
    if make := getattr(library, "make_gloo_tcp_collectives", None):
        library.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
