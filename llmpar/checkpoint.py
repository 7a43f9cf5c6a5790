"""Checkpoints: Orbax writes them atomically; they restore onto the same or any other mesh."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from llmpar.config import ModelConfig
from llmpar.step import State, Tree


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
        about = {"config": dataclasses.asdict(config), "checksums": checksums(state)}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), about=ocp.args.JsonSave(about))
        self._manager.save(step, args=args)

    def discard(self, step: int) -> None:
        """Delete the checkpoint of ``step``, if there is one: what it holds turned out to be spoiled."""
        if step in self._manager.all_steps():
            self._manager.delete(step)

    def restore(self, abstract: State, config: ModelConfig) -> State | None:
        """The newest state, laid out as ``abstract`` says; None where there is none. Refuses another model's, and what
        cannot be read or is not what was written."""
        if self.latest is None:
            return None
        written = self._checksums(config)
        state = State(**self._read("state", ocp.args.StandardRestore(abstract._asdict())))
        self._compare(written, state)
        return state

    def params(self, abstract: Tree, config: ModelConfig) -> Tree:
        """The newest weights without an optimizer's state, laid out as ``abstract`` says."""
        if self.latest is None:
            raise ValueError(f"there is no checkpoint in {self._manager.directory}; train with --checkpoints first")
        written, item = self._checksums(config), {"params": abstract}
        how = ocp.checkpoint_utils.construct_restore_args(item)
        found = self._read("state", ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True))
        self._compare(written, State(found["params"], None, None))
        return found["params"]

    def _checksums(self, config: ModelConfig) -> dict[str, int]:
        """What was written beside the state, after a look at whose state it is."""
        about = self._read("about", ocp.args.JsonRestore())
        asked, kept = dataclasses.asdict(config), about["config"]
        differ = [f"{k} {kept.get(k)} (asked: {asked[k]})" for k in asked if kept.get(k) != asked[k]]
        if differ:
            raise ValueError(
                f"the checkpoint in {self._manager.directory} is of another model: it has {', '.join(differ)}; "
                "give that model, or another folder"
            )
        return about["checksums"]

    def _compare(self, written: dict[str, int], found: State) -> None:
        damaged = [name for name, now in checksums(found).items() if written.get(name) != now]
        if damaged:
            self._refuse(f"{', '.join(damaged)} is not what was written")

    def _read(self, item: str, args):
        try:
            return self._manager.restore(self.latest, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:  # Orbax and TensorStore raise every kind, bare Exception too
            self._refuse(str(error).partition("\n")[0].partition(". See ")[0])

    def _refuse(self, why: str):
        raise ValueError(
            f"the checkpoint of step {self.latest} in {self._manager.directory} cannot be used: {why}; if the optimizer is "
            f"the one it was made with, it is damaged: delete the folder {self.latest} there to resume from the one before"
        )


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    words = [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32) for x in leaves]
    return [jnp.sum(x, dtype=jnp.uint32) for x in words]


def checksums(state: State) -> dict[str, int]:
    """Every leaf's bits added up, modulo 2^32: the same on any mesh, other when a bit has changed."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(state._asdict()), strict=True)
    return {jax.tree_util.keystr(path): int(n) for path, n in zip(paths, jax.device_get(_sums(list(leaves))), strict=True)}
