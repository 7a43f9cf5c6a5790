"""Run one command, and turn whatever happens into an exit status and a sentence.

Exit status: 0 done, 1 a refusal or a failure in one sentence, 2 bad usage, 3 an assertion that does not hold,
130 Ctrl-C, 143 asked to end (SIGTERM), 129 a lost terminal (SIGHUP); of several processes 75 where one
failed, 76 where one was stuck: the same command may go on. With ``--json`` a command prints one JSON document
on stdout and everything else on stderr, where what cannot be written is lost and the work goes on. Nothing
heavy is imported before `main` runs, so that Ctrl-C is heard from the start.
"""

import contextlib
import gc
import io
import os
import shutil
import signal
import sys
import tempfile
import traceback
from typing import Any

import llmpar
from llmpar.launch import signals

_TO_THE_END = contextlib.ExitStack()
"""What the command line keeps while Python ends: that hears Ctrl-C, too."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    for number, name in enumerate(("stdout", "stderr"), 1):
        if getattr(sys, name) is None:  # it was closed, and the next file would have its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, "w", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every letter
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(signals.ForPeople(sys.stderr)))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            stack.enter_context(signals.signals_to(_interrupt, [signal.SIGINT]))
        status = _status_of(argv)
        if argv is None:
            _TO_THE_END.push(stack.pop_all())
    return status


def _interrupt(number: int) -> None:
    """End a command that keeps nothing, and delete its temporary folders. An exception would not do: JAX
    ignores it in a callback, and XLA does not survive Python's end while it compiles."""
    for thing in gc.get_objects():
        if type(thing) is tempfile.TemporaryDirectory:
            shutil.rmtree(thing.name, ignore_errors=True)
    signals.end("interrupted", 128 + number)


def _status_of(argv: list[str] | None) -> int:
    try:
        _run(sys.argv[1:] if argv is None else argv)
        status = 0
    except SystemExit as end:
        if end.code == 2:
            _decline(f"it cannot read its command 'llmpar {' '.join(argv or sys.argv[1:])}'")
        raise
    except KeyboardInterrupt:
        status = _fail("interrupted", 130)
    except BrokenPipeError as error:  # the reader closed it
        status = _fail("", 141, error)
    except MemoryError as error:
        words = "the memory of this machine is full; use a smaller model, batch or text"
        status = _fail(words, 1, error)
    except Exception as error:
        status = _fail(explain_error(error), _status(error), error)
    if status and (joined := _joined()):
        joined.leave_job(status)
    return status


def _run(argv: list[str]) -> None:
    if argv[:1] == ["--version"]:
        print(f"llmpar {llmpar.__version__}")
        return
    number = os.environ.get("JAX_NUM_CPU_DEVICES") or "1"
    if not number.isdecimal() or not int(number):
        raise ValueError(f"JAX_NUM_CPU_DEVICES is '{number}'; use 1 or more, or unset it")
    from llmpar.cli.commands import parse

    parse(argv).run()
    if sys.stdout:
        sys.stdout.flush()  # so that a full disk or a closed pipe is known here


def jax_settings() -> str:
    """Return the environment's settings of JAX as the end of a sentence, or nothing."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("JAX_")]
    return f"; set are {', '.join(variables)}" if variables else ""


def explain_error(error: Exception) -> str:
    """Explain an error in one sentence: a refusal's own text, or that this is a fault of the package.

    A refusal is a ValueError that this package raises. A ValueError that another library raises is a case
    that this package has overlooked.
    """
    package = os.path.dirname(llmpar.__file__) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(package)]
    elsewhere = any(
        frame.name == "<module>" and "-packages" + os.sep in frame.filename and frame not in ours
        for frame in frames
    )
    refused = isinstance(error, ValueError) and frames[-1:] == ours[-1:]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: '{error.filename}'" if error.filename else error.strerror
    if refused or isinstance(error, OSError | FloatingPointError):
        return str(error)
    summary = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
    if (
        elsewhere
        or isinstance(error, ImportError)
        and (error.name or "").partition(".")[0] != "llmpar"
    ):
        summary += jax_settings()
        return f"another package cannot be imported: {summary}; llmpar doctor compares versions"
    if (joined := _joined()) and joined.is_broken(summary):
        return (
            f"another process ended, or could not be reached: its own output says why ({summary})"
        )
    if "RESOURCE_EXHAUSTED" in summary or "Out of memory" in summary:
        return (
            f"the memory of a device is full ({summary}); use a smaller model or batch, more"
            " microbatches, or --remat block"
        )
    places = [f"{frame.filename.removeprefix(package)}:{frame.lineno}" for frame in ours]
    return (
        f"this is a fault of llmpar, at {''.join(places[-1:])}: {summary}; LLMPAR_TRACEBACK=1 shows the"
        " stack"
    )


def _joined() -> Any:
    """Return the module that joined this process to others, or None. Nothing is imported for it."""
    joined = sys.modules.get("llmpar.launch.joined")
    with contextlib.suppress(Exception):  # a broken JAX cannot say
        return joined if joined and joined.is_joined() else None
    return None


def _decline(sentence: str) -> None:
    """Of several processes, tell those that wait for this one that it does not come."""
    with contextlib.suppress(Exception):
        from llmpar.launch import joined

        joined.decline(os.environ, sentence)


def _status(error: Exception) -> int:
    """Return an error's exit status: 1 for a refusal; for any other error in one of several processes the
    status after which an engine starts them again. A write that failed because another process ended is no
    refusal."""
    if not (joined := _joined()):
        return getattr(error, "status", 1)
    refused = isinstance(error, ValueError | OSError | FloatingPointError)
    return 1 if refused and not joined.is_broken(str(error)) else joined.FAILED


def _fail(sentence: str, status: int, error: Exception | None = None) -> int:
    """Print the sentence and return the status. If another process failed first, print that instead, and
    return its status."""
    if error and os.environ.get("LLMPAR_TRACEBACK"):
        traceback.print_exception(error)
    first = None
    with contextlib.suppress(Exception):  # the own sentence comes first
        if sentence and (joined := _joined()):
            first = joined.tell_others(sentence, status)
    if sentence and first is None:
        print(f"llmpar: {sentence}", file=sys.stderr, flush=True)
    if isinstance(error, OSError) and sys.stdout is sys.__stdout__ and sys.stdout:
        signals.silence(sys.stdout)
    if status == 1 and not _joined():
        _decline(sentence)
    return status if first is None else first
