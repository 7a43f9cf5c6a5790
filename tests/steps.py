"""Training in tests: one step for each model, plan and optimizer, traced and compiled once for all runs."""

import dataclasses
import functools
from unittest import mock

import jax

from llmpar.training import loop as training
from llmpar.training.optimizer import make_optimizer
from llmpar.training.step import Step


class SharedStep(Step):
    """A step whose fresh state is made once; each run begins with a copy."""

    @functools.cache  # noqa: B019 - steps stay
    def _first(self, seed: int):
        return jax.device_get(super().init(seed))

    def init(self, seed=0, params=None):
        if params is not None:
            return super().init(seed, params)
        return jax.device_put(self._first(seed), self.shardings, may_alias=False)


SHARED = {"Step": functools.cache(SharedStep), "make_optimizer": functools.cache(make_optimizer)}


def train(*args, **more):
    """`llmpar.training.loop.train`, with steps that runs share; fields of its groups by their names."""
    for name, group in {"evaluation": training.Evaluation, "callbacks": training.Callbacks}.items():
        names = more.keys() & {field.name for field in dataclasses.fields(group)}
        more[name] = group(**{field: more.pop(field) for field in names})
    with mock.patch.multiple(training, **SHARED):
        return training.train(*args, **more)
