"""What one stage of a pipeline computes with one microbatch.

    embed      tokens -> stream              on the first stage
    through    stream -> stream              the stage's chunk of the blocks
    loss       stream -> loss                on the last stage
    cell       both ways: all that F, B and W compute, in one function
    programs   the cell cut into F, B and W

The devices of a dp, fsdp, sp or tp group belong to one stage, so they take the same branches, and their
collectives may stay inside a `lax.cond`. The last norm and the head are used on the last stage alone, the
embedding on the first. With tied embeddings both have its gradient; their sum over pp ends the step.

By default (`Plan.stage_saves`) B recomputes the stage from the input that F saved, and F of the last stage
computes nothing, since its B follows and does. With residuals saved F keeps what B will need instead. In
schedules that split the backward, W gets what is left of B once the input's gradient is out. Both cuts are
made by `split` in the equations of one traced cell, whatever the stage computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from llmpar.block import at
from llmpar.config import ModelConfig
from llmpar.model import Batch, Llama
from llmpar.par import Manual, Solo
from llmpar.split import split, trace
from llmpar.weights import Tree, weight_dims

Stream = Float[Array, "b s d"]


class StageModel(Llama):
    """A Llama cut open: its loss is that of a stream that comes with the batch, and the embedding is looked
    up on another stage."""

    def hidden_and_head(self, batch: Batch, par: Solo):
        head = par.weight(self.embedding if self.config.tied else self.head)
        return self.norm(batch["stream"], par), head, None


_graph = functools.cache(lambda config: nnx.split(nnx.eval_shape(lambda: StageModel(config, nnx.Rngs(0))))[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stage:
    """A stage's inputs besides activations and gradients: weights, the tokens of one microbatch, and which
    part of the model this is."""

    config: ModelConfig = field(metadata={"static": True})
    par: Manual = field(metadata={"static": True})
    blocks: Tree  # of one chunk, with a leading dim of its layers
    shared: Tree  # embedding, last norm and head, which every stage has
    batch: Tree
    first: Any  # whether this chunk has the model's first layer,
    last: Any  # its last layer,
    full: Any  # and as many layers as any;
    layers: Any  # their numbers in the model

    def model(self, **weights) -> StageModel:
        """The model with this stage's weights, or others in their place."""
        return nnx.merge(_graph(self.config), {"blocks": self.blocks, **self.shared, **weights})


def embed(stage: Stage, **weights) -> Stream:
    """The stream that enters the first stage; with this ``embedding``, if one is given."""
    model = stage.model(**weights)
    return model.embed(stage.par.weight(model.embedding), stage.batch, stage.par)


def through(stage: Stage, blocks: Tree, x: Stream, passes: str) -> tuple[tuple[Stream, Any], Any]:
    """The stream after the stage's ``blocks``: ``(y, sum of the routers' losses), tally of tokens per
    expert``. The routers' part is for B alone (``passes`` is F or B), and None without experts."""
    model, routed = stage.model(blocks=blocks), stage.config.experts is not None and passes == "B"
    layers = functools.partial(_run_layers, stage, passes, routed)
    y, (loss, tally) = model.run_blocks(x, stage.batch, stage.par, layers)
    return (y, model.router_losses(loss, stage.batch, stage.par).sum() if routed else None), tally


def _run_layers(stage: Stage, passes: str, routed: bool, block, x: Stream, stack: Tree):
    """Run ``block`` over the layers of a chunk: ``stream, (routers' losses b s, tally l e)``.

    Chunks may differ by one layer. All hold as many as the longest; a branch (`when`) runs the last one or
    skips it, and the tally of a layer that was skipped is zero.
    """
    plan = stage.par.plan
    assert (order := plan.pipeline)
    few, most = min(counts := order.layers(stage.config.num_layers).values()), max(counts)
    run = _unrolled if plan.stage_saves == "residuals" or order.split_backward else stage.par.layers

    def one(carry, weights):
        x, loss = carry
        x, aux = block(x, weights)
        return ((x, loss + aux["loss"]), aux["tally"]) if routed else ((x, None), None)

    def run_last(done, weights):
        carry, tally = done
        carry, of_last = run(one, carry, weights)
        return carry, jax.tree.map(lambda all, last: all.at[few:].set(last), tally, of_last)

    loss = jnp.zeros_like(x[..., 0], jnp.float32) if routed else None
    carry, tally = run(one, (x, loss), jax.tree.map(lambda w: w[:few], stack))
    if few < most:
        tally = jax.tree.map(lambda n: jnp.pad(n, ((0, most - few), (0, 0))), tally)
        last = jax.tree.map(lambda w: w[few:], stack)
        carry, tally = when(f"full{passes}", stage.full, run_last, (carry, tally), last)
    x, loss = carry
    return x, (loss, tally)


def _unrolled(block, x, stack):
    """As `Solo.layers`, layer by layer: every matmul is then an equation to cut at."""
    found = []
    for i in range(jax.tree.leaves(stack)[0].shape[0]):
        x, aux = block(x, at(stack, i))
        found.append(aux)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *found)


def loss(stage: Stage, weights: Tree, y: Stream) -> Float[Array, ""]:
    """The microbatch's loss, summed over its tokens here, from the stream after the last block. ``weights``
    are the last norm's and the head's."""
    return stage.model(**weights).cross_entropies(stage.batch | {"stream": y}, stage.par)[0].sum()


# ------------------------------------------------------------------------------------------ forward, backward


def cell(stage: Stage, x: Stream, dy: Stream, sums: Tree):
    """All that a stage computes for one microbatch, both ways.

    From its input x, the gradient dy of its output and the sums so far (the loss, the routers' tally, and the
    gradients of ``shared``): F's result, B's and W's, ``(y, ((dx, sums), d_blocks))``. The last stage gets dy
    from the loss.
    """
    run = functools.partial(through, stage, passes="B")
    (y, routed), pull, tally = jax.vjp(run, stage.blocks, x, has_aux=True)
    if routed is not None:  # every stage adds its own routers' losses, and the tally of its own layers
        tally = sums["tally"].at[stage.layers].add(tally, mode="drop")
        sums = sums | {"loss": sums["loss"] + routed, "tally": tally}
    dy, sums = when("leaves", stage.last, functools.partial(_from_loss, stage), (dy, sums), y)
    d_blocks, dx = pull((dy, jax.tree.map(jnp.ones_like, routed)))
    sums = when("enters", stage.first, functools.partial(_into_embedding, stage), sums, dx)
    return y, ((dx, sums), {"blocks": d_blocks})


def _from_loss(stage: Stage, dy_and_sums, y):
    _, sums = dy_and_sums
    weights = {name: stage.shared[name] for name in ("norm", "embedding" if stage.config.tied else "head")}
    value, (grads, dy) = jax.value_and_grad(functools.partial(loss, stage), argnums=(0, 1))(weights, y)
    return dy, add(stage, sums, grads) | {"loss": sums["loss"] + value}


def _into_embedding(stage: Stage, sums, dx):
    pull = lambda w, dx: jax.vjp(lambda w: embed(stage, embedding=w), w)[1](dx)[0]
    # Traced, so that the look-up does not run again for its gradient.
    grad = trace(pull, w := stage.shared["embedding"], dx)(w, dx)
    return add(stage, sums, {"embedding": grad})


def add(stage: Stage, sums: Tree, grads: Tree) -> Tree:
    """The sums with gradients added to those of the same name, at ZeRO 2 cut before that
    (`Life.accumulate`)."""
    move = lambda g, dims: stage.par.carry_out(g, stage.par.plan.life(dims).accumulate, f"gradient {dims}")
    one = lambda done, g, dims: done + move(g.astype(done.dtype), dims)
    dims = weight_dims(stage.config)
    return sums | {name: jax.tree.map(one, sums[name], g, dims[name]) for name, g in grads.items()}


def programs(stage: Stage, x: Any, sums: Tree) -> tuple[dict[str, Any], Any, Any]:
    """Cut `cell` into what F, B and W run, from the types of their arguments: ``{F, B, W}, saved, residual``,
    the last two as types.

        F keeps    backward   F(stage, x)      B(stage, saved, dy, sums)    W
        input      whole      y, x             (dx, sums), d_blocks         none
        input      split      y, x             (dx, sums), residual         (stage, residual) -> d_blocks
        residuals  whole      y, residuals     (dx, sums), d_blocks         none
        residuals  split      y, residuals     (dx, sums), residual         (stage, saved, residual) -> …

    Where F keeps its input, W is not given it: it would run the forward pass again.
    """
    plan, given = stage.par.plan, (x, sums)
    assert plan.pipeline
    halves = split if plan.pipeline.split_backward else lambda f, *_: (f, None, [])
    if plan.stage_saves == "residuals":
        F, backward, saved = split(cell, (stage,), (x,), given)
        B, W, residual = halves(backward, (stage, saved), given)
        return {"F": F, "B": B, "W": W}, saved, residual
    backward = trace(lambda *args: cell(*args)[1], stage, x, *given)
    B, W, residual = halves(backward, (stage,), (x, *given))
    return {"F": _forward, "B": B, "W": W}, x, residual


def _forward(stage: Stage, x: Stream) -> tuple[Stream, Stream]:
    """F where B recomputes: keeps its input, and on the last stage does nothing else."""
    run = lambda x: through(stage, stage.blocks, x, "F")[0][0]
    return when("leaves", stage.last, lambda x: x, x, otherwise=run), x


def when(name: str, condition, do, x, *args, otherwise=lambda x, *_: x):
    """``do(x, *args)``, or else ``x`` as it is: a `lax.cond` with a name by which a census finds how often it
    is taken (`timetable.branch_shares`)."""
    with jax.named_scope(f"when-{name}"):
        return lax.cond(condition, do, otherwise, x, *args)
