"""``llmpar check``: is a parallel program still the same program?"""

from dataclasses import dataclass
from typing import Annotated

import tyro

from llmpar.cli.inspect import imported, refusing
from llmpar.cli.options import Output, give, start_jax


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
