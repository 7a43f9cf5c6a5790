"""What the compact package takes from JAX without a public name, or by a name that JAX is about to change.

One function for each, with the reason. What `inspect` and `launch` need alone is in their own `_jax.py`. No
other file has such a name, and tests/test_channels.py fails for each of them on the day that JAX changes it.

    function                             what it is                       why it is needed
    install_channels                     how JAX lowers a program         one channel for all collectives
    ATTENTION_KERNEL, OF_SHARDS          names of primitives              a remat policy is given them alone
    is_own_gather                        what is in a custom gradient     the same
    equations, part_of                   a traced function's equations    ClosedJaxpr becomes Jaxpr
    PARSE_FLAGS                          XLA's reader of XLA_FLAGS        it ends the process at unknown ones
"""

import functools
import inspect
import itertools
import warnings
from typing import Any

import jax

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


# ------------------------------------------------------------------------------------------- traced functions


def equations(closed: Any) -> tuple[Any, list]:
    """Return the equations of a traced function, and its constants. ClosedJaxpr becomes an alias of Jaxpr,
    and its two accessors go."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def part_of(jaxpr: Any, eqns: list, invars: list, outvars: list) -> Any:
    """Return some equations of a jaxpr, from these variables to those, as one of their own."""
    unnamed = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(eqns=eqns, invars=invars, outvars=outvars, debug_info=unnamed)


# ----------------------------------------------------------------------------------------------- XLA's flags

PARSE_FLAGS = "from jaxlib.xla_client import CompileOptions; CompileOptions()"  # without a device
