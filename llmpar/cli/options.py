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
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from llmpar.files import read_text
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.model_config import LoraConfig, ModelConfig, preset
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.schedules import SCHEDULES

MAX_SEED, MAX_SEQ_LEN, MAX_TOKENS = 2**32 - 1, 2**31 - 1, 2**40
"""JAX makes keys of 32 bits; positions are int32; sizes of arrays are counted in 64 bits."""
OURS = {
    ".svg": b'<svg xmlns="http://www.w3.org/2000/svg" class="llmpar"',
    ".png": b"tEXtSoftware\0llmpar",
    ".html": b'<script type="application/json" id="doc">',
}
"""By what a file that this package has drawn is known."""
PICTURES = (".svg", ".png")

File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Folder = Annotated[str | None, tyro.conf.arg(metavar="FOLDER")]
From = Annotated[str | None, tyro.conf.arg(name="from", metavar="FOLDER")]
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME")]
Text = Annotated[str | None, tyro.conf.arg(metavar="STR")]
Number = Annotated[int | None, tyro.conf.arg(metavar="INT")]
Real = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
"""Options that may be left out: of these tyro would spell out the type."""
Names = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]
Files = Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")]
METAVARS: dict[Any, Any] = {str | None: Text, int | None: Number, tuple[str, ...]: Files}


def speaks() -> bool:
    """Tell whether this process prints and draws: of several that train together only the first does.

    It does not start JAX.
    """
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def say(*words) -> None:
    """Print for people, on stderr, in the process that speaks."""
    if speaks():
        print(*words, file=sys.stderr, flush=True)


def give(document: dict, as_json: bool, shown: Iterable[Any] = ()) -> dict:
    """Print a document on stdout, as JSON if that was asked for, else as people read it: ``shown``, lines and
    tables. Give it back."""
    if speaks() and as_json:
        print(json.dumps(document))
    elif speaks():
        for part in shown:
            print(part) if isinstance(part, str) else _print_table(part)
    return document


def _print_table(table: Any) -> None:
    """Print a table. A closed pipe is told as `print` tells it: rich would end the process with the status of
    a refusal."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            raise  # what rich has caught

    Printer().print(table)


def save_picture(path: str | None, what: str, picture: Callable[[], Any]) -> None:
    """Draw into a file, if one was named, and say so."""
    if path and speaks():
        picture().save(path)
        say(f"drew {what} into {path}")


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse a number that is too small or too large."""
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; use {least} to {most:,}")


def changed(command: Any, names: Iterable[str]) -> list[str]:
    """The flags of those fields of a command that have not their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    return [f"--{name.replace('_', '-')}" for name in names if getattr(command, name) != defaults[name]]


def flags_of(kind: type, *without: str, **defaults: Any) -> Any:
    """Make a dataclass with the fields, defaults and help of ``kind``, but without its checks.

    The command line fills it in, and ``kind(**vars(filled))`` checks it when the command runs: a value that
    cannot be is then refused like everything else. ``without`` names the fields that a command gives by
    itself, ``defaults`` those that it begins with.
    """
    text = re.sub(r"\n {8}", " ", inspect.cleandoc(kind.__doc__ or ""))  # one line for each field
    text = re.sub(r"(:\w+:)?`+", "'", text)  # a terminal shows no markup
    hints, fields = get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        if hint in METAVARS:
            hint = METAVARS[hint]
        elif any("," in str(choice) for choice in get_args(hint)):  # which tyro would join by commas
            hint = Annotated[hint, tyro.conf.arg(metavar="{" + "|".join(get_args(hint)) + "}")]
        elif field.default is True:  # the flag is --no-...
            hint = Annotated[bool, tyro.conf.arg(help_behavior_hint="(without this flag it is done)")]
            text = text.replace(f"    {name}: ", f"    {name}: do not do this: ")
        if name not in without:
            fields.append((name, hint, defaults.get(name, field.default)))
    return dataclasses.make_dataclass(kind.__name__, fields, namespace={"__doc__": text}, frozen=True)


PlanFlags = flags_of(Plan, "mesh")


@dataclass(frozen=True)
class StepOptions:
    """What one training step is: a model, a batch and a mesh.

    Attributes:
        model: a preset's name, or the path of a Hugging Face config.json or its folder.
        batch_size: sequences per step, over all devices.
        seq_len: tokens per sequence.
        mesh: sizes of the axes, as 'dp=2 fsdp=-1 tp=2' (or 'dp:2,fsdp:-1,tp:2'); one may be -1.
        mesh_dim: the same as numbers dp,fsdp,tp,sp as in LWM, or dp,fsdp,mp as in EasyLM; replaces --mesh.
        devices: CPU devices to simulate where there is no accelerator.
        lora_rank: train adapters of this rank (LoRA), and leave all other weights as they are.
        lora_alpha: the adapters' weight, times 1 / lora_rank.
        lora_targets: the matrices that have adapters, of q k v o gate up down.
    """

    model: str = "tiny"
    batch_size: int = 16
    seq_len: int = 128
    mesh: str = "dp=-1"
    mesh_dim: Text = None
    devices: int = 8
    lora_rank: Number = None
    lora_alpha: float = 16.0
    lora_targets: Names = ("q", "k", "v", "o")
    plan: Annotated[Any, tyro.conf.arg(constructor=PlanFlags)] = PlanFlags()
    given: tyro.conf.Suppress[tuple[str, ...]] = ()  # the fields whose flags were on the line

    def resolve(self) -> Resolved:
        """Give the plan for the model, on the devices that are there or are simulated from here on."""
        from llmpar.parallel.mesh import device_platform, use_devices

        devices = use_devices(self.devices, at_least=1)
        return self.settle(len(devices), device_platform(devices[0]))

    def adapted(self, config: ModelConfig) -> ModelConfig:
        """The model with the adapters that were asked for."""
        if self.lora_rank is not None:
            lora = LoraConfig(self.lora_rank, self.lora_alpha, self.lora_targets)
            return dataclasses.replace(config, lora=lora)
        if given := changed(self, ("lora_alpha", "lora_targets")):
            raise ValueError(
                f"{' and '.join(given)} shape adapters, and there are none; give --lora-rank too"
            )
        return config

    def settle(self, num_devices: int, devices: str | None = None) -> Resolved:
        """Give the plan for the model on so many devices (`Plan.resolve`). Refuses what cannot run, before
        anything is compiled."""
        config = self.adapted(preset(self.model))
        mesh = parse_mesh(self.mesh if self.mesh_dim is None else self.mesh_dim, num_devices)
        plan = Plan(mesh, **vars(self.plan) | {"schedule": read_order(self.plan.schedule)})
        batch_size = num_devices if self.batch_size is None else self.batch_size
        if self.seq_len > MAX_SEQ_LEN or batch_size * self.seq_len > MAX_TOKENS:
            batch = f"a batch of {batch_size:,} sequences of {self.seq_len:,} tokens"
            raise ValueError(f"{batch}: use at most {MAX_SEQ_LEN:,} positions and {MAX_TOKENS:,} tokens")
        resolved = plan.resolve(config, devices, batch_size, self.seq_len)
        self.say_notes(resolved, num_devices)
        return resolved

    def say_notes(self, plan: Resolved, num_devices: int) -> None:
        """Say what these devices do otherwise, and what was given and decides nothing: devices, and fields,
        be it their defaults."""
        if plan.mesh.size < num_devices:
            say(f"mesh '{plan.mesh}' takes {plan.mesh.size} of {num_devices} devices; the others do nothing")
        for line in (*plan.notes, *plan.unused_of(self.given)):
            say(line)


def read_order(schedule: str) -> str:
    """A schedule's name, or an order written out: as it is, or what the file of that name holds."""
    if schedule in SCHEDULES or not os.path.isfile(schedule):
        return schedule
    return read_text(schedule, "order of a pipeline")


def installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(package) is not None
    return False


def check_picture(path: str | None) -> None:
    """Refuse a path that no drawing can be saved to, before the work that it would show."""
    if path is None:
        return
    suffix = pathlib.Path(path).suffix
    if suffix not in PICTURES:
        raise ValueError(f"a drawing is saved as .svg or .png, and '{path}' is neither; rename it")
    if suffix == ".png" and not installed("matplotlib"):
        svg = pathlib.Path(path).with_suffix(".svg")
        lacks = f"'{path}' would be drawn by matplotlib, which is not installed"
        raise ValueError(f"{lacks}; use '{svg}', or pip install 'llmpar[lab]'")
    check_free(path, OURS[suffix])


def check_free(path: str, mark: bytes) -> None:
    """Refuse a path that no file can be written to, and one of a file that is not known by ``mark`` as one
    that was written for the same purpose, before the work that it would hold."""
    check_folder(path)
    if not os.path.isfile(path) or not os.path.getsize(path):
        return
    with open(path, "rb") as file:
        if mark not in file.read(1 << 20):
            why = "is there already, and this command has not written it"
            raise ValueError(f"'{path}' {why}; give another name, or move it away")


def check_folder(path: str) -> None:
    """Refuse a path that no file can be written to."""
    file = pathlib.Path(path).absolute()
    there = file if file.exists() else file.parent
    if not file.parent.is_dir() or file.is_dir() or not os.access(there, os.W_OK):
        give = "give a file in a folder that is there and can be written"
        raise ValueError(f"'{path}' cannot be written; {give}")


@contextlib.contextmanager
def still_at_work(doing: str, usual: str, every_s: float = 5) -> Iterator[None]:
    """Say from time to time what a command is still doing, and what is usual."""
    done, begin = threading.Event(), time.perf_counter()

    def watch():
        while not done.wait(every_s):
            say(f"… still {doing} after {time.perf_counter() - begin:.0f} s; {usual}")

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def fits_host(plan: Resolved, batch_size: int, seq_len: int, parts: tuple[str, ...], cache: int = 0) -> None:
    """Refuse a model whose simulated devices together hold more than this machine's memory; ``cache``: bytes
    that each of them holds besides."""
    import jax

    from llmpar.predict import memory
    from llmpar.training.data import host_bytes

    if jax.devices()[0].platform != "cpu" or not (room := host_bytes()):
        return
    held = memory.argument_bytes(plan, batch_size, seq_len)
    here = min(plan.mesh.size, len(jax.local_devices()))
    need = here * (sum(held[part] for part in parts) + cache)
    if need > room:
        parts += ("cache",) * (cache > 0)
        what = f"{' and '.join(parts)} of '{plan.config.name}' take {need / 2**30:,.1f} GiB"
        has = f"this machine has {room / 2**30:,.1f} GiB; use a smaller model, or cut it more"
        raise ValueError(f"{what} on {here} simulated devices, and {has}")


def join() -> None:
    """Join the processes that an engine has started, if it has; before any other use of JAX."""
    from llmpar.launch import joined

    joined.initialize()


def start() -> None:
    """Set JAX up: float32, and compiled programs kept between runs.

    They are kept in the user's cache folder, unless JAX has another folder already. Orbax's threads log a
    file that cannot be read or written; their lines are suppressed, because an exception follows.
    """
    import jax

    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        why = "each operation would be compiled and run by itself, and a step takes minutes"
        raise ValueError(f"JAX_DISABLE_JIT is on: {why}; unset it")
    if not os.environ.get("LLMPAR_TRACEBACK"):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = lambda _: None

    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        say("JAX_ENABLE_X64 is ignored: weights are float32, tokens int32")
        jax.config.update("jax_enable_x64", False)
    with contextlib.suppress(RuntimeError):  # nobody's home
        keep_programs(jax.config.jax_compilation_cache_dir or "")  # type: ignore[attr-defined]


def keep_programs(folder: str) -> None:
    """Let JAX keep compiled programs in a folder, by default in the user's cache; say it where none can be
    written, of which JAX would warn at each program."""
    import jax

    kept = pathlib.Path(folder or pathlib.Path.home() / ".cache" / "llmpar" / "jax")
    if "://" in folder:  # no folder of this machine
        return
    try:
        kept.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=kept).close()
        jax.config.update("jax_compilation_cache_dir", str(kept))
    except OSError as error:
        say(f"compiled programs are not kept: '{kept}' cannot be written ({error.strerror})")
        jax.config.update("jax_compilation_cache_dir", None)
