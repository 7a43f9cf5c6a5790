"""Where figures go besides the log: a tracker, and a profiler's trace whose names are arrows."""

import contextlib
import glob
import gzip
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

Tracker = Literal["wandb", "mlflow", "trackio", "tensorboard"]
Send = Callable[[int, dict[str, Any]], Any]


@contextlib.contextmanager
def tracking(
    name: Tracker | None, about: dict[str, Any], tell: Callable[[str], None]
) -> Iterator[Send]:
    """Give a function that hands a step's numbers on, in the first process; without a name it does nothing.
    A tracker that fails later is reported and left out; the run goes on."""
    import jax

    if name is None or jax.process_index() != 0:
        yield lambda step, row: None
        return
    package = "tensorboardX" if name == "tensorboard" else name
    with contextlib.redirect_stdout(sys.stderr):  # some greet there
        try:
            send, close, failed = _begun(name, importlib.import_module(package), about)
        except Exception as error:  # each raises its own
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            use = (
                f"pip install {package}"
                if isinstance(error, ImportError)
                else "see to its settings"
            )
            raise ValueError(
                f"tracker '{name}' cannot begin ({why}); {use}, or use --log alone"
            ) from error
        lost, ends = False, failed

        def try_to(call: Callable, *args: Any, **options: Any) -> None:
            nonlocal lost
            try:
                if not lost:
                    call(*args, **options)
            except Exception as error:
                lost = True
                tell(f"tracker '{name}' gets no more rows: {type(error).__name__}: {error}")

        number = lambda key, value: key != "step" and isinstance(value, int | float)
        try:
            yield lambda step, row: try_to(
                send, {k: x for k, x in row.items() if number(k, x)}, step=step
            )
            ends = {}
        finally:
            try_to(close, **ends)


def _begun(
    name: Tracker, module: Any, about: dict[str, Any]
) -> tuple[Callable, Callable, dict[str, Any]]:
    """Begin a run; return what takes its rows, what ends it, and that one's arguments if the run failed."""
    if name == "tensorboard":
        writer = module.SummaryWriter()
        return (
            lambda row, step: [writer.add_scalar(k, x, step) for k, x in row.items()],
            writer.close,
            {},
        )
    if name == "mlflow":
        module.start_run()
        module.log_params(about)
        return module.log_metrics, module.end_run, {"status": "FAILED"}
    module.init(project="llmpar", config=about)
    return module.log, module.finish, {"exit_code": 1} if name == "wandb" else {}


@contextlib.contextmanager
def profiling(folder: str, program: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Write a trace of what runs meanwhile, in the first process: operations of ``program``, a compiled
    step's text, are named by the arrows that they carry out."""
    import jax

    if jax.process_index() != 0:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would show this loop
    with jax.profiler.trace(folder, profiler_options=options):
        yield
    arrows = dict(re.findall(r'([\w.-]+) = [^\n]*op_name="[^"\n]*(arrow\[[^\]"\n]*\])', program))
    path = max(glob.glob(f"{folder}/plugins/profile/*/*.trace.json.gz"), key=os.path.getmtime)
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    for event in trace["traceEvents"]:
        operation = event.get("args", {}).get("hlo_op", event.get("name"))
        if operation in arrows:
            event["name"] = f"{arrows[operation]} {operation}"
    with gzip.open(path, "wt") as file:
        json.dump(trace, file)
    tell(f"the profile is {path}: open it at ui.perfetto.dev; or run 'xprof --logdir {folder}'")
