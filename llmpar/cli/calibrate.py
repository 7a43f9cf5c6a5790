"""``llmpar calibrate``: what this machine's devices and links reach, as a file for ``llmpar plan --chip``."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from dataclasses import dataclass
from typing import Annotated

import tyro

from llmpar.cli.options import emit, say, speaks, start


@dataclass(frozen=True)
class Calibrate:
    """Time products by shape, memory, attention, and each collective by size on the devices at hand, and fit
    the constants with which plans are priced. Simulated devices are timed as what they are: shares of this
    machine's processor.

    llmpar calibrate --out ours.toml
    llmpar plan --chip ours.toml --devices 8

    Attributes:
        out: the TOML file to write; its name without the suffix is the chip's.
        chip: the row that the devices are of, where JAX's name of them does not say.
        devices: CPU devices to simulate where there is no accelerator.
        quick: time small sizes only, in seconds: a rehearsal.
        json: print one JSON document on stdout.
    """

    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "calibrated.toml"
    chip: Annotated[str | None, tyro.conf.arg(metavar="STR")] = None
    devices: int = 8
    quick: bool = False
    json: bool = False

    def run(self) -> dict:
        """Time, fit, write and print."""
        path = pathlib.Path(self.out)
        if path.suffix != ".toml" or not re.fullmatch(r"[\w.-]+", path.stem):
            raise ValueError(f"'{self.out}' is no name of a chip file; use letters and .toml, as ours.toml")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"'{self.out}' cannot be written; give a file in a folder that is there")
        import datetime

        from llmpar.mesh import use_devices
        from llmpar.predict import hardware

        chip = None if self.chip is None else hardware.chip(self.chip)
        if chip and path.stem.lower() in hardware.NAMES:
            raise ValueError(f"'{path.stem}' is a chip's name already; call the file otherwise")
        start()
        devices = use_devices(self.devices, at_least=1)
        from llmpar.inspect import calibrate

        if (devices[0].platform == "cpu") != (chip is None or chip.family == "cpu") and chip:
            raise ValueError(
                f"the devices here are {devices[0].device_kind}, not {chip.name}; leave --chip out"
            )
        say(f"timing {len(devices)} x {devices[0].device_kind} …")
        sizes = calibrate.SIZES["quick"] if self.quick else None
        found = calibrate.calibrate(devices, path.stem, sizes, chip)
        if speaks():
            path.write_text(calibrate.as_toml(found, datetime.date.today().isoformat()), encoding="utf-8")
        document = {
            "file": str(path),
            "device_kind": found.device_kind,
            "devices": found.num_devices,
            "dtype": found.dtype,
            "base": found.chip.base,
            "fields": found.fields,
            "reached": found.reached,
            "usual": calibrate.unmeasured(found),
            "measured": [dataclasses.asdict(row) for row in found.rows],
        }
        if not self.json and speaks():
            import rich

            for table in tables(document):
                rich.print(table)
            say(f"wrote {path}; llmpar plan --chip {path} takes it in place of the data sheet")
        emit(document, self.json)
        return document


def tables(document: dict) -> list:
    """Each measurement beside the fitted law, and the constants."""
    from rich.table import Table

    rows = Table("what", "size", "ms", "by the law", "off", title=document["device_kind"])
    for row in document["measured"]:
        took, law = row["seconds"], row["law_s"]
        rows.add_row(
            row["what"], row["size"], f"{took * 1e3:.4g}", f"{law * 1e3:.4g}", f"{law / took - 1:+.0%}"
        )
    constants = Table("constant", "value")
    for name, value in (document["fields"] | document["reached"]).items():
        constants.add_row(name, f"{value:.4g}")
    constants.add_row("as usual", ", ".join(document["usual"]))
    return [rows, constants]
