"""Refuse what a compiled step would take for another: a mesh, a used-up state, tokens of another
vocabulary."""

import weakref
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from llmpar.model.weights import Tree
from llmpar.plan.plan import Plan


def check_mesh(plan: Plan, mesh: Any) -> None:
    """Refuse what is no mesh, or another than the plan's, and weights that would not be float32."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh is {mesh!r:.60}, no jax.sharding.Mesh; use make_mesh(plan.mesh)")
    sizes = dict(mesh.shape)
    if sizes not in (plan.mesh.user_sizes, plan.mesh.sizes):
        has = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
        raise ValueError(
            f"the plan is for mesh '{plan.mesh}', and the mesh is {has}; use make_mesh(plan.mesh)"
        )
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("JAX_ENABLE_X64 is on, but master weights are float32; switch it off")


def check_alive(tree: Tree) -> None:
    """Refuse arrays whose memory was given away. On simulated devices the process would end at them."""
    for x in jax.tree.leaves(tree):
        if not isinstance(x, jax.core.Tracer) and getattr(x, "is_deleted", bool)():
            raise ValueError("this state was used up by the step before; keep the state that run returns")


def check_tokens(name: str, x: Any, vocab_size: int) -> None:
    """Refuse tokens, or targets, that are none of a vocabulary. A target below 0 does not count."""
    parts = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
    for part in map(np.asarray, parts):
        least, most = (int(part.min()), int(part.max())) if part.size else (0, 0)
        if not np.issubdtype(part.dtype, np.integer) or most >= vocab_size or name == "tokens" and least < 0:
            what = (
                f"{name} are {part.dtype} from {least:,} to {most:,}, and the vocabulary has {vocab_size:,}"
            )
            raise ValueError(f"{what}; use integers from 0 to {vocab_size - 1:,}, of this model's tokenizer")


class Checked:
    """A compiled function of a state (or weights) and a batch that refuses tokens outside the vocabulary and
    a state that is used up. It reads a batch back from its devices, once; ``compiled`` does not, and has no
    checks."""

    def __init__(self, compiled: Any, vocab_size: int):
        self.compiled = compiled
        self.vocab_size = vocab_size
        self._checked = list[weakref.ref]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)  # lower, trace

    def __call__(self, state: Any, batch: Any) -> Any:
        check_alive((state, batch))
        if isinstance(batch, dict):  # else JAX names what is missing
            self._check({name: batch[name] for name in ("tokens", "targets") if name in batch})
        return self.compiled(state, batch)

    def _check(self, batch: dict[str, Any]) -> None:
        arrays = [x for x in batch.values() if isinstance(x, jax.Array)]
        if arrays and [id(ref()) for ref in self._checked] == [*map(id, arrays)]:
            return
        self._checked = [*map(weakref.ref, arrays)]
        for name, x in batch.items():
            if not isinstance(x, jax.core.Tracer):
                check_tokens(name, x, self.vocab_size)
