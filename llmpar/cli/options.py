"""What several commands share: the options of a step, printing, and refusals before the work."""

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import logging
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from llmpar.files import Allowed, read_text
from llmpar.plan import checks
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.model_config import LoraConfig, ModelConfig
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.presets import ADAPTER_DIMS, preset
from llmpar.plan.schedules import SCHEDULES

MAX_SEQ_LEN, MAX_TOKENS = 2**31 - 1, 2**40
"""Positions are int32; sizes of arrays are counted in 64 bits."""
OURS = {
    ".svg": b'<svg xmlns="http://www.w3.org/2000/svg" class="llmpar"',
    ".png": b"tEXtSoftware\0llmpar",
    ".html": b'<script type="application/json" id="doc">',
}
"""By what a file that this package has drawn is known."""

File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Folder = Annotated[str | None, tyro.conf.arg(metavar="FOLDER")]
From = Annotated[str | None, tyro.conf.arg(name="from", metavar="FOLDER")]
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="STR")]
Number = Annotated[int | None, Allowed(int, 1), tyro.conf.arg(metavar="INT")]
Real = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
"""Options that may be left out: of these tyro would spell out the type."""
Seed = Annotated[int, Allowed(int, 0, 2**32 - 1)]
"""JAX makes keys of 32 bits."""
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]
Files = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")]
METAVARS: dict[Any, Any] = {str | None: OptionalText, int | None: Number, tuple[str, ...]: Files}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """The form of a command's answer.

    Attributes:
        json: print one JSON document on stdout.
    """

    json: bool = False


class NotHeld(ValueError):
    """State that what a command was to assert is not so."""

    status = 3


def speaks() -> bool:
    """Return whether this process prints and draws: of several, only the first one. Do not start JAX."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def inform(*lines: str | None) -> None:
    """Print messages on stderr, a line each, in the first process only; none that is empty."""
    if (given := list(filter(None, lines))) and speaks():
        print(*given, sep="\n", file=sys.stderr, flush=True)


def give(document: dict, as_json: bool, shown: Iterable[Any] = ()) -> dict:
    """Print a document on stdout, as JSON or as ``shown``, which are lines and tables, and return it."""
    if speaks():
        for part in [json.dumps(document)] if as_json else shown:
            print(part) if isinstance(part, str) else _print_table(part)
    return document


def _print_table(table: Any) -> None:
    """Print a table. A closed pipe raises, as in `print`; rich would end the process with status 1."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # what rich has caught

    Printer().print(table)


def save_picture(path: str | None, what: str, picture: Callable[[], Any]) -> None:
    """Save a picture, if a path is given, and print where."""
    if path and speaks():
        picture().save(path)
        inform(f"drew {what} into {path}")


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Refuse a number that is too small or too large."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; use {least} to {most:,}")


def changed(command: Any, names: Iterable[str]) -> list[str]:
    """Return the flags of the fields that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    return [
        f"--{name.replace('_', '-')}" for name in names if getattr(command, name) != defaults[name]
    ]


def flags_of(config_class: type, *without: str, **defaults: Any) -> Any:
    """Make a dataclass with the fields, defaults and help of ``kind``, but without its checks.

    The command line fills it in, and ``kind(**vars(filled))`` checks it when the command runs: a value that
    cannot be is then refused like everything else. ``without`` names the fields that a command gives by
    itself, ``defaults`` those that it begins with.
    """
    # one line for each field
    text = re.sub(r"\n {8}", " ", inspect.cleandoc(config_class.__doc__ or ""))
    text = re.sub(r"(:\w+:)?`+", "'", text)  # a terminal shows no markup
    hints, fields = get_type_hints(config_class), []
    for field in dataclasses.fields(config_class):
        name, hint = field.name, hints[field.name]
        if hint in METAVARS:
            hint = METAVARS[hint]
        # which tyro would join by commas
        elif any("," in str(choice) for choice in get_args(hint)):
            hint = Annotated[hint, tyro.conf.arg(metavar="{" + "|".join(get_args(hint)) + "}")]
        elif field.default is True:  # the flag is --no-...
            hint = Annotated[
                bool, tyro.conf.arg(help_behavior_hint="(without this flag it is done)")
            ]
            text = text.replace(f"    {name}: ", f"    {name}: do not do this: ")
        if name not in without:
            fields.append((name, hint, defaults.get(name, field.default)))
    return dataclasses.make_dataclass(
        config_class.__name__, fields, namespace={"__doc__": text}, frozen=True
    )


PlanFlags = flags_of(Plan, "mesh")


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Adapters beside frozen weights (LoRA).

    Attributes:
        lora_rank: train adapters of this rank (LoRA), and leave all other weights as they are.
        lora_alpha: the adapters' weight, times 1 / lora_rank.
        lora_targets: the matrices that have adapters, of q k v o gate up down.
    """

    lora_rank: Number = None
    lora_alpha: float = 16.0
    lora_targets: Names = ("q", "k", "v", "o")

    def adapted(self, config: ModelConfig) -> ModelConfig:
        """Return the model with the adapters that the options describe."""
        given = changed(self, ADAPTER_DIMS)
        if given and config.lora:
            raise ValueError(
                f"'{config.name}' has adapters already; leave out {' and '.join(given)}"
            )
        if self.lora_rank is not None:
            lora = LoraConfig(self.lora_rank, self.lora_alpha, self.lora_targets)
            return dataclasses.replace(config, lora=lora)
        if given:
            raise ValueError(
                f"{' and '.join(given)} shape adapters, and there are none; give --lora-rank too"
            )
        return config

    @property
    def adapter_dims(self) -> str:
        """The options that differ from their defaults, as they stand behind a model's name (`preset`)."""
        text = lambda value: ",".join(value) if isinstance(value, tuple) else f"{value:g}"
        return "".join(
            f" {name}={text(getattr(self, name))}" for name in ADAPTER_DIMS if changed(self, [name])
        )


@dataclasses.dataclass(frozen=True)
class StepOptions(Adapters):
    """What one training step is: a model, a batch and a mesh.

    Attributes:
        model: a preset's name, or the path of a Hugging Face config.json or its folder.
        batch_size: sequences per step, over all devices.
        seq_len: tokens per sequence.
        mesh: sizes of the axes, as 'dp=2 fsdp=-1 tp=2' (or 'dp:2,fsdp:-1,tp:2'); one may be -1.
        mesh_dim: the same as numbers dp,fsdp,tp,sp as in LWM, or dp,fsdp,mp as in EasyLM; replaces --mesh.
        devices: CPU devices to simulate where there is no accelerator.
    """

    model: str = "tiny"
    batch_size: int = 16
    seq_len: int = 128
    mesh: str = "dp=-1"
    mesh_dim: OptionalText = None
    devices: int = 8
    plan: Annotated[Any, tyro.conf.arg(constructor=PlanFlags)] = PlanFlags()
    given: tyro.conf.Suppress[tuple[str, ...]] = ()  # the fields whose flags were on the line

    def resolve(self) -> Resolved:
        """Return the plan for the model, on the devices that are present, or else simulated."""
        from llmpar.parallel.mesh import device_platform, use_devices

        devices = use_devices(self.devices, at_least=1)
        return self.settle(len(devices), device_platform(devices[0]))

    def settle(self, num_devices: int, devices: str | None = None) -> Resolved:
        """Return the plan for the model on so many devices (`Plan.resolve`); refuse what cannot run, before a
        compilation.

        Print what these devices do differently, and which devices and given fields have no effect."""
        config = self.adapted(preset(self.model).must_run())
        mesh = parse_mesh(self.mesh if self.mesh_dim is None else self.mesh_dim, num_devices)
        plan = Plan(mesh, **vars(self.plan) | {"schedule": read_order(self.plan.schedule)})
        batch_size = num_devices if self.batch_size is None else self.batch_size
        if self.seq_len > MAX_SEQ_LEN or batch_size * self.seq_len > MAX_TOKENS:
            raise ValueError(
                f"a batch of {batch_size:,} sequences of {self.seq_len:,} tokens: use at most"
                f" {MAX_SEQ_LEN:,} positions and {MAX_TOKENS:,} tokens"
            )
        resolved = plan.resolve(config, devices, batch_size, self.seq_len)
        idle = f"mesh '{plan.mesh}' takes {plan.mesh.size} of {num_devices} devices; the others do nothing"
        few = plan.mesh.size < num_devices
        inform(idle if few else None, *notes_of(resolved, self.given))
        return resolved


def notes_of(plan: Resolved, given: Iterable[str]) -> list[str]:
    """Return a plan's notes, and one for each field that the user gave explicitly (``given``), that has its
    default and no effect. (`Resolved.notes` has only those that differ from their default.)"""
    own = {k: why for k, why in checks.unused(plan, given).items() if k not in plan.unused}
    return [*plan.notes, *checks.unused_notes(plan.requested, own)]


def read_order(schedule: str) -> str:
    """Return a schedule's name or text; of a file's name, the file's text."""
    if schedule in SCHEDULES or not os.path.isfile(schedule):
        return schedule
    return read_text(schedule, "order of a pipeline")


def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(package) is not None
    return False


def check_picture(path: str | None) -> None:
    """Refuse a path that no drawing can be saved to, before the work that it would show."""
    if path is None:
        return
    suffix = pathlib.Path(path).suffix
    if suffix not in (".svg", ".png"):
        raise ValueError(f"a drawing is saved as .svg or .png, and '{path}' is neither; rename it")
    if suffix == ".png" and not installed("matplotlib"):
        svg = pathlib.Path(path).with_suffix(".svg")
        raise ValueError(
            f"'{path}' would be drawn by matplotlib, which is not installed; use '{svg}', or pip"
            " install 'llmpar[lab]'"
        )
    check_free(path, OURS[suffix])


def check_free(path: str, mark: bytes) -> None:
    """Refuse a path that cannot be written, and a file without ``mark``: another program's."""
    file = pathlib.Path(path).absolute()
    existing = file if file.exists() else file.parent
    if not file.parent.is_dir() or file.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(
            f"'{path}' cannot be written; give a file in a folder that exists and is writable"
        )
    if file.is_file() and file.stat().st_size:
        with file.open("rb") as opened:
            if mark not in opened.read(1 << 20):
                raise ValueError(
                    f"'{path}' exists already, and this command has not written it; give another name,"
                    " or move it away"
                )


@contextlib.contextmanager
def still_at_work(doing: str, usual: str, every_s: float = 5) -> Iterator[None]:
    """Print from time to time what a command is still doing, and how long it usually takes."""
    done, begin = threading.Event(), time.perf_counter()

    def watch():
        while not done.wait(every_s):
            inform(f"… still {doing} after {time.perf_counter() - begin:.0f} s; {usual}")

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def fits_host(
    plan: Resolved, batch_size: int, seq_len: int, parts: tuple[str, ...], cache: int = 0
) -> None:
    """Refuse a model whose simulated devices need more than this machine's memory; ``cache``: further bytes
    of each device."""
    import jax

    from llmpar.predict import memory
    from llmpar.training.text_files import host_bytes

    if jax.devices()[0].platform != "cpu" or not (available := host_bytes()):
        return
    sizes = memory.argument_bytes(plan, batch_size, seq_len) | {"cache": cache}
    num_devices = min(plan.mesh.size, len(jax.local_devices()))
    parts += ("cache",) if cache else ()
    need = num_devices * sum(sizes[part] for part in parts)
    if need > available:
        raise ValueError(
            f"{' and '.join(parts)} of '{plan.config.name}' take {need / 2**30:,.1f} GiB on"
            f" {num_devices} simulated devices, and this machine has {available / 2**30:,.1f} GiB;"
            " use a smaller model, or cut it more"
        )


def start_jax() -> None:
    """Set JAX up: float32, and compiled programs kept between runs.

    They are kept in the user's cache folder, unless JAX has another folder already; if it cannot be written,
    that is printed once. Orbax's threads log a file that cannot be read or written; their lines are
    suppressed, because an exception follows.
    """
    import jax

    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "JAX_DISABLE_JIT is on: each operation would be compiled and run by itself, and a step"
            " takes minutes; unset it"
        )
    if not os.environ.get("LLMPAR_TRACEBACK"):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = lambda _: None

    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        inform("JAX_ENABLE_X64 is ignored: weights are float32, tokens int32")
        jax.config.update("jax_enable_x64", False)
    folder = jax.config.jax_compilation_cache_dir or ""  # type: ignore[attr-defined]
    kept = folder or os.path.expanduser(os.path.join("~", ".cache", "llmpar", "jax"))
    if "://" in kept or kept.startswith("~"):  # no folder of this machine; no home
        return
    try:
        os.makedirs(kept, exist_ok=True)
        tempfile.TemporaryFile(dir=kept).close()
        jax.config.update("jax_compilation_cache_dir", kept)
    except OSError as error:  # where JAX would warn for each program
        inform(f"compiled programs are not kept: '{kept}' cannot be written ({error.strerror})")
        jax.config.update("jax_compilation_cache_dir", None)
