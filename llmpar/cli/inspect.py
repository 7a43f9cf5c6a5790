"""``llmpar inspect``: predicted beside compiled, for one training step; or what any program sends.
``llmpar check``: is a parallel program still the same program?"""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.options import (
    File,
    OptionalText,
    Output,
    StepOptions,
    changed,
    check_picture,
    give,
    inform,
    save_picture,
    start_jax,
)
from llmpar.files import read_text


@dataclass(frozen=True)
class Inspect(Output):
    """Compile one training step and show predicted beside compiled: bytes and collectives per axis, memory,
    FLOPs.

    llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --zero 3
    llmpar inspect --program my_module:my_function

    Attributes:
        program: look at a program of yours instead, MODULE:FUNCTION: the function is called, with the devices
            if it takes an argument, and gives what llmpar.look takes: (f, *arguments), or a jax.stages one.
        hlo: look at the text of an HLO module, of the mesh that --mesh names, with axes of any names.
        target: devices for --program that are not here, as llmpar compile takes them.
        dims: letters for the dims of arguments of --program or --hlo, by JAX's names of these:
            "x = b s d; params['up'] = d m".
        pin: keep in this file what --program or --hlo sends, or compare with it: status 1 if it differs.
        cure: find the line that fixes a layout with which --program sends least; up to 50 programs are
            compiled for it.
        trace: a folder that jax.profiler.trace wrote: its times stand beside the lines of --program or --hlo.
        html: also write what --program or --hlo sends into this page, each move drawn.
        svg: also draw the bytes into this SVG (or PNG).
        types: also trace the step under --mode explicit, and show the plan's layouts beside JAX's types.
        tolerance: also show how far loss and gradients may be from those on another mesh, and which sums are
            why.
        local_steps: as of train: the ranks of dp are workers, joined once in so many steps (0: no workers).
    """

    program: OptionalText = None
    hlo: File = None
    target: OptionalText = None
    dims: OptionalText = None
    pin: File = None
    cure: bool = False
    trace: File = None
    html: File = None
    svg: File = None
    types: bool = False
    tolerance: bool = False
    local_steps: int = 0
    step: StepOptions = StepOptions()

    def run(self) -> dict:
        """Compile the step and print tables, or JSON."""
        check_picture(self.svg)
        if changed(self, "program hlo target dims pin cure trace html".split()):
            return self.look()
        from llmpar.inspect import report
        from llmpar.inspect.types import types

        start_jax()
        plan = self.step.resolve()
        config = plan.config
        sizes = (self.step.batch_size, self.step.seq_len)
        rows = types(config, plan.requested, *sizes) if self.types else []
        inform(f"compiling a step of {config.name} on {plan.mesh} …")
        document = (
            report.inspect_apart(plan, *sizes, self.local_steps)
            if self.local_steps
            else report.inspect(plan, *sizes)
        )
        document |= {"types": rows} if self.types else {}
        document |= {"tolerance": report.spread(plan, *sizes)} if self.tolerance else {}
        save_picture(self.svg, "the bytes", lambda: report.step_picture(document))
        return give(document, self.json, report.step_tables(document))

    def look(self) -> dict:
        """Look at a program that is not a plan's."""
        ignored = {"plan", "given", "devices"} | ({"mesh"} if self.hlo else set())
        ours = [
            *changed(self, ("types", "tolerance", "local_steps")),
            *changed(self.step.plan, vars(self.step.plan)),
            *changed(self.step, vars(self.step).keys() - ignored),
        ]
        if ours or bool(self.program) == bool(self.hlo) or self.hlo and self.target:
            rest = f"leave out {' '.join(ours)}" if ours else "give one of the two"
            raise ValueError(
                "--program MODULE:FUNCTION goes with --target or --devices, and --cure, --hlo FILE with"
                f" --mesh, both with --dims, --pin, --trace, --html, --svg and --json; {rest}"
            )
        with refusing(self.program or self.hlo):
            program = self.made()
            from llmpar.inspect.look import look

            given = program if isinstance(program, tuple) else (program,)
            named = (one.rpartition("=") for one in (self.dims or "").split(";") if one.strip())
            shown = look(
                *given,
                dims={name.strip(): letters for name, _, letters in named},
                trace=self.trace,
                cure=self.cure,
            )
        if self.pin:
            try:
                shown.pin(self.pin)
            except AssertionError as error:
                raise ValueError(str(error)) from None
        if self.html:
            shown.html(self.html)
        save_picture(self.svg, "the bytes", shown.picture)
        return give(shown.document(), self.json, [str(shown)])

    def made(self) -> Any:
        """Return the HLO text with its mesh, or what the function of --program makes."""
        if self.hlo:
            return read_text(self.hlo, "HLO module"), self.step.mesh
        from llmpar.planner.targets import COMPILER_ENVIRONMENT, parse_target

        target = parse_target(self.target) if self.target else None
        os.environ.update(COMPILER_ENVIRONMENT if target else {})  # before JAX starts
        from llmpar.parallel.mesh import use_devices

        devices = target.devices if target else use_devices(self.step.devices, at_least=1)
        start_jax()
        return imported(str(self.program), devices, bool(target))


@dataclass(frozen=True)
class CheckCommand(Output):
    """Compare a parallel program with one device: results, gradients, and the line where values part first.

    llmpar check my_module:my_program my_module:my_reference

    Exit status 1 where they differ.

    Attributes:
        program: MODULE:FUNCTION, which is called, with the devices if it takes an argument, and gives
            (f, *arguments), as llmpar.check takes them; take small shapes.
        reference: MODULE:FUNCTION, the same as f for one device; left out, f itself on a mesh of ones.
        layouts: also show how each value is cut, line by line.
        devices: CPU devices to simulate where there is no accelerator.
    """

    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")]
    reference: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODULE:FUNCTION]")] = ""
    layouts: bool = False
    devices: int = 8

    def run(self) -> dict:
        """Check, print the report or JSON, and refuse a program that differs."""
        from llmpar.parallel.mesh import use_devices

        devices = use_devices(self.devices, at_least=1)
        start_jax()
        with refusing(self.program):
            from llmpar.inspect.check import check

            f, *args = imported(self.program, devices)
            checked = check(f, imported(self.reference) if self.reference else None, *args)
        document = checked.document() | ({"layouts": checked.layouts()} if self.layouts else {})
        give(document, self.json, [str(checked), *([checked.table()] if self.layouts else [])])
        if not checked:
            why = [row["sentence"] for row in checked.findings] or checked.notes
            raise ValueError(
                f"{self.program} differs from one device: {'; '.join(why) or 'see the report'}"
            )
        return document


@contextlib.contextmanager
def refusing(name: str | None) -> Iterator[None]:
    """Turn an error of a user's program into a refusal that names it."""
    try:
        yield
    except Exception as error:
        notes = [note[8:] for note in getattr(error, "__notes__", ()) if note[:8] == "llmpar: "]
        line = str(error).partition("\n")[0]
        if not isinstance(error, ValueError):
            line = f"{type(error).__name__}: {line}"
            notes.append("LLMPAR_TRACEBACK=1 shows the stack")
        raise ValueError("; ".join([f"{name}: {line}", *notes])) from error


def imported(program: str, devices: list | None = None, takes: bool = False) -> Any:
    """Import MODULE:FUNCTION. With ``devices`` call it, with them if it takes an argument."""
    module, _, name = program.partition(":")
    sys.path.insert(0, os.getcwd())
    make = getattr(importlib.import_module(module), name)
    if devices is None:
        return make
    return make(devices) if takes or inspect.signature(make).parameters else make()
