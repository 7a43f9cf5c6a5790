"""Checkpoints: Orbax writes them atomically; they restore onto any mesh, and know what made them."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.experimental import multihost_utils

from llmpar.files import refuse_first
from llmpar.model.weights import Tree
from llmpar.plan.model_config import ModelConfig, from_dict
from llmpar.training.folder_lock import FolderLock, hindered
from llmpar.training.state import State

Tell = Callable[[str], None]
# What a run keeps from its first step to its last: with another of these a step would not be the one that
# was begun. The mesh may change, for it leaves every loss as it is; what else is written down (the learning
# rate, the dtype) is reported.
# With another of the last two the state has other shapes.
FIXED = "data tokenizer seed data_seed held_out batch_size seq_len optimizer workers".split()
# How many of the newest checkpoints stay, besides the best.
_KEPT = 2
# What made a run; or its score: a held-out ``loss``, and ``of`` what it is, for only like is compared.
Record = dict[str, Any] | None


def agreed(number: int) -> int:
    """Return the first process's number in all processes, so that all do the same."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


class Checkpoints:
    """A folder of checkpoints of a :class:`llmpar.training.state.State`.

    Args:
        folder: where they live; made when the first is saved.
        every: save after so many steps (and after the last).
        take_best: what is read is the checkpoint with the lowest held-out loss, not the newest.
    """

    def __init__(self, folder: str, every: int = 100, take_best: bool = False):
        self.every, self.take_best, self.folder = every, take_best, pathlib.Path(folder).absolute()
        self._lock = FolderLock(self.folder)
        self._writes = False
        self._read_step: int | None = None
        is_model = (self.folder / "config.json").is_file()
        refuse_first(
            (every < 1, f"checkpoints every {every} steps: use 1 or more"),
            (
                self.folder.exists() and not self.folder.is_dir(),
                f"checkpoints lie in a folder, but '{folder}' is a file; give another name",
            ),
            (
                is_model and any(self.folder.glob("*.safetensors")),
                f"'{folder}' is the folder of a Hugging Face model (config.json, safetensors), not one of"
                " checkpoints; give another folder",
            ),
        )

    @functools.cached_property
    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        return ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step() if self.folder.is_dir() else None

    def best(self, *more: tuple[int, Record]) -> int | None:
        """Return the step with the lowest held-out loss of those evaluated as the last, and ``more``; or
        None."""
        steps = sorted(self._manager.all_steps()) if self.folder.is_dir() else []
        scores = [(step, self._score(step)) for step in steps] + [*more]
        finite = [(step, score) for step, score in scores if score and math.isfinite(score["loss"])]
        alike = [
            (score["loss"], step) for step, score in finite if score["of"] == finite[-1][1]["of"]
        ]
        return min(alike)[1] if alike else None

    def _score(self, step: int) -> Record:
        """Return a checkpoint's evaluation as it was written; None of a damaged one, which is refused when it
        is read. (One that this machine cannot read now is no worse than others, and must not be deleted.)"""
        gone = FileNotFoundError, NotADirectoryError
        with contextlib.suppress(*gone, ValueError, TypeError, KeyError, AttributeError):
            score = json.loads((self.folder / str(step) / "about" / "metadata").read_text())[
                "score"
            ]
            return {"loss": float(score["loss"]), "of": str(score["of"])}
        return None

    @property
    def chosen(self) -> int | None:
        """The step of the checkpoint that is read: the newest, or the best, when `about` was read."""
        if self._read_step is not None:
            return self._read_step
        if not self.take_best or self.latest is None:
            return self.latest
        if (best := self.best()) is None:
            raise ValueError(
                f"none of the checkpoints in {self.folder} was evaluated, so none is the best; train with"
                " --eval-every, or take the newest, without --best"
            )
        return best

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Let no other process write into the folder (`FolderLock`); refuse where one does, or where nothing
        can be written."""
        with contextlib.ExitStack() as stack:
            self._writes = True
            stack.callback(setattr, self, "_writes", False)
            if jax.process_index() == 0:
                self._lock.take(stack)
            if jax.process_count() > 1:
                self._lock.check_shared()
            self._manager.reload()  # what was written before the lock was ours
            yield

    def _save_aside(self, number: int, step: int, *what: Any) -> None:
        """Save into a new folder, since this one is no longer ours, and end with that."""
        aside = Checkpoints(f"{self.folder}-{step}-{number}")
        aside.save(step, *what)
        raise ValueError(
            f"{self.folder} is not the folder that this training began with: that one, or its file 'lock',"
            f" was renamed, deleted or replaced; step {step} is kept in {aside.folder}, and training ends;"
            " go on with --checkpoints there"
        )

    def save(
        self,
        step: int,
        state: State,
        config: ModelConfig,
        made: Record = None,
        score: Record = None,
    ) -> None:
        """Write all of the state, and beside it the model's configuration, what ``made`` it, and its score;
        finished, or as if it had never begun. Then older ones are deleted, but for one that is being read."""
        if stranger := agreed(0 if self._lock.is_ours() else os.getpid()):
            self._save_aside(stranger, step, state, config, made, score)
        self._read_step = None
        about = {"config": dataclasses.asdict(config), "made": made or {}, "score": score}
        weights = flatten_dict(state.params, sep=".").items()
        narrow = {path: str(weight.dtype) for path, weight in weights if weight.dtype != "float32"}
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()),
            about=ocp.args.JsonSave(about | {"checksums": checksums(state), "narrow": narrow}),
        )
        before = self.latest
        try:
            self._manager.save(step, args=parts)
        except Exception as error:  # Orbax and TensorStore raise every kind
            why = _first_line(error)
            if any(
                sign in str(error) for sign in ("No space left", "RESOURCE_EXHAUSTED", "Errno 28")
            ):
                size = sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20
                space = f"free some {max(1, round(1.2 * size)):,} MiB"
                why = f"the disk is full; {space} and run the same command again"
            kept = (
                f"the checkpoint of step {before} is intact"
                if before
                else "no checkpoint was taken before"
            )
            raise ValueError(
                f"the checkpoint of step {step} could not be written to {self.folder} ({kept}): {why}"
            ) from error
        best = -1  # none is deleted while the best is not known
        with contextlib.suppress(OSError):
            best = self.best() or 0
        best = agreed(best)
        for old in sorted(self._manager.all_steps())[:-_KEPT] if best >= 0 else ():
            is_free = jax.process_index() != 0 or self._lock.is_free(old)
            if old != best and agreed(is_free):
                self._manager.delete(old)

    def discard(self, step: int) -> None:
        """Delete the checkpoint of ``step``, if there is one: what it holds turned out to be spoiled."""
        ours = agreed(self._lock.is_ours())
        if step in self._manager.all_steps() and ours:
            self._manager.delete(step)

    def about(self) -> dict[str, Any]:
        """Return what was written beside the state: the model's ``config``, what ``made`` it, ``checksums``,
        and its ``score`` where it was evaluated."""
        if self.latest is None:
            raise ValueError(
                f"there is no checkpoint in {self.folder}; train with --checkpoints first"
            )
        about = self._described()
        if not isinstance(about, dict):
            self._refuse("its description is no JSON object")
        for name in ("config", "made", "checksums"):
            if not isinstance(value := about.get(name), dict):
                self._refuse(f"its description has {json.dumps(value):.40} as {name}")
        try:
            return about | {"config": from_dict(about["config"])}
        except ValueError as error:
            raise ValueError(
                f"{self._which} is of a model that is not known here: {error}"
            ) from error

    def _described(self, again: bool = False) -> Any:
        """Return the description of the checkpoint that is read from here on. If a training has taken that
        away meanwhile, it is the one that is the newest (or the best) now."""
        known, self._read_step = self._read_step, self.chosen
        step = self._read_step
        try:
            if not self._writes and known is None:  # it stays until this object is gone
                with contextlib.suppress(OSError, ImportError):
                    weakref.finalize(self, os.close, self._lock.hold(step or 0))
            return self._read("about", ocp.args.JsonRestore())
        except ValueError:
            if again or known is not None or jax.process_count() > 1:
                raise
            self._read_step = None
            self._manager.reload()
            if self.chosen in (step, None):
                self._read_step = step
                raise
            return self._described(again=True)

    def restore(
        self,
        abstract: State,
        config: ModelConfig,
        made: dict[str, Any] | None = None,
        anyway: bool = False,
        tell: Tell = lambda words: None,
    ) -> State | None:
        """Return the state, laid out as ``abstract`` says; None where there is none.

        Refuses another model's state, what cannot be read or is not what was written, and a run whose `FIXED`
        settings differ from ``made`` (unless ``anyway``). Tells of differences that are harmless.
        """
        if self.latest is None:
            return None
        about = self._about(config)
        if made:
            self._compare_runs(about["made"], made, anyway, tell)
        written, requested = about["checksums"].keys(), _names(abstract).keys()
        other = sorted(name for name in written ^ requested if not name.startswith("['params']"))
        if other:
            raise ValueError(
                f"{self._which} holds another optimizer's state (it has {len(written)} leaves, asked are"
                f" {len(requested)}; in one alone is {other[0]}); give the optimizer that made it"
            )
        weights = flatten_dict(abstract.params, sep=".").items()
        placed = {path: _placed(about, path, w.shape, w.sharding) for path, w in weights}
        item = abstract._replace(params=unflatten_dict(placed, sep="."))
        state = State(**self._read("state", ocp.args.StandardRestore(item._asdict())))
        self._compare(about["checksums"], state)
        cast = lambda w, like: w.astype(like.dtype)
        return state._replace(params=jax.tree.map(cast, state.params, abstract.params))

    def params(self, shardings: Tree, config: ModelConfig) -> Tree:
        """Return the weights (those that the tree of shardings names, laid out so) in the dtypes of the
        file."""
        about, weights = self._about(config), config.weights()
        place = lambda path, to: _placed(about, path, weights[path].shape, to)
        where = {path: place(path, to) for path, to in flatten_dict(shardings, sep=".").items()}
        item = {"params": unflatten_dict(where, sep=".")}
        to = ocp.checkpoint_utils.construct_restore_args(item)
        restored = self._read(
            "state", ocp.args.PyTreeRestore(item, restore_args=to, partial_restore=True)
        )
        self._compare(about["checksums"], State(restored["params"], None, None))
        return restored["params"]

    def _about(self, config: ModelConfig) -> dict[str, Any]:
        """Return `about`; refuse another model's state."""
        about = self.about()
        kept, given = (dataclasses.asdict(x) for x in (about["config"], config))
        if differ := [f"{k} {kept[k]} (asked: {given[k]})" for k in kept if kept[k] != given[k]]:
            raise ValueError(
                f"the checkpoint in {self.folder} is of another model: it has {', '.join(differ)}; give that"
                " model, or another folder"
            )
        return about

    def _compare_runs(self, kept: dict, requested: dict, anyway: bool, tell: Tell) -> None:
        """Refuse, or tell, how the requested run differs from the one that wrote. What one of them lacks is
        None."""
        pairs = {name: (kept.get(name), requested.get(name)) for name in requested | kept}
        differ = {
            name: f"{name} {_words(before)} (asked: {_words(now)})"
            for name, (before, now) in pairs.items()
            if _id(before) != _id(now)
        }
        fixed = [words for name, words in differ.items() if name in FIXED]
        shapes = differ.keys() & FIXED[-2:]
        if fixed and (not anyway or shapes):
            instead = "ask for that, or give another folder"
            if not shapes:
                instead += "; --anyway goes on all the same, as another run than was begun"
            raise ValueError(f"{self._which} was made with {', '.join(fixed)}; {instead}")
        if differ:
            tell(
                f"from step {self.latest} on this is another {'run' if fixed else 'curve'} than was begun: it"
                f" had {', '.join(differ.values())}"
            )

    def _compare(self, written: dict[str, int], restored: State) -> None:
        damaged = [name for name, now in checksums(restored).items() if written.get(name) != now]
        if damaged:
            more = f" (and {len(damaged) - 2} more)" if len(damaged) > 2 else ""
            self._refuse(f"{', '.join(damaged[:2])}{more} is not what was written")

    def _read(self, item: str, args):
        try:
            return self._manager.restore(self.chosen, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:  # Orbax and TensorStore raise every kind, bare Exception too
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            self._refuse(_first_line(error), error)

    @property
    def _which(self) -> str:
        return f"the checkpoint of step {self.chosen} in {self.folder}"

    def _refuse(self, why: str, error: Exception | None = None):
        if error and (why_not := hindered(self.folder / str(self.chosen), error)):
            raise ValueError(f"{self._which} cannot be read now: {why_not}") from error
        raise ValueError(
            f"{self._which} cannot be used: {why}; it is damaged: delete the folder {self.chosen} there to"
            " resume from the one before"
        )


def _placed(
    about: dict[str, Any], path: str, shape: tuple[int, ...], sharding: Any
) -> jax.ShapeDtypeStruct:
    """Return a weight in the dtype in which it was written: frozen ones may have been narrower than
    float32."""
    return jax.ShapeDtypeStruct(
        shape, about.get("narrow", {}).get(path, "float32"), sharding=sharding
    )


def kept_in(folder: pathlib.Path) -> dict[str, str]:
    """Return the steps of the checkpoints in a folder, as this process sees them, with a checksum of what is
    written beside each. (Orbax itself would wait for processes that see others.)"""
    files = {file.parts[-3]: file for file in sorted(folder.glob("*/about/metadata"))}
    sums = {step: hashlib.sha256(file.read_bytes()).hexdigest()[:8] for step, file in files.items()}
    return {step: sums[step] for step in sums if step.isdigit()}


def _first_line(error: Exception) -> str:
    """Return the beginning of another library's message."""
    return str(error).partition("\n")[0].partition(". See ")[0][:200] or type(error).__name__


def _id(value):
    """Return what is compared of a value that was written down: the fingerprint of a named file."""
    return value["fingerprint"] if isinstance(value, dict) else value


def _words(value) -> str:
    return f"'{value['name']}' [{value['fingerprint']}]" if isinstance(value, dict) else str(value)


def _names(state: State) -> dict[str, Any]:
    """Return the leaves of a state by path."""
    return {
        jax.tree_util.keystr(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(state._asdict())
    }


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
    bits = [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in leaves]
    return [jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32) for x in bits]


def checksums(state: State) -> dict[str, int]:
    """Every leaf's bits added up, modulo 2^32: the same on any mesh, other when a bit has changed. (A sum:
    words that have changed places have the same.)"""
    leaves = _names(state)
    sums = jax.device_get(_sums(list(leaves.values())))
    return {name: int(n) for name, n in zip(leaves, sums, strict=True)}
