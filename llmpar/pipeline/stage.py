"""What one stage of a pipeline computes with one microbatch.

    embed       tokens -> stream             on the first stage
    run_chunk   stream -> stream             the stage's chunk of the blocks
    loss        stream -> loss               on the last stage
    cell        both ways: all that F, B and W compute, in one function
    programs    the cell cut into F, B and W

The devices of a dp, fsdp, sp or tp group belong to one stage, so they take the same branches, and their
collectives may stay inside a `lax.cond`. The last norm and the head are used on the last stage alone, the
embedding on the first. With tied embeddings both have its gradient; their sum over pp ends the step.

By default (`Plan.stage_saves`) B recomputes the stage from the input that F saved, and F of the last stage
computes nothing, since its B follows and does. With residuals saved F keeps what B will need instead. In
schedules that split the backward, W gets what is left of B once the input's gradient is out. Both cuts are
made by `split` in the equations of one traced cell, whatever the stage computes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from llmpar.model.llama import Batch, Llama, Stream
from llmpar.model.weights import Tree, joined, model_graph, trained, weight_dims
from llmpar.parallel.collectives import at
from llmpar.parallel.modes import Manual, Solo
from llmpar.pipeline.split_backward import split, trace
from llmpar.plan.model_config import ModelConfig


class StageModel(Llama):
    """A Llama cut open: its loss is that of a stream that comes with the batch from another stage."""

    def hidden_and_head(self, batch: Batch, par: Solo) -> tuple[Stream, Float[Array, "v d"], None]:
        head = par.weight(self.embedding if self.config.tied else self.head)
        return self.norm(batch["stream"], par), head, None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stage:
    """A stage's inputs beside stream and gradients: weights, a microbatch, its part of the model."""

    config: ModelConfig = field(metadata={"static": True})
    par: Manual = field(metadata={"static": True})
    blocks: Tree  # of one chunk, with a leading dim of its layers
    shared: Tree  # embedding, last norm and head, which every stage has
    batch: Tree
    first: Any  # whether this chunk has the model's first layer,
    last: Any  # its last layer,
    full: Any  # and as many layers as the longest chunk;
    layers: Any  # their numbers in the model

    def model(self, **weights: Tree) -> StageModel:
        """The model with this stage's weights, or others in their place."""
        graph = model_graph(self.config, StageModel)
        return nnx.merge(graph, {"blocks": self.blocks, **self.shared, **weights})


def embed(stage: Stage, **weights: Array) -> Stream:
    """The stream that enters the first stage; with this ``embedding``, if one is given."""
    model = stage.model(**weights)
    return model.embed(stage.par.weight(model.embedding), stage.batch, stage.par)


def run_chunk(stage: Stage, blocks: Tree, x: Stream, kind: str) -> tuple[tuple[Stream, Any], Any]:
    """Run a stage's ``blocks`` in F or B, the ``kind``: ``(stream, sum of router losses), router tally``. The
    routers' part is for B alone, and None without experts."""
    model, has_routers = stage.model(blocks=blocks), stage.config.experts is not None and kind == "B"
    layers = functools.partial(_run_layers, stage, kind, has_routers)
    y, (loss_bs, tally_le) = model.run_blocks(x, stage.batch, stage.par, layers)
    loss = model.router_losses(loss_bs, stage.batch, stage.par).sum() if has_routers else None
    return (y, loss), tally_le


def _run_layers(stage: Stage, kind: str, has_routers: bool, block: Callable, x: Stream, stack: Tree) -> Any:
    """Run ``block`` over the layers of a chunk: ``stream, (routers' losses b s, tally l e)``.

    Chunks may differ by one layer. All hold as many as the longest; a branch (`when`) runs the last one or
    skips it, and the tally of a layer that was skipped is zero."""
    plan = stage.par.plan
    assert (order := plan.pipeline)
    counts = order.layers(stage.config.num_layers).values()
    few, most = min(counts), max(counts)
    run = _unrolled if plan.stage_saves == "residuals" or order.split_backward else stage.par.layers

    def one_layer(carry, weights):
        x, loss_bs = carry
        x, aux = block(x, weights)
        return ((x, loss_bs + aux["loss"]), aux["tally"]) if has_routers else ((x, None), None)

    def last_layer(before, weights):
        return run(one_layer, before[0], weights)

    loss_bs = jnp.zeros_like(x[..., 0], jnp.float32) if has_routers else None
    carry, tally_le = run(one_layer, (x, loss_bs), jax.tree.map(lambda w: w[:few], stack))
    if few < most:
        skipped = carry, jax.tree.map(lambda n: jnp.zeros_like(n[:1]), tally_le)
        last = jax.tree.map(lambda w: w[few:], stack)
        carry, tally_1e = when(f"full{kind}", stage.full, last_layer, skipped, last)
        tally_le = jax.tree.map(lambda *parts: jnp.concatenate(parts), tally_le, tally_1e)
    x, loss_bs = carry
    return x, (loss_bs, tally_le)


def _unrolled(block: Callable, x: Any, stack: Tree) -> tuple[Any, Tree]:
    """As `Solo.layers`, layer by layer: every matmul is then an equation to cut at."""
    outputs = []
    for i in range(jax.tree.leaves(stack)[0].shape[0]):
        x, aux = block(x, at(stack, i))
        outputs.append(aux)
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)


def loss(stage: Stage, weights: Tree, y: Stream) -> Float[Array, ""]:
    """The microbatch's loss, summed over tokens, of the last block's stream and the last norm and head."""
    return stage.model(**weights).cross_entropies(stage.batch | {"stream": y}, stage.par)[0].sum()


# ------------------------------------------------------------------------------------------ forward, backward


def cell(stage: Stage, x: Stream, dy: Stream, sums: Tree) -> tuple[Stream, tuple[tuple[Stream, Tree], Tree]]:
    """All that a stage computes for one microbatch, both ways.

    From its input x, the gradient dy of its output and the sums so far (the loss, the routers' tally, and the
    gradients of ``shared``): F's result, B's and W's, ``(y, ((dx, sums), d_blocks))``. The last stage gets dy
    from the loss."""
    learned = trained({"blocks": stage.blocks}, stage.config)["blocks"]
    run = lambda learned, x: run_chunk(stage, joined(stage.blocks, learned), x, "B")
    (y, router_loss), pull, tally = jax.vjp(run, learned, x, has_aux=True)
    if router_loss is not None:  # every stage adds its own routers' losses, and the tally of its own layers
        tally = sums["tally"].at[stage.layers].add(tally, mode="drop")
        sums = sums | {"loss": sums["loss"] + router_loss, "tally": tally}
    dy, sums = when("leaves", stage.last, functools.partial(_from_loss, stage), (dy, sums), y)
    d_blocks, dx = pull((dy, jax.tree.map(jnp.ones_like, router_loss)))
    if "embedding" in sums:
        sums = when("enters", stage.first, functools.partial(_into_embedding, stage), sums, dx)
    return y, ((dx, sums), {"blocks": d_blocks})


def _from_loss(stage: Stage, dy_and_sums: tuple[Stream, Tree], y: Stream) -> tuple[Stream, Tree]:
    """On the last stage: the gradient of the loss for dy, and the sums with the loss and its gradients."""
    _, sums = dy_and_sums
    names = "norm", "embedding" if stage.config.tied else "head"
    weights = {name: stage.shared[name] for name in names if name in sums}
    value, (grads, dy) = jax.value_and_grad(functools.partial(loss, stage), argnums=(0, 1))(weights, y)
    return dy, add(stage, sums, grads) | {"loss": sums["loss"] + value}


def _into_embedding(stage: Stage, sums: Tree, dx: Stream) -> Tree:
    """On the first stage: the sums with the embedding's gradient."""
    pull = lambda w, dx: jax.vjp(lambda w: embed(stage, embedding=w), w)[1](dx)[0]
    # Traced, so that the look-up does not run again for its gradient.
    grad = trace(pull, w := stage.shared["embedding"], dx)(w, dx)
    return add(stage, sums, {"embedding": grad})


def add(stage: Stage, sums: Tree, grads: Tree) -> Tree:
    """Add gradients to the sums of the same name, at ZeRO 2 cut before that (`WeightLayouts.accumulate`)."""
    par, dims = stage.par, trained(weight_dims(stage.config), stage.config)
    move = lambda g, dims: par.carry_out(g, par.plan.layouts_of(dims).accumulate, f"gradient {dims}")
    add_one = lambda done, g, dims: done + move(g.astype(done.dtype), dims)
    return sums | {name: jax.tree.map(add_one, sums[name], g, dims[name]) for name, g in grads.items()}


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
    plan = stage.par.plan
    given: tuple = x, sums  # the first is dy, of the type of x
    assert plan.pipeline
    F: Callable
    known: tuple
    if plan.stage_saves == "residuals":
        F, backward, saved = split(cell, (stage,), (x,), given)
        known = stage, saved
    else:
        F, backward, saved = _forward, trace(lambda *args: cell(*args)[1], stage, x, *given), x
        known, given = (stage,), (x, *given)
    if not plan.pipeline.split_backward:
        return {"F": F, "B": backward, "W": None}, saved, []
    B, W, residual = split(backward, known, given)
    return {"F": F, "B": B, "W": W}, saved, residual


def _forward(stage: Stage, x: Stream) -> tuple[Stream, Stream]:
    """F where B recomputes: keeps its input, and on the last stage does nothing else."""
    run = lambda x: run_chunk(stage, stage.blocks, x, "F")[0][0]
    return when("leaves", stage.last, lambda x: x, x, otherwise=run), x


def when(name: str, condition: Any, do: Callable, x: Any, *args: Any, otherwise: Any = None) -> Any:
    """``do(x, *args)``, or else ``x``: a `lax.cond` whose name tells a census how often it is taken
    (`timetable.branch_shares`)."""
    with jax.named_scope(f"when-{name}"):
        return lax.cond(condition, do, otherwise or (lambda x, *_: x), x, *args)
