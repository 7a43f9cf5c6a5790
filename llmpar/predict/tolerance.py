"""Why two meshes differ in the fourth digit: the expected spread of loss, gradient norm and gradients.

A plan cuts sums into parts and adds these up in another order, and floats do not add up associatively. A sum
of k rounded additions is off by about sqrt(k) u, with u the unit roundoff of its dtype: signs of rounding
errors are as good as random (Higham 2002, section 2.8 and chapter 4). `docs/plan.md` has the other laws.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from llmpar.plan.mesh_shape import AXES
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Resolved

Unit = Literal["float32", "tf32", "bfloat16"]
UNIT = {"float32": 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: half of the distance from 1 to the next number. TF32 has 11 bits, with the hidden one."""
EIGHT_BITS = {"float8": 2.0**-4, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
"""The same of e4m3, in which weights may travel and matmuls multiply, and of e5m2, of incoming gradients."""
ROUNDING = 0.42 * math.sqrt(2)
"""Of the unit roundoff: the difference of two independent roundings, in root mean square."""
FACTOR = 8.0
"""Bound over expected: four standard deviations, where a law of this file is off by two."""
BLOCK = 32
"""XLA's tree of reductions adds up windows of this size (`TreeReductionRewriter`, on CPUs and GPUs)."""
ELEMENTWISE = 10
"""Roundings of a layer's values between its products: two norms, rotation, softmax, the nonlinearity."""
_PRODUCTS, _MATMULS = 6, 4
"""Products on a value's way through a layer: projections, scores, what they weigh, output, up, down; those
with a weight."""


@dataclass(frozen=True)
class _Term:
    """What one kind of sum or rounding adds to the spread; the last three are relative, root mean square."""

    name: str  # which sum
    by: str  # the axes, or fields of the plan, that cut it; "": compilers may order it anew for other shapes
    unit: Unit | Literal["float8", "float8_e5m2"]  # what is rounded to
    length: float  # roundings that add up at random, on the longest way through the model
    loss: float = 0.0
    grad_norm: float = 0.0
    gradient: float = 0.0  # of an element, by the largest of its leaf

    @property
    def spread(self) -> float:
        """What the roundings of `length` add up to."""
        return ROUNDING * (UNIT | EIGHT_BITS)[self.unit] * math.sqrt(self.length)


@dataclass(frozen=True)
class Tolerance:
    """The spread of a step under a plan, by term."""

    dtype: str
    products: Unit  # what accelerators round float32 operands of products to
    logits: float  # of the model that is trained (`tolerance`), as `loss`
    loss: float
    ties: float  # tokens that are expected to change an expert, over all layers
    terms: tuple[_Term, ...]

    def expected(self, what: str) -> float:
        """Root mean square of the relative difference in ``loss``, ``grad_norm`` or ``gradient``."""
        return math.sqrt(sum(getattr(term, what) ** 2 for term in self.terms))

    def bound(self, what: str, cap: float = 1.0) -> float:
        """`FACTOR` times the expected difference, and no more than ``cap``: at 1 nothing is promised."""
        return min(cap, FACTOR * self.expected(what))

    def document(self) -> dict:
        """Return the same as a JSON document: bounds, expected differences, terms."""
        each = lambda measure: {name: measure(name) for name in ("loss", "grad_norm", "gradient")}
        return asdict(self) | {
            "factor": FACTOR,
            "bound": each(self.bound),
            "expected": each(self.expected),
            "terms": [asdict(term) for term in self.terms],
        }


def tree(num_terms: float) -> float:
    """Additions in a row of a reduction to one number: `BLOCK` on each level of the tree."""
    levels = max(1, math.ceil(math.log(max(num_terms, 2), BLOCK)))
    return levels * min(num_terms, BLOCK)


def tolerance(
    plan: Resolved,
    batch_size: int,
    seq_len: int,
    products: Unit = "float32",
    logits: float = 2.0,
    loss: float = 2.0,
) -> Tolerance:
    """Derive the spread between a step under ``plan`` and the same step on one device, or on another mesh.

    ``logits`` is their root mean square and ``loss`` in nats per token: 2 and 2 in a trained model, about 0.5
    and log of the vocabulary in a fresh one. Noise of a logit moves a token's loss by 1 - p of its target,
    which is at most 1 and at most the loss. A plan that cuts the batch alone may do better by far.
    """
    config, tokens = plan.config.must_run(), batch_size * seq_len
    # axes as they are asked for, no inner parts
    plan = replace(plan, mesh=replace(plan.mesh, near=1, ul=1, kv=1))
    values = _values(config, plan, seq_len, products)
    moves = logits / max(1.0, loss)
    # on the way forward, and once more on the way back
    average, again = (1 / math.sqrt(tokens), math.sqrt(2))
    weigh: dict[str, Any] = {
        "loss": moves * average,
        "grad_norm": again * average,
        "gradient": again,
    }
    terms = [
        replace(x, **{name: x.spread * weight for name, weight in weigh.items()}) for x in values
    ]
    terms += [*_curvature(plan, values, moves * logits), *_weights(config, plan, tokens)]
    ties, part = _ties(config, values)
    if (ties := ties * tokens) >= 1:
        moved = part * math.sqrt(ties) / tokens
        element = part * math.sqrt(min(1.0, ties / tokens))
        terms.append(
            _Term("other experts chosen", "", plan.dtype, ties, moves * moved, moved, element)
        )
    return Tolerance(
        plan.dtype, products, logits, loss, ties, (*terms, *_totals(config, plan, tokens))
    )


def _values(config: ModelConfig, plan: Resolved, seq_len: int, products: Unit) -> list[_Term]:
    """Return what makes a token's last hidden value differ."""
    layers, tp, sp, ep = config.num_layers, plan.mesh.tp, plan.mesh.sp, plan.mesh.ep
    depth = _depth(config)
    inner = config.width + (config.num_heads * config.head_width + config.ffn_width) / 2
    keys = min(seq_len, config.window or seq_len)
    terms = [
        _Term("residual stream", "", plan.dtype, 2 * layers),
        _Term("between products", "", plan.dtype, depth * ELEMENTWISE),
        _Term("inner sums of products", "", "float32", depth * inner + config.width / 2),
        _Term("sums over keys", "sp" * (sp > 1), "float32", depth * (keys / 2 + sp - 1)),
    ]
    if tp > 1:  # of each branch every rank rounds its part, and then the parts are added
        terms.append(_Term("branches' sums over tp", "tp", plan.dtype, depth * 2 * (2 * tp - 1)))
    if experts := config.experts:
        ranks = min(experts.top_k, ep)
        unit: Unit = plan.dtype if ranks > 1 else "float32"
        terms.append(
            _Term("sums over experts", "ep" * (ep > 1), unit, depth * (experts.top_k + ranks - 1))
        )
    if products != "float32" and plan.dtype == "float32":
        terms.append(_Term("operands of products", "", products, depth * _PRODUCTS + 1))
    # one of the two programs rounds them, and each product has one of them
    if plan.gather_per and plan.gather_dtype != "same":
        terms.append(
            _Term(
                "weights as they travel",
                "gather_dtype",
                plan.gather_dtype,
                (depth * _PRODUCTS + 1) / 2,
            )
        )
    # the same, of both operands
    if plan.matmul_dtype != "same":
        terms.append(
            _Term("operands of matmuls", "matmul_dtype", plan.matmul_dtype, depth * _MATMULS)
        )
    return terms


def _curvature(plan: Resolved, values: list[_Term], scale: float) -> list[_Term]:
    """Noise raises a loss by half of its variance, in every token alike. Both programs have it, but for the
    roundings that come with the cut, which one of them has."""
    units = plan.dtype, plan.gather_dtype, plan.matmul_dtype
    added = [x for x in values if x.by and x.unit in units]
    bend = scale * sum(x.spread**2 for x in added) / 4
    by = ",".join(x.by for x in added)
    length = sum(x.length for x in added)
    return [_Term("noise that one lacks", by, plan.dtype, length, bend)] if added else []


def _weights(config: ModelConfig, plan: Resolved, tokens: int) -> list[_Term]:
    """Return what makes a weight's gradient differ, beside the values that it is made of."""
    copies, by = _cuts(plan, "microbatches")
    vectors = sum(math.prod(w.shape) for w in config.weights().values() if w.is_vector)
    terms = [
        (_Term("gradients' sums", by, "float32", tokens / 2 + copies - 1), 1.0),
        (
            _Term("sums of scales' gradients", by, plan.dtype, tokens / 2),
            vectors / config.num_params,
        ),
    ]
    # ZeRO 3 sends them in this dtype, as weights when they are gathered
    if plan.dtype != "float32":
        once = copies if plan.gather_per == "block" else 1
        terms.append((_Term("gradients", by, plan.dtype, once), 1.0))
    if plan.matmul_dtype != "same":
        length = (_depth(config) * _MATMULS + 1) / 2
        terms.append((_Term("incoming gradients", "matmul_dtype", "float8_e5m2", length), 1.0))
    if plan.reduce_dtype != "same":
        terms.append((_Term("gradients as they travel", "reduce_dtype", plan.reduce_dtype, 1), 1.0))
    return [
        replace(x, grad_norm=x.spread * math.sqrt(share / tokens), gradient=min(1.0, x.spread))
        for x, share in terms
    ]


def _totals(config: ModelConfig, plan: Resolved, tokens: int) -> list[_Term]:
    """Return the two numbers' own sums, always float32. The norm is a root, which halves an error."""
    parts, by = _cuts(plan, "microbatches", "loss_chunks")
    loss = _Term("sum of losses", by, "float32", tree(tokens) / 2 + parts - 1)
    length = tree(config.num_params) / 2 + plan.mesh.size - 1
    norm = _Term("sum of squares", ",".join(plan.mesh.live(*AXES)), "float32", length)
    return [replace(loss, loss=loss.spread), replace(norm, grad_norm=norm.spread / 2)]


def _ties(config: ModelConfig, values: list[_Term]) -> tuple[float, float]:
    """Return how many of its experts a token is expected to change, and by what part it differs where it
    does.

    The experts that it nearly chose are as near as E normal numbers lie in their tail: 0.3 E to a standard
    deviation. Two logits part by sqrt(2) of the noise, 0.8 of that in the mean, and on the way through the
    layers there is 2/3 of the noise. One of k experts differs then, in one of the stream's branches.
    """
    if (experts := config.experts) is None:
        return 0.0, 0.0
    noise = math.sqrt(sum(x.spread**2 for x in values)) * 2 / 3
    layers = config.num_layers
    part = math.sqrt(2 * _depth(config) / layers) / experts.top_k
    return 0.3 * 0.8 * math.sqrt(2) * experts.num_experts * noise * layers, part


def _depth(config: ModelConfig) -> float:
    """Return the part of the variance of a rounding in every attention, or feed-forward, that reaches the
    end. Where branches are normed before they are added, the embedding is small beside the first."""
    first = 1 if "ffn_post_norm.scale" in config.block_weights() else 2
    return sum(1 / i for i in range(first, 2 * config.num_layers + first)) / 2


def _cuts(plan: Resolved, *fields: str) -> tuple[int, str]:
    """Return into how many parts the plan cuts a sum over tokens, and by what."""
    sizes = {axis: plan.mesh.sizes[axis] for axis in plan.varying("data")}
    sizes |= {name: getattr(plan, name) for name in fields if getattr(plan, name) > 1}
    return math.prod(sizes.values()), ",".join(sizes)
