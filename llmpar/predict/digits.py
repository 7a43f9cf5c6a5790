"""Predicted numbers, with the digits that their error leaves them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_error: ContextVar[float] = ContextVar("error", default=0.0)


@contextmanager
def digits_of(error: float) -> Iterator[None]:
    """Write times and rates inside this block with the digits that such a relative error leaves."""
    token = _error.set(error)
    try:
        yield
    finally:
        _error.reset(token)


def rounded(value: float, error: float | None = None) -> float:
    """Return a value without the digits that a relative error takes: 66.1 is 66 where 0.16 of it is
    unsure."""
    error = _error.get() if error is None else error
    return float(f"{value:.{max(1, 1 - math.floor(math.log10(2 * error)))}g}") if error else value


def banded(text: str, error: float) -> str:
    """Return a predicted value with its mean error: ``66 s ± 16 %``."""
    return f"{text} ± {100 * error:.0f} %" if error else text


def about(seconds: float) -> str:
    """Return predicted seconds with two digits: errors of 10 to 18 % leave no more."""
    return f"about {rounded(seconds, 0.1):g} s"
