"""``llmpar inspect``: predicted beside compiled, for one training step; or what any program sends."""

import importlib
import inspect
import os
import sys
from dataclasses import dataclass
from typing import Any

from llmpar.cli import options
from llmpar.cli.options import File, StepOptions, Text, changed, check_picture, give, save_picture, start
from llmpar.files import read_text


@dataclass(frozen=True)
class Inspect:
    """Compile one training step and show predicted beside compiled: bytes and collectives per axis, memory,
    FLOPs.

    llmpar inspect --mesh "dp=2 fsdp=2 tp=2" --zero 3
    llmpar inspect --program my_module:my_function

    Attributes:
        program: look at a program of yours instead, MODULE:FUNCTION: the function is called, with the devices
            if it takes an argument, and gives what llmpar.look takes: (f, *arguments), or a jax.stages one.
        hlo: look at the text of an HLO module, of the mesh that --mesh names, with axes of any names.
        target: devices for --program that are not here, as llmpar compile takes them.
        svg: also draw the bytes into this SVG (or PNG).
        types: also trace the step under --mode explicit, and show the plan's layouts beside JAX's types.
        tolerance: also show how far loss and gradients may be from those on another mesh, and which sums are
            why.
        json: print one JSON document on stdout.
    """

    program: Text = None
    hlo: File = None
    target: Text = None
    svg: File = None
    types: bool = False
    tolerance: bool = False
    json: bool = False
    step: StepOptions = StepOptions()

    def run(self) -> dict:
        """Inspect, and print tables unless JSON was asked for."""
        check_picture(self.svg)
        if self.program or self.hlo or self.target:
            return self.look()
        import jax

        from llmpar.inspect import report
        from llmpar.inspect.spread import spread
        from llmpar.inspect.types import types

        start()
        config, plan = self.step.resolve()
        asked = config, plan, self.step.batch_size, self.step.seq_len
        rows = types(*asked) if self.types else []
        options.say(f"compiling a step of {config.name} on {plan.mesh} …")
        document = report.inspect(*asked)
        document |= {"types": rows} if self.types else {}
        document |= {"tolerance": spread(*asked, jax.default_backend())} if self.tolerance else {}
        save_picture(self.svg, "the bytes", lambda: report.picture(document))
        return give(document, self.json, report.tables(document))

    def look(self) -> dict:
        """Look at a program that is not a plan's."""
        ours = changed(self, ("types", "tolerance")) + changed(self.step.plan, vars(self.step.plan))
        ours += changed(
            self.step, vars(self.step).keys() - {"plan", "given", "devices", "mesh" * bool(self.hlo)}
        )
        if ours or bool(self.program) == bool(self.hlo) or self.hlo and self.target:
            only = "--program MODULE:FUNCTION goes with --target or --devices, --hlo FILE with --mesh"
            rest = f"leave out {' '.join(ours)}" if ours else "give one of the two"
            raise ValueError(f"{only}, both with --svg and --json; {rest}")
        try:
            found = self.made() if self.program else (read_text(str(self.hlo), "HLO module"), self.step.mesh)
            from llmpar.inspect.look import look

            shown = look(*found) if isinstance(found, tuple) else look(found)
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            words = f"{self.program or self.hlo}: {kind}{str(error).partition(chr(10))[0]}"
            words += "".join(
                f"; {note[8:]}" for note in getattr(error, "__notes__", ()) if note[:8] == "llmpar: "
            )
            raise ValueError(words + "; LLMPAR_TRACEBACK=1 shows the stack" * bool(kind)) from error
        save_picture(self.svg, "the bytes", shown.picture)
        return give(shown.document(), self.json, [str(shown)])

    def made(self) -> Any:
        """What the function makes that --program names, with the folder of the command on the path."""
        from llmpar.planner.targets import COMPILER_ENVIRONMENT, parse_target

        target = parse_target(self.target) if self.target else None
        os.environ.update(COMPILER_ENVIRONMENT if target else {})  # before JAX starts
        from llmpar.parallel.mesh import use_devices

        devices = target.devices if target else use_devices(self.step.devices, at_least=1)
        start()
        module, _, name = str(self.program).partition(":")
        sys.path.insert(0, os.getcwd())
        make = getattr(importlib.import_module(module), name)
        return make(devices) if target or inspect.signature(make).parameters else make()
