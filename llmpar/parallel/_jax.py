"""Give loops and branches of collectives channels of their own on simulated devices.

JAX lowers all collectives with one channel id. XLA's executor for CPUs may enter a loop of collectives and a
later collective in either order where no data orders them, and devices meet by group and channel: one
device's collective inside the loop may meet another's outside. The program crashes, hangs or mixes values up
(docs/simulated-devices.md). Programs for other platforms stay as they are.
"""

import functools
import inspect
import itertools
import warnings
from typing import Any

import jax

_BETWEEN_DEVICES = "type = 1>"  # how a channel handle of a collective ends; host callbacks have other types


@functools.cache
def install() -> bool:
    """Let JAX number the collectives of every program that it lowers for simulated devices from now on.
    Warns, and gives False, where this JAX has no such place."""
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
    """Give the collectives of each loop's body and each branch in a lowered module a channel of their own, in
    the order of its text.

    Those that stand side by side in one block keep one channel: a device runs them in order, and the
    compiler sees which of them are equal. What it inlines counts as part of the block that calls it. A
    function that is called twice is copied, for its loops would bring their channels twice.
    """
    functions = {op.attributes["sym_name"].value: op.operation for op in module.body.operations}
    has_some: dict[str, bool] = {}  # functions that were visited: whether collectives were found
    channels = itertools.count(1)

    def visit(regions: Any, channel: int) -> bool:
        found = False
        for op in (op.operation for region in regions for block in region for op in block):
            handle = str(op.attributes["channel_handle"]) if "channel_handle" in op.attributes else ""
            if op.name == "func.call":
                found |= call(op, channel)
            elif handle.endswith(_BETWEEN_DEVICES):
                text = f"#stablehlo.channel_handle<handle = {channel}, {_BETWEEN_DEVICES}"
                op.attributes["channel_handle"] = ir.Attribute.parse(text)
                found = True
            else:
                for region in op.regions:
                    inlined = op.name == "sdy.manual_computation"
                    found |= visit([region], channel if inlined else next(channels))
        return found

    def call(op: Any, channel: int) -> bool:
        name = op.attributes["callee"].value
        if name not in has_some:
            has_some[name] = visit(functions[name].regions, channel)
        elif has_some[name]:
            copy, other = functions[name].clone(ir.InsertionPoint(module.body)), f"{name}:{len(functions)}"
            copy.attributes["sym_name"] = ir.StringAttr.get(other)
            op.attributes["callee"] = ir.FlatSymbolRefAttr.get(other)
            functions[other], has_some[other] = copy, visit(copy.regions, channel)
        return has_some[name]

    with module.context, ir.Location.unknown():
        visit(functions["main"].regions, next(channels))
