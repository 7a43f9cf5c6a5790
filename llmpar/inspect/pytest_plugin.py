"""pytest's option ``--update-pins``: write the tables of `Look.pin` anew, as ``LLMPAR_UPDATE_PINS=1`` does.

pytest imports this file by its entry point in every project where llmpar is installed. So it imports no
JAX."""

import os


def pytest_addoption(parser) -> None:
    """Add the option to the group llmpar of ``pytest --help``."""
    words = "write the files of llmpar's pins anew: what a program sends now is right"
    parser.getgroup("llmpar").addoption("--update-pins", action="store_true", help=words)


def pytest_configure(config) -> None:
    """Set the variable that `llmpar.inspect.pins.pin` reads."""
    if config.getoption("--update-pins"):
        os.environ["LLMPAR_UPDATE_PINS"] = "1"
