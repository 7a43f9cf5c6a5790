"""The commands beside `commands`: what is here, what is known, what a model says. Each is a dataclass, its
fields are its flags, and `run` does it; those that need JAX import it themselves."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llmpar.cli.commands import MAX_SEED, Inspect, Train, check_picture, emit, fits_host, say, speaks, start
from llmpar.config import PRESETS, describe, from_dict, preset


@dataclass(frozen=True)
class Demo:
    """The main job: train on 8 devices under three kinds of parallelism, read the compiled program, draw,
    check.

    Attributes:
        out: folder for pictures and the log.
        steps: to train, on the mesh and again on one device.
        json: print one JSON document on stdout.
    """

    out: str = "demo"
    steps: int = 60
    json: bool = False

    def run(self) -> None:
        """Run it."""
        from llmpar.cli.demo import demonstrate

        emit(demonstrate(self.out, self.steps), self.json)


@dataclass(frozen=True)
class Models:
    """List the presets, or describe one model, with exact numbers of parameters.

    Attributes:
        name: a preset's name or the path of a config.json; all presets where it is left out.
        json: print one JSON document on stdout.
    """

    name: Annotated[str | None, tyro.conf.Positional] = None
    json: bool = False

    def run(self) -> None:
        """Print the models."""
        models = [describe(c) for c in (PRESETS.values() if self.name is None else [preset(self.name)])]
        emit({"models": models}, self.json)
        for m in [] if self.json else models:
            active = f", {m['active_params']:,} active" if m["active_params"] < m["params"] else ""
            print(
                f"{m['name']:<16}{m['params']:>18,} parameters{m['num_layers']:>5} layers{m['width']:>7}"
                f" wide{active}"
            )


@dataclass(frozen=True)
class Generate:
    """Continue a text with a model whose cache of keys and values is cut over a mesh.

    llmpar generate "def " --checkpoints kept --mesh "sp=4 tp=2"

    Attributes:
        prompt: the text to continue.
        checkpoints: folder that `llmpar train --checkpoints` wrote; random weights where it is left out.
        model: a preset's name or the path of a config.json; left out, the checkpoint's, or tiny.
        mesh: sizes of the axes; sp cuts the cache's positions, tp its heads.
        devices: CPU devices to simulate where there is no accelerator.
        tokens: how many to add.
        temperature: 0 takes the likeliest token, more draws from a flatter distribution.
        seed: of drawing.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json; left out, the checkpoint's, or
            bytes.
        dtype: of weights and cache.
        json: print one JSON document on stdout.
    """

    prompt: Annotated[str, tyro.conf.Positional] = "def "
    checkpoints: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    mesh: str = "sp=-1"
    devices: int = 8
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    json: bool = False

    def run(self) -> None:
        """Restore the weights, take the prompt in, add tokens, and print."""
        if self.tokens < 1 or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(
                f"{self.tokens} tokens with seed {self.seed}: use 1 or more, and a seed from 0 to {MAX_SEED}"
            )
        if any("\ud800" <= x <= "\udfff" for x in self.prompt):
            raise ValueError("the prompt is no text: it holds bytes that are not UTF-8; give it in UTF-8")
        import jax

        from llmpar import data
        from llmpar.checkpoint import Checkpoints
        from llmpar.mesh import make_mesh, use_devices
        from llmpar.notation import parse_mesh
        from llmpar.plan import Plan
        from llmpar.serve.decode import Decoder, check_temperature, generate
        from llmpar.weights import abstract_params, init_params

        start()
        check_temperature(self.temperature)
        devices = use_devices(self.devices)
        keep = Checkpoints(self.checkpoints) if self.checkpoints is not None else None
        about = keep.about() if keep else {}
        config = from_dict(about["config"]) if keep and self.model is None else preset(self.model or "tiny")
        tokenizer = data.tokenizer_of(about.get("made"), self.tokenizer)
        data.check_vocab(tokenizer, config.vocab_size)
        plan = Plan(parse_mesh(self.mesh, len(devices)), zero=0, dtype=self.dtype)
        if rows := plan.live("dp", "fsdp", "ep"):
            raise ValueError(
                f"mesh '{plan.mesh}' cuts rows by {', '.join(rows)}, but a prompt is one row; use sp and tp"
            )
        mesh, prompt = make_mesh(plan.mesh), [[tokenizer.start_id, *tokenizer.encode(self.prompt)]]
        length = len(prompt[0]) + self.tokens
        Decoder.check(config, plan, 1, length)
        fits_host(config, plan, 1, plan.mesh.sp, ("params",))
        abstract = abstract_params(config, plan, mesh)
        if keep:
            params = keep.params(abstract, config)
        else:
            say("no --checkpoints: the weights are random, and so will be the text")
            cut = jax.tree.map(lambda x: x.sharding, abstract)
            params = jax.jit(lambda: init_params(config, self.seed), out_shardings=cut)()
        say("compiling …")
        decoder = Decoder(config, plan, mesh, params, 1, length)
        tokens = [int(row[0]) for row in generate(decoder, prompt, self.tokens, self.temperature, self.seed)]
        text = tokenizer.decode(tokens)
        emit({"prompt": self.prompt, "text": text, "tokens": tokens, "mesh": plan.mesh.sizes}, self.json)
        if not self.json and speaks():
            print(self.prompt + text)


@dataclass(frozen=True)
class Schedule:
    """Print a pipeline schedule: its timetable, bubble by every definition, makespan, live activations per
    stage.

    Attributes:
        name: gpipe, 1f1b, interleaved, zb-h1, …; a wrong name lists all.
        stages: pipeline stages p.
        microbatches: m.
        virtual_stages: model chunks per stage, for schedules that have several.
        costs: times of forward, input-gradient and weight-gradient work: F,B,W.
        hop: latency of a send between stages, in the same unit.
        svg: also draw the timetable into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    name: Annotated[str, tyro.conf.Positional] = "1f1b"
    stages: int = 4
    microbatches: int = 8
    virtual_stages: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    costs: str = "1,1,1"
    hop: float = 0.0
    svg: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    json: bool = False

    def run(self) -> None:
        """Simulate and print."""
        from llmpar import draw, schedules, timetable

        try:
            f, b, w = (float(x) for x in self.costs.split(","))
        except ValueError as error:
            raise ValueError(f"--costs '{self.costs}' is not three numbers F,B,W such as 1,1,1") from error
        if self.stages * self.microbatches * (self.virtual_stages or 1) > MAX_CELLS:
            many = f"{self.stages} stages and {self.microbatches} microbatches are too many to simulate"
            raise ValueError(f"{many}; use at most {MAX_CELLS:,} of stages x microbatches x chunks")
        check_picture(self.svg)
        made = schedules.make(self.name, self.stages, self.microbatches, self.virtual_stages)
        document = timetable.schedule_document(made, (f, b, w), self.hop)
        table = timetable.timetable(made, (f, b, w), self.hop)
        if self.svg:
            draw.timeline(table).save(self.svg)
            say(f"drew the timetable into {self.svg}")
        emit(document, self.json)
        if not self.json:
            print(timetable.text_timeline(table))
            for key in (
                "makespan",
                "makespan_lockstep",
                "bubble_over_ideal",
                "bubble_fraction",
                "bubble_rate",
                "peak_live",
            ):
                print(f"{key:<20}{document[key]}")


@dataclass(frozen=True)
class Doctor:
    """Check the environment: versions, devices, what is missing and how to get it.

    Attributes:
        json: print one JSON document on stdout.
    """

    json: bool = False

    def run(self) -> None:
        """Look, and print."""
        from llmpar.cli.doctor import examine

        document = examine()
        emit(document, self.json)
        for line in [] if self.json else document["lines"]:
            print(line)


@dataclass(frozen=True)
class Lab:
    """Open JupyterLab on the notebooks, with simulated devices unless an accelerator is found.

    Attributes:
        folder: where the notebooks are.
        port: to serve on; loopback only.
        browser: open one.
    """

    folder: str = "notebooks"
    port: int = 8888
    browser: bool = True

    def run(self) -> None:
        """Start JupyterLab and wait until it ends."""
        if not pathlib.Path(self.folder).is_dir():
            raise ValueError(
                f"there is no folder '{self.folder}' here; run this from the project's root, or give --folder"
            )
        if not 0 < self.port < 65536:
            raise ValueError(f"--port {self.port} is no port; use 1 to 65535")
        command = [
            sys.executable,
            "-m",
            "jupyter",
            "lab",
            self.folder,
            f"--port={self.port}",
            "--ip=127.0.0.1",
        ]
        # labconfig lets a saved notebook keep its widgets, which reopen without a kernel
        config = [os.environ.get("JUPYTER_CONFIG_PATH", ""), str(pathlib.Path(__file__).parent)]
        env = os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config))}
        root = (
            hasattr(os, "geteuid") and os.geteuid() == 0
        )  # as in most containers; it serves this machine alone
        command += ["--allow-root"] * root + ["--no-browser"] * (not self.browser)
        ended = subprocess.run(command, env=env).returncode
        if ended:
            raise ValueError(f"JupyterLab ended with status {ended}; it says why above")


MAX_CELLS = 40_000
"""Simulating more takes minutes."""

COMMANDS = {
    "doctor": Doctor,
    "lab": Lab,
    "train": Train,
    "inspect": Inspect,
    "models": Models,
    "schedule": Schedule,
    "generate": Generate,
    "demo": Demo,
}

DESCRIPTION = """Learn, plan and run LLM parallelism in JAX.

    llmpar train --mesh "dp=2 fsdp=2 tp=2" --steps 50     train, on 8 simulated devices or on accelerators
    llmpar inspect --mesh "dp=2 fsdp=2 tp=2"              what a step sends and holds: predicted, compiled

--json prints one JSON document; llmpar COMMAND --help says more.
LLMPAR_TRACEBACK=1 shows a failure's stack."""


def parse(argv: list[str]):
    """The command that these words ask for. Words that ask for none end the process with status 2, --help
    with 0."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    commands: dict = COMMANDS
    return tyro.extras.subcommand_cli_from_dict(
        commands, args=argv, prog="llmpar", description=DESCRIPTION, config=config
    )
