"""The commands by name. Each is a dataclass: its fields are its flags, and `run` does it."""

import dataclasses
import difflib
import inspect
import re
import sys
from typing import Any

import tyro

from llmpar.cli.answers import Progress, Quiz, Solutions
from llmpar.cli.check import CheckCommand
from llmpar.cli.compile import Compile
from llmpar.cli.demo import Demo
from llmpar.cli.doctor import Doctor
from llmpar.cli.export import Export
from llmpar.cli.generate import Generate
from llmpar.cli.inspect import Inspect
from llmpar.cli.lab import Lab
from llmpar.cli.launch import LAUNCHABLE, Launch
from llmpar.cli.models import Models
from llmpar.cli.options import StepOptions
from llmpar.cli.plan import PlanCommand
from llmpar.cli.schedule import ScheduleCommand
from llmpar.cli.serve import Serve
from llmpar.cli.train import Train

GROUPS: dict[str, dict[str, Any]] = {
    "learn": {"lab": Lab, "demo": Demo, "quiz": Quiz, "progress": Progress, "solutions": Solutions},
    "run": {
        "doctor": Doctor,
        "train": Train,
        "generate": Generate,
        "serve": Serve,
        "export": Export,
    },
    "look": {
        "inspect": Inspect,
        "check": CheckCommand,
        "compile": Compile,
        "schedule": ScheduleCommand,
        "models": Models,
    },
    "decide": {"plan": PlanCommand},
    "many hosts": {"launch": Launch},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
HELP = """usage: llmpar COMMAND ..., and llmpar COMMAND --help says what it takes

Learn, plan and run LLM parallelism in JAX.
{commands}

examples
  llmpar demo
  llmpar train --mesh "dp=2 fsdp=2 tp=2" --steps 50
  llmpar inspect --mesh "dp=2 fsdp=2 tp=2"
  llmpar compile --target h100:8x8

--json prints one JSON document. LLMPAR_TRACEBACK=1 shows a failure's stack.
"""


def help_text() -> str:
    """Return the commands in groups, each with the first clause of its description."""
    lines = []
    for group, commands in GROUPS.items():
        lines += ["", group]
        for name, command in commands.items():
            lines.append(f"  {name:<11}{re.split('[,:.]', inspect.cleandoc(command.__doc__))[0]}")
    return HELP.format(commands="\n".join(lines)).replace("\n\n\n", "\n\n")


def parse(argv: list[str]):
    """Return the command that the words name. Other words end the process with status 2, --help with 0."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(help_text(), end="")
        raise SystemExit(0)
    if name not in COMMANDS:
        close = [
            f" (did you mean {like}?)" for like in difflib.get_close_matches(name, COMMANDS, 1)
        ]
        sentence = f"llmpar: there is no command '{name}'{''.join(close)}; llmpar --help lists them"
        print(sentence if argv else help_text(), file=sys.stderr)
        raise SystemExit(2)
    at = argv.index("--") if name == "launch" and "--" in argv else len(argv)
    command_class = COMMANDS[name]
    about = inspect.cleandoc(command_class.__doc__).partition("\n\nAttributes:")[0]
    about = re.sub(r"^(llmpar .*)$", r"    \1", about, flags=re.M)  # an example
    settings = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    command: Any = tyro.cli(
        command_class, prog=f"llmpar {name}", description=about, args=argv[1:at], config=settings
    )
    if isinstance(step := getattr(command, "step", None), StepOptions):
        flags = (
            word.removeprefix("--").partition("=")[0]
            for word in argv[1:at]
            if word.startswith("--")
        )
        given = tuple(flag.removeprefix("no-").replace("-", "_") for flag in flags)
        command = dataclasses.replace(command, step=dataclasses.replace(step, given=given))
    if not (words := argv[at + 1 :]):
        return command
    inner = parse(words) if words[0] in LAUNCHABLE else None
    return dataclasses.replace(command, words=tuple(words), command=inner)
