"""What one stage of a pipeline computes with one microbatch.

    embed       tokens -> stream             on the first stage
    run_chunk   stream -> stream             the stage's chunk of the blocks
    cell        both ways: all that F, B and W compute, in one function
    programs    the cell cut into F, B and W

The devices of a dp, fsdp, sp or tp group belong to one stage, so they take the same
branches, and their collectives may stay inside a `lax.cond`. The last norm and the head
are used on the last stage alone, the embedding on the first. With tied embeddings both
have its gradient; their sum over pp ends the step.

By default (`Plan.stage_saves`) B recomputes the stage from the input that F saved, and
F of the last stage computes nothing, since its B follows and does. With residuals saved
F keeps what B will need instead. In schedules that split the backward, W gets what is
left of B once the input's gradient is out. Both cuts are made by `split_backward` in
the equations of one traced cell, whatever the stage computes.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from llmpar.model.llama import Batch, Llama, Stream
from llmpar.model.weights import Tree, joined, model_graph, trainable_params, weights_tree
from llmpar.parallel.collectives import at, zeros_like
from llmpar.parallel.modes import Manual, Solo, chain
from llmpar.pipeline.split_backward import split_backward, trace
from llmpar.plan.model_config import ModelConfig, Weight
from llmpar.plan.places import chunk_loops


class StageModel(Llama):
    """A Llama cut open: its loss is that of a stream that comes with the batch from another stage."""

    def hidden_and_head(self, batch: Batch, par: Solo) -> tuple[Stream, Float[Array, "v d"], None]:
        head = par.weight(self.embedding if self.config.tied else self.head)
        return self.before_head(batch["stream"], par), head, None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stage:
    """A stage's inputs beside stream and gradients: weights, a microbatch, its part of the model."""

    config: ModelConfig = field(metadata={"static": True})
    par: Manual = field(metadata={"static": True})
    blocks: Tree  # of one chunk, with a leading dim of its layers
    shared: Tree  # embedding, last norm and head, which every stage has
    batch: Tree
    first: Any  # whether this chunk has the model's first layer
    last: Any  # whether it has the model's last layer
    filled: Any  # for each of its loops (`places.chunk_loops`), whether it has layers in it
    layers: Any  # for each place with experts, its layer's row in the tally; past the end where it is empty

    def model(self, **weights: Tree) -> StageModel:
        """Return the model with this stage's weights, or others in their place."""
        graph = model_graph(self.config, StageModel)
        return nnx.merge(graph, {"blocks": self.blocks, **self.shared, **weights})


def embed(stage: Stage, **weights: Array) -> Stream:
    """Return the stream that enters the first stage; with this ``embedding``, if one is given."""
    model = stage.model(**weights)
    return model.embed(stage.par.weight(model.embedding), stage.batch, stage.par)


def run_chunk(stage: Stage, blocks: Tree, x: Stream, kind: str) -> tuple[tuple[Stream, Any], Any]:
    """Run a stage's ``blocks`` in F or B, the ``kind``: ``(stream, sum of router losses), routers' tally``.
    The routers' part is for B alone, and None without experts.

    Chunks may have other layers. All have the same places; a branch (`when`) runs a loop that only some have
    layers for, or skips it, and the tally of layers that were skipped is zero."""
    plan = stage.par.plan
    assert (order := plan.pipeline)
    has_routers = stage.config.experts is not None and kind == "B"
    run = _unrolled if plan.stage_saves == "residuals" or order.split_backward else stage.par.layers

    def adding(block: Callable) -> Callable:
        """Return a block that adds up its router's losses, and gives its tally."""

        def layer(carry, weights):
            x, loss_bs = carry
            x, aux = block(x, weights)
            routed = has_routers and aux is not None
            return ((x, loss_bs + aux["loss"]), aux["tally"]) if routed else ((x, loss_bs), None)

        return layer

    def layers(blocks: Sequence[Callable], carry: Tree, stack: Tree, loop: int) -> tuple[Tree, Any]:
        run_loop = lambda carry, stack: run([adding(block) for block in blocks], carry, stack)
        if all(loops[loop].filled):
            return run_loop(carry, stack)
        tally = zeros_like(jax.eval_shape(run_loop, carry, stack)[1])
        run_those = lambda skipped, stack: run_loop(skipped[0], stack)
        return when(f"loop{loop}{kind}", stage.filled[loop], run_those, (carry, tally), stack)

    model, loops = stage.model(blocks=blocks), chunk_loops(stage.config.layer_kinds, order.cells)
    runs = [(loop, functools.partial(layers, loop=i)) for i, loop in enumerate(loops)]
    loss_bs = jnp.zeros_like(x[..., 0], jnp.float32) if has_routers else None
    (y, loss_bs), tally = model.run_blocks((x, loss_bs), stage.batch, stage.par, runs)
    loss = model.router_losses(loss_bs, stage.batch, stage.par).sum() if has_routers else None
    return (y, loss), tally


def _unrolled(blocks: Sequence[Callable], x: Any, stack: Tree) -> tuple[Any, Tree]:
    """Run layers one after the other, without a loop and without `remat.with_remat`: so every matmul is an
    equation to cut at."""
    outputs, run = list[Any](), chain(blocks)
    for i in range(jax.tree.leaves(stack)[0].shape[0]):
        x, more = run(x, at(stack, i))
        outputs += more
    return x, jax.tree.map(lambda *layers: jnp.stack(layers), *outputs) if outputs else None


# ------------------------------------------------------------------------------------------ forward, backward


def cell(
    stage: Stage, x: Stream, dy: Stream, sums: Tree
) -> tuple[Stream, tuple[tuple[Stream, Tree], Tree]]:
    """Compute all that a stage does for one microbatch, both ways, ``(y, ((dx, sums), d_blocks))``, from its
    input x, the gradient dy of its output and the sums over microbatches so far (the loss, the routers'
    tally, and the gradients of ``shared``). The last stage gets dy from the loss."""
    learned = trainable_params({"blocks": stage.blocks}, stage.config)["blocks"]
    run = lambda learned, x: run_chunk(stage, joined(stage.blocks, learned), x, "B")
    (y, router_loss), pull, tally = jax.vjp(run, learned, x, has_aux=True)
    # every stage adds its own routers' losses, and the tally of its own layers
    if router_loss is not None:
        tally = sums["tally"].at[stage.layers].add(tally, mode="drop")
        sums = sums | {"loss": sums["loss"] + router_loss, "tally": tally}
    dy, sums = when("leaves", stage.last, functools.partial(_from_loss, stage), (dy, sums), y)
    d_blocks, dx = pull((dy, jax.tree.map(jnp.ones_like, router_loss)))
    if "embedding" in sums:
        sums = when("enters", stage.first, functools.partial(_into_embedding, stage), sums, dx)
    return y, ((dx, sums), {"blocks": d_blocks})


def _from_loss(stage: Stage, dy_and_sums: tuple[Stream, Tree], y: Stream) -> tuple[Stream, Tree]:
    """On the last stage: return the gradient of the loss for dy, and the sums with the loss and its
    gradients."""
    _, sums = dy_and_sums
    names = "norm", "embedding" if stage.config.tied else "head"
    weights = {name: stage.shared[name] for name in names if name in sums}

    def loss(weights: Tree, y: Stream) -> Float[Array, ""]:
        model = stage.model(**weights)
        return model.cross_entropies(stage.batch | {"stream": y}, stage.par)[0].sum()

    value, (grads, dy) = jax.value_and_grad(loss, argnums=(0, 1))(weights, y)
    return dy, add(stage, sums, grads) | {"loss": sums["loss"] + value}


def _into_embedding(stage: Stage, sums: Tree, dx: Stream) -> Tree:
    """On the first stage: return the sums with the embedding's gradient."""
    pull = lambda w, dx: jax.vjp(lambda w: embed(stage, embedding=w), w)[1](dx)[0]
    # Traced, so that the look-up does not run again for its gradient.
    grad = trace(pull, w := stage.shared["embedding"], dx)(w, dx)
    return add(stage, sums, {"embedding": grad})


def add(stage: Stage, sums: Tree, grads: Tree) -> Tree:
    """Add gradients to the sums of the same name, at ZeRO 2 cut before that (`WeightLayouts.accumulate`)."""
    par, rows = stage.par, weights_tree(stage.config, trainable=True)

    def add_one(done: Array, g: Array, weight: Weight) -> Array:
        arrow = par.plan.layouts_of(weight.dims).accumulate
        return done + par.carry_out(g.astype(done.dtype), arrow)

    added = lambda name, g: jax.tree.map(add_one, sums[name], g, rows[name])
    return sums | {name: added(name, g) for name, g in grads.items()}


def programs(stage: Stage, x: Any, sums: Tree) -> tuple[dict[str, Callable], Any, Any]:
    """Cut `cell` into what F, B and W run, from the types of their arguments: ``{F, B, W}, saved, residual``,
    the last two as types.

        F keeps    backward   F(stage, x)      B(stage, saved, dy, sums)    W
        input      whole      y, x             (dx, sums), d_blocks         none
        input      split      y, x             (dx, sums), residual         (stage, residual) -> d_blocks
        residuals  whole      y, residuals     (dx, sums), d_blocks         none
        residuals  split      y, residuals     (dx, sums), residual         (stage, saved, residual) -> …

    Where F keeps its input, W does not get it: it would run the forward pass again.
    """
    plan = stage.par.plan
    assert plan.pipeline
    F: Callable = _forward
    shared: tuple = (stage,)
    args: tuple = x, x, sums  # the second is dy, of the type of x
    if plan.stage_saves == "residuals":
        F, backward, saved = split_backward(cell, shared, args[:1], args[1:])
        shared, args = (stage, saved), args[1:]
    else:
        backward, saved = trace(lambda *args: cell(*args)[1], stage, *args), x
    if not plan.pipeline.split_backward:
        return {"F": F, "B": backward}, saved, []
    B, W, residual = split_backward(backward, shared, args)
    return {"F": F, "B": B, "W": W}, saved, residual


def _forward(stage: Stage, x: Stream) -> tuple[Stream, Stream]:
    """F where B recomputes: keep its input, and on the last stage do nothing else."""
    run = lambda x: run_chunk(stage, stage.blocks, x, "F")[0][0]
    return when("leaves", stage.last, lambda x: x, x, otherwise=run), x


def when(name: str, condition: Any, do: Callable, x: Any, *args: Any, otherwise: Any = None) -> Any:
    """Return ``do(x, *args)``, or else ``x``: a `lax.cond` by whose name a census knows how often it is taken
    (`timetable.branch_shares`)."""
    with jax.named_scope(f"when-{name}"):
        return lax.cond(condition, do, otherwise or (lambda x, *_: x), x, *args)
