"""pytest's option ``--update-pins``: write the tables of `Look.pin` anew, as ``LLMPAR_UPDATE_PINS=1`` does.

pytest imports this file by its entry point in every project where llmpar is installed. So it imports no
JAX."""

import os
import sys


def pytest_addoption(parser) -> None:
    """Add the option to the group llmpar of ``pytest --help``."""
    words = "write the files of llmpar's pins anew: what a program sends now is right"
    parser.getgroup("llmpar").addoption("--update-pins", action="store_true", help=words)


def pytest_configure(config) -> None:
    """Set the variable that `llmpar.inspect.pins.pin` reads."""
    if config.getoption("--update-pins"):
        os.environ["LLMPAR_UPDATE_PINS"] = "1"


def pytest_terminal_summary(terminalreporter, config) -> None:
    """With the option, name the pins that no test of this run has used, and the command that removes them."""
    pins = sys.modules.get("llmpar.inspect.pins")
    for path in pins.unused_pins() if pins and config.getoption("--update-pins") else ():
        text = f"llmpar: no test of this run pins '{path}'; if none does any more: rm {path}"
        terminalreporter.write_line(text)
