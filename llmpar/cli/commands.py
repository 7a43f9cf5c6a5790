"""The commands by name. Each is a dataclass: its fields are its flags, and `run` does it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tyro

from llmpar.cli.answers import Progress, Quiz, Solutions
from llmpar.cli.compile import Compile
from llmpar.cli.demo import Demo
from llmpar.cli.doctor import Doctor
from llmpar.cli.generate import Generate
from llmpar.cli.inspect import Inspect
from llmpar.cli.lab import Lab
from llmpar.cli.launch import COMMANDS as LAUNCHED
from llmpar.cli.launch import Launch
from llmpar.cli.models import Models
from llmpar.cli.plan import Plan
from llmpar.cli.schedule import Schedule
from llmpar.cli.train import Train

COMMANDS = {
    "doctor": Doctor,
    "lab": Lab,
    "progress": Progress,
    "quiz": Quiz,
    "solutions": Solutions,
    "train": Train,
    "launch": Launch,
    "inspect": Inspect,
    "plan": Plan,
    "compile": Compile,
    "models": Models,
    "schedule": Schedule,
    "generate": Generate,
    "demo": Demo,
}

DESCRIPTION = """Learn, plan and run LLM parallelism in JAX.

    llmpar train --mesh "dp=2 fsdp=2 tp=2" --steps 50     train, on 8 simulated devices or on accelerators
    llmpar inspect --mesh "dp=2 fsdp=2 tp=2"              what a step sends and holds: predicted, compiled
    llmpar compile --target h100:8x8                      the same, by the compiler of an absent cluster

--json prints one JSON document; llmpar COMMAND --help says more.
LLMPAR_TRACEBACK=1 shows a failure's stack."""


def parse(argv: list[str]):
    """The command that these words ask for. Words that ask for none end the process with status 2, --help
    with 0."""
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    commands: dict = COMMANDS
    at = argv.index("--") if argv[:1] == ["launch"] and "--" in argv else len(argv)
    command: Any = tyro.extras.subcommand_cli_from_dict(
        commands, args=argv[:at], prog="llmpar", description=DESCRIPTION, config=config
    )
    if not (words := argv[at + 1 :]):
        return command
    inner = parse(words) if words[0] in LAUNCHED else None
    return dataclasses.replace(command, words=tuple(words), command=inner)
