"""The commands by name. Each is a dataclass: its fields are its flags, and `run` does it."""

import dataclasses
import difflib
import inspect
import pkgutil
import re
import sys
from typing import Any

import tyro

from llmpar.files import check_fields

GROUPS: dict[str, dict[str, str]] = {
    "learn": {
        "lab": "lab:Lab",
        "demo": "demo:Demo",
        "quiz": "answers:Quiz",
        "progress": "answers:Progress",
        "solutions": "answers:Solutions",
    },
    "run": {
        "doctor": "doctor:Doctor",
        "train": "train:Train",
        "rl": "rl:Rl",
        "generate": "generate:Generate",
        "serve": "serve:Serve",
        "export": "export:Export",
    },
    "look": {
        "inspect": "inspect:Inspect",
        "check": "inspect:CheckCommand",
        "compile": "compile:Compile",
        "schedule": "schedule:ScheduleCommand",
        "models": "models:Models",
    },
    "decide": {"plan": "plan:PlanCommand", "goodput": "goodput:GoodputCommand"},
    "many hosts": {"launch": "launch:Launch"},
}
"""The class of each command, by its module: only the one that is asked for is imported."""
COMMANDS = {name: place for group in GROUPS.values() for name, place in group.items()}
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
        for name in commands:
            about = inspect.cleandoc(command_class(name).__doc__ or "")
            lines.append(f"  {name:<11}{re.split('[,:.]', about)[0]}")
    return HELP.format(commands="\n".join(lines)).replace("\n\n\n", "\n\n")


def command_class(name: str) -> type:
    """Import the class of a command."""
    return pkgutil.resolve_name(f"llmpar.cli.{COMMANDS[name]}")


def check_options(command: Any) -> None:
    """Refuse values that their types do not allow, and empty names."""
    check_fields(command)
    for field in dataclasses.fields(command):
        if getattr(command, field.name) == "" != field.default and field.name != "prompt":
            flag = field.name.strip("_").replace("_", "-")
            raise ValueError(f"--{flag} '' is empty; give a value, or leave it out")


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
    command_type = command_class(name)
    about = inspect.cleandoc(command_type.__doc__ or "").partition("\n\nAttributes:")[0]
    about = re.sub(r"^(llmpar .*)$", r"    \1", about, flags=re.M)  # an example
    settings = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    command: Any = tyro.cli(
        command_type, prog=f"llmpar {name}", description=about, args=argv[1:at], config=settings
    )
    check_options(command)
    step: Any = getattr(command, "step", None)
    if hasattr(step, "given"):
        check_options(step)
        flags = (
            word.removeprefix("--").partition("=")[0]
            for word in argv[1:at]
            if word.startswith("--")
        )
        given = tuple(flag.removeprefix("no-").replace("-", "_") for flag in flags)
        command = dataclasses.replace(command, step=dataclasses.replace(step, given=given))
    if not (words := argv[at + 1 :]):
        return command
    from llmpar.cli.launch import LAUNCHABLE

    inner = parse(words) if words[0] in LAUNCHABLE else None
    return dataclasses.replace(command, words=tuple(words), command=inner)
