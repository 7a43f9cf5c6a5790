"""Checkpoints: Orbax writes them atomically; they restore onto the same or any other mesh."""

from __future__ import annotations

import dataclasses
import pathlib

import orbax.checkpoint as ocp

from llmpar.config import ModelConfig
from llmpar.step import State


class Checkpoints:
    """A folder of checkpoints of a :class:`llmpar.step.State`.

    Args:
        folder: where they live; made when the first is saved.
        every: save after so many steps (and after the last).
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: str, every: int = 100, keep: int = 2):
        if every < 1 or keep < 1:
            raise ValueError(f"checkpoints every {every} steps, {keep} kept: both must be at least 1")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self.every = every
        self._manager = ocp.CheckpointManager(pathlib.Path(folder).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def due(self, step: int, last: int) -> bool:
        """Whether to save after ``step`` steps."""
        return step % self.every == 0 or step == last

    def save(self, step: int, state: State, config: ModelConfig) -> None:
        """Write all of the state, and the model's configuration beside it; finished, or as if it had never begun."""
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()), config=ocp.args.JsonSave(dataclasses.asdict(config))
        )
        self._manager.save(step, args=args)

    def restore(self, abstract: State, config: ModelConfig) -> State | None:
        """The newest state, laid out as ``abstract`` says; None where there is none. Refuses another model's."""
        if self.latest is None:
            return None
        kept = self._manager.restore(self.latest, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
        asked = dataclasses.asdict(config)
        differ = [f"{k} {kept.get(k)} (asked: {asked[k]})" for k in asked if kept.get(k) != asked[k]]
        if differ:
            raise ValueError(
                f"the checkpoint in {self._manager.directory} is of another model: it has {', '.join(differ)}; "
                "give that model, or another folder"
            )
        restore = ocp.args.Composite(state=ocp.args.StandardRestore(abstract._asdict()))
        return State(**self._manager.restore(self.latest, args=restore)["state"])
