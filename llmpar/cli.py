"""The command line. Flags are the fields of dataclasses; JAX is imported only by commands that need it.

Exit status: 0 done, 1 a refusal or a failure in one sentence, 2 bad usage. With ``--json`` a command prints one JSON
document on stdout and everything else on stderr.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llmpar.commands import Inspect, Train, cache_compilations, emit, say, speaks
from llmpar.config import PRESETS, describe, preset


@dataclass(frozen=True)
class Demo:
    """The main job: train on 8 devices under three kinds of parallelism, read the compiled program, draw, check.

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
        from llmpar.demo import demonstrate

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
        models = [describe(preset(self.name))] if self.name else [describe(c) for c in PRESETS.values()]
        emit({"models": models}, self.json)
        for m in [] if self.json else models:
            print(f"{m['name']:<16}{m['params']:>18,} parameters{m['num_layers']:>5} layers{m['width']:>7} wide")


@dataclass(frozen=True)
class Generate:
    """Continue a text with a model whose cache of keys and values is cut over a mesh.

    Attributes:
        prompt: the text to continue.
        checkpoints: folder that `llmpar train --checkpoints` wrote; random weights where it is left out.
        model: a preset's name or the path of a config.json; that of the checkpoint.
        mesh: sizes of the axes; sp cuts the cache's positions, tp its heads.
        devices: CPU devices to simulate where there is no accelerator.
        tokens: how many to add.
        temperature: 0 takes the likeliest token, more draws from a flatter distribution.
        seed: of drawing.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json.
        dtype: of weights and cache.
        json: print one JSON document on stdout.
    """

    prompt: Annotated[str, tyro.conf.Positional] = "def "
    checkpoints: str | None = None
    model: str = "tiny"
    mesh: str = "sp=-1"
    devices: int = 8
    tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    tokenizer: str = "bytes"
    dtype: Literal["float32", "bfloat16"] = "float32"
    json: bool = False

    def run(self) -> None:
        """Restore the weights, take the prompt in, add tokens, and print."""
        import jax

        from llmpar import data
        from llmpar.checkpoint import Checkpoints
        from llmpar.generate import Decoder, abstract_params, generate
        from llmpar.mesh import make_mesh, use_devices
        from llmpar.notation import parse_mesh
        from llmpar.plan import Plan
        from llmpar.step import init_params

        cache_compilations()
        config, devices, tokenizer = preset(self.model), use_devices(self.devices), data.open_tokenizer(self.tokenizer)
        data.check_vocab(tokenizer, config.vocab_size)
        plan = Plan(parse_mesh(self.mesh, len(devices)), zero=0, dtype=self.dtype)
        if rows := plan.live("dp", "fsdp", "ep"):
            raise ValueError(f"mesh '{plan.mesh}' cuts rows by {', '.join(rows)}, but a prompt is one row; use sp and tp")
        mesh, prompt = make_mesh(plan.mesh), [[tokenizer.start_id, *tokenizer.encode(self.prompt)]]
        abstract = abstract_params(config, plan, mesh)
        if self.checkpoints:
            params = Checkpoints(self.checkpoints).params(abstract, config)
        else:
            say("no --checkpoints: the weights are random, and so will be the text")
            cut = jax.tree.map(lambda x: x.sharding, abstract)
            params = jax.jit(lambda: init_params(config, self.seed), out_shardings=cut)()
        decoder = Decoder(config, plan, mesh, params, 1, len(prompt[0]) + self.tokens)
        tokens = [int(row[0]) for row in generate(decoder, prompt, self.tokens, self.temperature, self.seed)]
        text = tokenizer.decode(tokens)
        emit({"prompt": self.prompt, "text": text, "tokens": tokens, "mesh": plan.mesh.sizes}, self.json)
        if not self.json and speaks():
            print(self.prompt + text)


@dataclass(frozen=True)
class Schedule:
    """Print a pipeline schedule: its timetable, bubble by every definition, makespan, live activations per stage.

    Attributes:
        name: gpipe, 1f1b, interleaved, zb-h1, …; a wrong name lists all.
        stages: pipeline stages p.
        microbatches: m.
        chunks: model chunks per stage, for schedules that have several.
        costs: times of forward, input-gradient and weight-gradient work: F,B,W.
        hop: latency of a send between stages, in the same unit.
        svg: also draw the timetable into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    name: Annotated[str, tyro.conf.Positional] = "1f1b"
    stages: int = 4
    microbatches: int = 8
    chunks: int | None = None
    costs: str = "1,1,1"
    hop: float = 0.0
    svg: str | None = None
    json: bool = False

    def run(self) -> None:
        """Simulate and print."""
        from llmpar import draw, orders, schedule

        try:
            f, b, w = (float(x) for x in self.costs.split(","))
        except ValueError as error:
            raise ValueError(f"--costs '{self.costs}' is not three numbers F,B,W such as 1,1,1") from error
        made = orders.make(self.name, self.stages, self.microbatches, self.chunks)
        document = schedule.schedule_document(made, (f, b, w), self.hop)
        table = schedule.timetable(made, (f, b, w), self.hop)
        if self.svg:
            draw.timetable(table).save(self.svg)
            say(f"drew the timetable into {self.svg}")
        emit(document, self.json)
        if not self.json:
            print(schedule.text_timeline(table))
            for key in ("makespan", "makespan_lockstep", "bubble_over_ideal", "bubble_fraction", "bubble_rate", "peak_live"):
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
        from llmpar.doctor import examine

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
            raise ValueError(f"there is no folder '{self.folder}' here; run this from the project's root, or give --folder")
        command = [sys.executable, "-m", "jupyter", "lab", self.folder, f"--port={self.port}", "--ip=127.0.0.1"]
        # static/labconfig lets a saved notebook keep its widgets, which reopen without a kernel
        config = [os.environ.get("JUPYTER_CONFIG_PATH", ""), str(pathlib.Path(__file__).parent / "static")]
        env = os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, config))}
        subprocess.run(command + ([] if self.browser else ["--no-browser"]), check=True, env=env)


COMMANDS = {
    "doctor": Doctor, "lab": Lab, "train": Train, "inspect": Inspect, "models": Models, "schedule": Schedule,
    "generate": Generate, "demo": Demo,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command and give its exit status."""
    try:
        command = tyro.extras.subcommand_cli_from_dict(COMMANDS, args=argv, prog="llmpar", description=__doc__)  # type: ignore[arg-type]
        command.run()  # type: ignore[attr-defined]
    except (ValueError, FloatingPointError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"llmpar: {error}", file=sys.stderr, flush=True)  # a RuntimeError is JAX's: out of memory, say
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
