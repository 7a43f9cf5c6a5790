"""The published formulas: memory, bytes moved, time on links, and the thresholds that follow from them.

Plain arithmetic on numbers, each with its formula, unit and source. What *our* train step costs is predicted
elsewhere from a `Plan`. Unless a name says bytes, volumes are elements. A `group` is the devices that take
part. Book = Austin et al., How to Scale Your Model, 2025.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from llmpar.predict.hardware import Chip


def zero_bytes(
    params: float,
    devices: float,
    stage: int,
    param_bytes: float = 2,
    grad_bytes: float = 2,
    optim_bytes: float = 12,
) -> float:
    """Return the bytes of model state per device: stage 0 (P+G+K)Ψ, 1 (P+G)Ψ + KΨ/N, 2 PΨ + (G+K)Ψ/N, 3 all
    over N.

    Rajbhandari et al. 2020 (ZeRO), section 5, table 1; K = 12 for Adam in mixed precision. The bytes differ
    elsewhere: fp32 training is 4, 4, 8, and gradients accumulated in fp32 add 4 to `grad_bytes`.
    """
    sizes = [param_bytes, grad_bytes, optim_bytes]
    cut = {0: (), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}[stage]
    return params * sum(b / devices if i in cut else b for i, b in enumerate(sizes))


def gpt_activation_bytes(
    b: float,
    s: float,
    h: float,
    heads: float,
    tp: float = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return the bytes one GPT layer keeps for its backward in 16 bits: sbh(10 + 24/t + 5as/ht); SP sbh/t(34
    + 5as/h).

    Korthikanti et al. 2022, eqs. 1, 2, 4, table 2. `recompute="selective"` drops 5as/h, "block" keeps 2sbh.
    For the block with dropout, GELU and attention that stores its scores: not our model.
    """
    if recompute in ("block", "full"):  # our name, and the paper's
        return 2 * s * b * h
    whole, cut = (0, 34) if sequence_parallel else (10, 24)
    scores = {"none": 5 * heads * s / h, "selective": 0}[recompute]
    return s * b * h * (whole + (cut + scores) / tp)


def train_seconds(
    params: float,
    tokens: float,
    devices: float,
    reached_flops_per_s: float,
    flops_per_param_token: float = 6,
) -> float:
    """Return 6PT/(nX), or 8PT/(nX) with full recomputation (Narayanan et al. 2021, eq. 4); attention not
    counted."""
    return flops_per_param_token * params * tokens / (devices * reached_flops_per_s)


# ---------------------------------------------------------------- one collective: bytes sent, and time


def ring_share(kind: str, group: int) -> Fraction:
    """Return how much of one collective's message each of ``group`` devices sends on a ring: all but one
    piece, (g-1)/g; twice that for an all-reduce, a reduce-scatter and an all-gather; all to permute, to send,
    and to broadcast (the first of them, and all but the last after it); 0 to `vary`.

    The message is the whole: the gathered result, the unreduced input, the local buffer that all exchange.
    """
    if kind in ("permute", "collective-permute", "collective-broadcast", "send"):
        return Fraction(group > 1)
    laps = {"all-reduce": 2, "maximum": 2, "vary": 0}.get(kind, 1)
    return Fraction(laps * (group - 1), group)


def whole_ring_bytes(kind: str, message_bytes: int, group: int) -> int:
    """`ring_share` of a message in whole bytes. Where ``group`` does not divide the message its pieces
    differ, and so does what the devices send. Their mean is exact; a part of a byte counts as one."""
    return math.ceil(message_bytes * ring_share(kind, group))


COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute")


def sent_bytes(kind: str, message_bytes: float, group: int) -> float:
    """Return the bytes each device sends in a ring of the *message* V: V(g-1)/g, all-reduce twice that,
    permute V."""
    assert kind in COLLECTIVES, kind
    return message_bytes * float(ring_share(kind, group))


def sent_bytes_of_result(kind: str, result_bytes: float, group: int) -> float:
    """Return the same from the *result* that HLO prints, which differs for reduce-scatter alone: it is a
    shard."""
    return sent_bytes(kind, result_bytes * (group if kind == "reduce-scatter" else 1), group)


def torus_seconds(
    kind: str,
    message_bytes: float,
    shape: Sequence[int],
    link_bytes_per_s: float,
    wrap: bool = True,
    hop_s: float = 0.0,
) -> float:
    """Return the seconds on a torus over axes of sizes `shape`, with one-way `link_bytes_per_s` (Book,
    sharding).

    All-gather and reduce-scatter V/(2 W axes), without (g-1)/g as the book has it; on lines that do not wrap
    V (g-1)/g / (W axes). All-reduce twice. All-to-all: half of the data crosses the middle of the longest
    axis, on one axis a quarter of gathering the whole array (g local buffers). At least `hop_s` a hop.
    """
    assert kind in COLLECTIVES, kind
    group, links, laps = math.prod(shape), 2 if wrap else 1, 2 if kind == "all-reduce" else 1
    if group == 1:
        return 0.0
    if kind == "permute":
        return message_bytes / link_bytes_per_s + hop_s
    if kind == "all-to-all":
        seconds = message_bytes * max(shape) / (4 * links * link_bytes_per_s)
    else:
        share = 1 if wrap else (group - 1) / group
        seconds = laps * message_bytes * share / (links * link_bytes_per_s * len(shape))
    return max(seconds, hop_s * laps * sum(n // 2 if wrap else n - 1 for n in shape))


def switch_seconds(kind: str, message_bytes: float, group: int, egress_bytes_per_s: float) -> float:
    """Return the seconds below one switch: what a device sends over what it can send, V(g-1)/(g W) (Book,
    GPUs)."""
    return sent_bytes(kind, message_bytes, group) / egress_bytes_per_s


def level_bytes_per_s(levels: Sequence[tuple[float, float]]) -> list[float]:
    """Collective bandwidth W D/(D-1) of each level, (children, egress of a child), of a tree (Book, GPUs)."""
    return [
        math.inf if degree == 1 else egress * degree / (degree - 1) for degree, egress in levels
    ]


def tree_level_seconds(
    kind: str, message_bytes: float, levels: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the seconds on each level of a tree of switches, from the inside: the slowest hides the others.

    All-gather V max (D-1)/(D W) (Book, GPUs); all-reduce twice. An all-to-all does not shrink on its way up:
    the S devices below a child send S local (1 - S/g) out of it. A permute may send all of them at once.
    """
    group = math.prod(degree for degree, _ in levels)
    if kind in ("all-gather", "reduce-scatter", "all-reduce"):
        laps = 2 if kind == "all-reduce" else 1
        return [laps * message_bytes / rate for rate in level_bytes_per_s(levels)]
    assert kind in COLLECTIVES, kind
    seconds, below = [], 1.0
    for degree, egress in levels:
        leaving = 1 if kind == "permute" else 1 - below / group
        seconds.append(message_bytes * below * leaving / egress if degree > 1 else 0.0)
        below *= degree
    return seconds


class Level(NamedTuple):
    """Links that a collective crosses: where they are, the bytes that a device, or beyond a node all of its
    devices together, send over them in a second, and the seconds of the collective on them alone."""

    where: str
    bytes_per_s: float
    seconds: float


def level_seconds(
    chip: Chip, kind: str, message_bytes: float, group: int, inner: float = 1, axes: int = 0
) -> list[Level]:
    """Return what a collective over `group` devices, `inner` apart in link order, takes on each level of its
    links, fast ones first: the slowest decides.

    A switch: inside a node its egress, beyond it a tree whose upper ports are shared with the `inner`
    neighbours that do the same. A torus: rings along so many ``axes``, or one axis of that length, which
    closes where the chip's do; beyond the largest slice the data centre's network. Cores of one chip share
    its links, and reach each other through its memory.
    """
    share = chip.per_device()
    if chip.link == "torus" and group * inner <= share.node_size:
        members = min(group, max(1, chip.devices_per_chip // inner))
        size = math.ceil(group / members)
        if size == 1:
            rate = share.hbm_bytes_per_s
            return [Level("inside a chip", rate, switch_seconds(kind, message_bytes, group, rate))]
        rate = share.reached_link_bytes_per_s * members
        message_bytes *= members if kind == "all-to-all" else 1
        sides = (max(2, round(size ** (1 / axes))),) * axes if axes else (size,)
        wrap = bool(axes) or chip.wraps(size)
        return [
            Level(
                "a torus link",
                rate,
                torus_seconds(kind, message_bytes, sides, rate, wrap, chip.hop_s),
            )
        ]
    near = max(1, int(share.node_size // inner))
    if group < near:  # in nodes that it does not divide, some groups are in two
        near = math.gcd(group, near)
    rate = share.reached_link_bytes_per_s * (2 * chip.num_axes if chip.link == "torus" else 1)
    levels = [(near, rate), (math.ceil(group / near), near * share.dcn_bytes_per_s)]
    took, where = (
        tree_level_seconds(kind, message_bytes, levels),
        "slice" if chip.link == "torus" else "node",
    )
    names = f"inside a {where}", f"between {where}s"
    rows = [
        (Level(n, rate, s), parts) for n, (parts, rate), s in zip(names, levels, took, strict=True)
    ]
    return [level for level, parts in rows if parts > 1] or [rows[0][0]]


def collective_seconds(
    chip: Chip, kind: str, message_bytes: float, group: int, inner: float = 1, axes: int = 0
) -> float:
    """Return the seconds of a collective: those of the slowest of its `level_seconds`."""
    return max(
        level.seconds for level in level_seconds(chip, kind, message_bytes, group, inner, axes)
    )


# ---------------------------------------------------------------- what a strategy moves, per device and step


def zero_elements(
    params: float, stage: int, accumulation: float = 1, devices: float = math.inf
) -> float:
    """Elements sent for gradients and weights: 2, 2, a+1 and 3a Ψ for stages 0 to 3, times (N-1)/N.

    ZeRO, section 7, for a = 1. Over a accumulation steps stages 0 and 1 reduce once, stage 2 scatters its
    gradients every time, and stage 3 gathers twice and scatters once every time.
    """
    lap = 1 if devices == math.inf else (devices - 1) / devices
    return params * {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}[stage] * lap


def tp_elements(b: float, s: float, d: float, tp: float, layers: float = 1) -> float:
    """8 b s d (t-1)/t a layer: two all-reduces each way (Narayanan et al. 2021, 3.2); as much with SP."""
    return 8 * layers * b * s * d * (tp - 1) / tp


def pp_elements(b: float, s: float, d: float, microbatches: float = 1, chunks: float = 1) -> float:
    """2 b s d for each microbatch and hop, activation and gradient, times the chunks v of a stage."""
    return 2 * b * s * d * microbatches * chunks


def ring_elements(
    b: float, s: float, kv_heads: float, head_dim: float, sp: float
) -> tuple[float, float]:
    """Forward and backward of one layer's ring attention: n-1 hops of K and V; the same back, and n hops of
    dK and dV, which come home. Liu et al. 2023, section 3, counts n of all; the last K and V are unused."""
    block = b * s // sp * kv_heads * head_dim
    return 2 * (sp - 1) * block, (2 * (sp - 1) + 2 * sp * (sp > 1)) * block


def moe_elements(tokens: float, d: float, topk: float, ep: float) -> float:
    """2 k tokens d (EP-1)/EP: dispatch and combine of one layer forward, for the device's tokens; the same
    backward. One expert in EP is on the token's own rank."""
    return 2 * topk * tokens * d * (1 - 1 / ep)


def visited_share(experts: int, topk: int, ep: int) -> float:
    """Return the share of tokens that have one of their k experts on a given one of EP ranks, if all experts
    are equally likely: 1 - C(E - E/EP, k) / C(E, k)."""
    return 1 - math.comb(experts - experts // ep, topk) / math.comb(experts, topk)


def expert_capacity(tokens: float, experts: float, factor: float, topk: float = 1) -> float:
    """Slots for each expert: k tokens factor / experts, rounded up (Fedus et al. 2021, eq. 3)."""
    return math.ceil(round(topk * tokens * factor / experts, 9))  # 9 digits: 1.1 * 1000 is not 1101


def copies(mesh_axes: Mapping[str, int], cut_axes: Collection[str]) -> float:
    """Copies of an array that a mesh holds: the product of the axes that do not cut it (Book, sharding)."""
    return math.prod(size for axis, size in mesh_axes.items() if axis not in cut_axes)


# ---------------------------------------------------------------- thresholds


def critical_batch(
    flops_per_s: float,
    hbm_bytes_per_s: float,
    weight_bytes: float = 2,
    experts: float = 1,
    topk: float = 1,
) -> float:
    """Return the tokens above which x[B,d] @ w[d,f] is compute-bound for large d and f: (E/k) bytes C/2W
    (Book)."""
    return experts / topk * weight_bytes * flops_per_s / (2 * hbm_bytes_per_s)


def dp_min_tokens(
    flops_per_s: float, bytes_per_s: float, experts: float = 1, topk: float = 1
) -> float:
    """Return the tokens per chip above which DP or FSDP hides: (E/k) C/W, W all that leaves a chip (Book,
    training)."""
    return experts / topk * flops_per_s / bytes_per_s


def tp_max_degree(ffn: float, flops_per_s: float, bytes_per_s: float) -> float:
    """Return the largest TP degree that hides its bf16 communication: F W/C, W of all its axes (Book,
    training)."""
    return ffn * bytes_per_s / flops_per_s


def ring_min_block(flops_per_s: float, link_bytes_per_s: float, kv_ratio: float = 1.0) -> float:
    """Return the tokens per block above which ring attention hides its hops: C/W, times kv_heads/heads with
    GQA.

    Liu et al. 2023, table 2, where the least sequence per device is six blocks. A causal mask doubles it.
    """
    return flops_per_s / link_bytes_per_s * kv_ratio
