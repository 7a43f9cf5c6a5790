"""What a layer's forward pass saves for its backward pass, and what is computed or gathered again.

`Plan.remat` and, at ZeRO 3, `Plan.reshard_after_forward` choose. Values are known by names, which
`jax.ad_checkpoint.checkpoint_name` gives them where they are computed.
"""

import functools
from collections.abc import Callable

import jax

from llmpar.parallel._jax import ATTENTION_KERNEL, OF_SHARDS, is_own_gather
from llmpar.parallel.collectives import WEIGHT
from llmpar.plan.plan import Resolved

PROJECTED, STREAM, HIDDEN = "projected", "stream", "hidden"
OUT, LSE = "attention_out", "attention_lse"
"""Names of values of a layer. How large each is, and what it would take to compute it again, in bfloat16 (2
bytes a number):

    name       value                         numbers a token  FLOPs to compute it again         saved by
    PROJECTED  queries, keys, values         n h + 2 k h      2 d (n h + 2 k h): d FLOPs a byte selective, ffn
    OUT, LSE   attention's result, log-sums  n h              attention itself, more than that  selective, ffn
    STREAM     the stream after attention    d                the matmul with o, and its sum    selective, ffn
    HIDDEN     gate and up                   2 m              4 d m: d FLOPs a byte             selective
    -          norms, RoPE, SwiGLU           d, n h, m        a few FLOPs a byte                never

With norms behind attention and feed-forward (`attention_post_norm`), STREAM is what goes into these norms.
"""
NAME_OF_REGION = {"attention": PROJECTED, "ffn": HIDDEN}
"""The name of the results of a region's first matmuls."""
SAVED = {"block": (), "ffn": (PROJECTED, STREAM, OUT, LSE)}
SAVED["selective"] = *SAVED["ffn"], HIDDEN
"""What a block's forward pass saves for its backward pass, by `Plan.remat`."""


def with_remat(plan: Resolved, block: Callable, no_loop: bool) -> Callable:
    """Return a block that saves for its backward pass what the plan says, and recomputes the rest.
    ``no_loop``: it is not the body of a loop over layers."""
    # at ZeRO 3: do gathered weights stay until the backward pass, or are they gathered again there?
    keep = plan.gather_per == "block" and not plan.reshard_after_forward
    # XLA would merge what is computed again with the forward pass; a loop forbids that, and where there
    # is no loop `prevent_cse` does.
    if plan.remat != "none":
        policy = functools.partial(_save_named, SAVED[plan.remat] + ((WEIGHT,) if keep else ()))
        return jax.checkpoint(block, policy=policy, prevent_cse=no_loop)
    if plan.gather_per == "block" and not keep:
        return jax.checkpoint(block, policy=_all_but_gathered_weights, prevent_cse=no_loop)
    return block


def _save_named(names: tuple[str, ...], prim, *_, **params) -> bool:
    """Save what has one of the names. JAX names nothing inside cuDNN's attention: in place of `OUT` its own
    results are saved."""
    if prim.name == ATTENTION_KERNEL:
        return OUT in names
    return prim.name == "name" and params["name"] in names


def _all_but_gathered_weights(prim, *_, **params) -> bool:
    """Save every result but gathered weights: the backward pass then repeats gathers, and no arithmetic. It
    is the policy of remat none at ZeRO 3.

    A weight's gathered value is known by its name (`WEIGHT`). The steps that make it have no names, and are
    known by their primitives (`OF_SHARDS`). Activations that are gathered are saved all the same: they pass
    such a primitive, too, but have a name of their own (`MOVED`)."""
    if prim.name == "name":
        return params["name"] != WEIGHT
    return not prim.name.startswith(OF_SHARDS) and not is_own_gather(prim.name, params)
