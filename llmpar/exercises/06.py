"""Exercises of lesson 06: what travels around a ring, who holds which positions, and when heads are the
better cut."""

import numpy as np
from jax import lax

from llmpar.exercises import Exercise
from llmpar.exercises.spread import carried_out


def ring_bytes(devices: int = 8, seq: int = 256, kv_heads: int = 2, head_width: int = 16) -> Exercise:
    """Ask how many bytes of keys and values a device sends in the toy's forward ring, in float32."""
    hop = 2 * seq / devices * kv_heads * head_width * 4
    return Exercise(
        level="core",
        solution=(devices - 1) * hop,
        wrong=[
            (
                devices * hop,
                (
                    "The last hop would bring everybody's own keys back, which nobody needs: N devices, N-1"
                    " hops."
                ),
            ),
            ((devices - 1) * hop / 2, "Count again what is handed on: keys, and values."),
            (hop, "That is one hop. A block must pass every other device."),
            (
                2 * (devices - 1) * hop,
                "The 4 query heads stay at home; only the 2 heads of keys and values travel.",
            ),
            ((devices - 1) * hop / 4, "That is the number of elements; a float32 has 4 bytes."),
            (
                8 * (devices - 1) * hop,
                "That moves whole sequences: a device hands on S/N positions at a time.",
            ),
            (
                2 * devices * hop,
                (
                    "Two things: the 4 query heads stay at home, and after N-1 hops every block has been"
                    " everywhere."
                ),
            ),
        ],
        hint=(
            "A hop hands on K and V of S/n positions, each position with 2 heads of 16 numbers. How many hops"
            " are there?"
        ),
        unit="bytes",
        nudges=["What does one hop hand on, and how many hops are there?"],
        because=(
            "K and V of a device's own positions, N-1 times: after N-1 hops every block has been everywhere."
        ),
    )


def hop_bytes(
    tokens: int = 131_072, devices: int = 8, heads: int = 32, kv_heads: int = 8, head_width: int = 128
) -> Exercise:
    """Ask for the bytes of one hop of Llama 3 8B at 128k positions over sp=8 in bfloat16, K and V of one
    layer."""
    right = 2 * (tokens // devices) * kv_heads * head_width * 2
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                right * heads // kv_heads,
                (
                    "You sent all 32 query heads' worth. Four query heads share one KV head, and KV heads"
                    " travel."
                ),
            ),
            (right // 2, "Two things travel: keys, and values."),
            (right * 2, "That is float32; a bfloat16 has 2 bytes."),
            (right * devices, "That is the whole sequence. A device holds, and hands on, an eighth of it."),
            (right * (devices - 1), "That is the whole turn of the ring, all 7 hops. One hop was asked for."),
            (right * 32, "That is one hop in each of the 32 layers. One layer was asked for."),
            (right // 4, "Count both, keys and values, in two bytes each: this is one of them in one byte."),
        ],
        hint="2 (K and V) × positions per device × KV heads × head width × bytes per number.",
        tolerance=0.01,  # 67.1e6 is fine
        unit="bytes",
        nudges=["Which heads travel, for how many positions, and in how many bytes per number?"],
        because=(
            "2 × 16,384 positions × 8 KV heads × 128 × 2 bytes: K and V of the positions of one device, in"
            " one layer."
        ),
    )


def zigzag() -> Exercise:
    """Ask for the permutation that deals s positions to ranks so that causal work is even."""

    def parts(s, n):
        return np.arange(s).reshape(2 * n, -1)

    def solution(s, ranks):
        cut = np.arange(s).reshape(2 * ranks, -1)
        pairs = [[cut[i], cut[2 * ranks - 1 - i]] for i in range(ranks)]
        return np.concatenate([np.concatenate(pair) for pair in pairs])

    def contiguous(s, n):
        return np.arange(s)

    def striped(s, n):
        return np.arange(s).reshape(-1, n).T.ravel()

    def not_mirrored(s, n):
        cut = parts(s, n)
        return np.concatenate([np.concatenate([cut[i], cut[n + i]]) for i in range(n)])

    def read_backwards(s, n):
        cut = parts(s, n)
        return np.concatenate([np.concatenate([cut[i], cut[2 * n - 1 - i][::-1]]) for i in range(n)])

    def inverse(s, n):
        return np.argsort(solution(s, n))

    def late_first(s, n):
        cut = parts(s, n)
        return np.concatenate([np.concatenate([cut[2 * n - 1 - i], cut[i]]) for i in range(n)])

    return Exercise(
        level="stretch",
        solution=solution,
        observe=lambda function: [
            np.asarray(function(s, n)).tolist() for s, n in ((24, 4), (24, 2), (18, 3))
        ],
        wrong=[
            (
                contiguous,
                "That is the contiguous order: the last rank has all the late positions, which see the most.",
            ),
            (
                striped,
                (
                    "That is the striped order. It is balanced too, but zigzag deals two whole parts to each"
                    " rank."
                ),
            ),
            (
                not_mirrored,
                (
                    "Rank i has parts i and N+i: both grow with i. Its second part must be the later the"
                    " earlier its first is."
                ),
            ),
            (
                read_backwards,
                (
                    "The right parts, but inside a part the positions still rise: only the parts' order is"
                    " mirrored."
                ),
            ),
            (
                inverse,
                (
                    "That says where each position goes. What lies where was asked for: apply np.argsort once"
                    " more."
                ),
            ),
            (late_first, "The right parts for each rank, the later one first. Put the earlier part first."),
            (
                lambda s, ranks: np.arange(s)[::-1],
                "Backwards is still in order: now the first rank has all the late positions.",
            ),
            (
                lambda s, ranks: np.concatenate([np.arange(s)[::2], np.arange(s)[1::2][::-1]]),
                "Cut into 2N parts of neighbours first; you deal single positions.",
            ),
        ],
        hint="Cut the positions into 2N parts. Rank i gets part i, then part 2N-1-i.",
        nudges=["In causal attention, how much work has a position that is early, and one that is late?"],
        because=(
            "Part i and part 2N-1-i together have the same causal work for every i: what the one lacks the"
            " other has."
        ),
    )


def to_heads(devices: int = 4, own: int = 3, heads: int = 8, width: int = 4) -> Exercise:
    """Ask for the exchange of Ulysses, positions for heads, as one device writes it."""
    x = np.random.default_rng(0).standard_normal((devices, own, heads, width)).astype(np.float32)

    def solution(x):
        return lax.all_to_all(x, "sp", split_axis=1, concat_axis=0, tiled=True)

    def gathered(x):
        mine = x.shape[1] // lax.axis_size("sp")
        everything = lax.all_gather(x, "sp", axis=0, tiled=True)
        return lax.dynamic_slice_in_dim(everything, lax.axis_index("sp") * mine, mine, 1)

    def reshaped(x):
        return x.reshape(-1, x.shape[1] // devices, x.shape[2])

    def widths(x):
        return lax.all_to_all(x, "sp", split_axis=2, concat_axis=0, tiled=True)

    def observe(learner):
        try:
            return carried_out(learner, "sp", devices, x)
        except ValueError as error:
            if "all_to_all" in str(error):
                return "not tiled"
            raise

    return Exercise(
        level="stretch",
        solution=solution,
        observe=observe,
        wrong=[
            (
                gathered,
                (
                    "The value is right, but to gather all heads of all positions and keep a slice sends N"
                    " times as much."
                ),
            ),
            (reshaped, "The shape is right, but nothing was sent: these are your own positions only."),
            (lambda x: x, "Nothing has moved: you still have all heads of your own positions."),
            (
                lambda x: lax.all_gather(x, "sp", axis=0, tiled=True),
                "Now every device has all heads of all positions. It needs an N-th of the heads.",
            ),
            (
                lambda x: lax.all_to_all(x, "sp", split_axis=1, concat_axis=0),
                (
                    "Without tiled=True the dim that is split must have exactly one entry per device, and it"
                    " goes away."
                ),
            ),
            (widths, "That cuts inside the heads. Attention needs whole heads: split dim 1."),
        ],
        hint=(
            "lax.all_to_all splits the dim of heads, sends the pieces round, and joins what comes along the"
            " positions."
        ),
        nudges=["Which collective moves a cut from one dim to another? What is cut before, and what after?"],
        because=(
            "A cut moves from the positions to the heads: one all-to-all, of which a device sends (N-1)/N of"
            " what it holds."
        ),
    )


def rivals(flops_per_s: float = 989.4e12, link_bytes_per_s: float = 450e9) -> Exercise:
    """Ask from which power of two on Ulysses sends less than the ring, forward and in a step, and which block
    hides a hop."""

    def smallest(heads, kv_heads, more_than, limited=True):
        n = 2
        while n <= more_than(heads / kv_heads):
            n *= 2
        return n if n <= kv_heads or not limited else None

    forward, step = (lambda ratio: 1 + ratio), (lambda ratio: (1 + ratio) / 2)
    heads = {"llama2-7b": (32, 32), "llama3-8b": (32, 8), "llama3-70b": (64, 8)}
    right = {f"{name} forward": smallest(*counts, forward) for name, counts in heads.items()}
    right |= {f"{name} step": smallest(*counts, step) for name, counts in heads.items()}
    block = 2 * flops_per_s / link_bytes_per_s * 8 / 32
    right["hidden_from"] = block
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (
                right | {"llama3-70b forward": smallest(64, 8, forward, limited=False)},
                (
                    "llama3-70b forward: 16 ranks of Ulysses would send less, but one would hold half of one"
                    " of the 8 KV heads."
                ),
            ),
            (
                right | {f"{name} step": right[f"{name} forward"] for name in heads},
                (
                    "step: these are the answers for the forward pass. Backwards, Ulysses repeats its"
                    " all-to-alls; the ring turns K and V once more, and their gradients in float32 as well."
                ),
            ),
            (
                right | {f"{name} forward": right[f"{name} step"] for name in heads},
                (
                    "forward: these are the answers for a whole step; forward, the ring turns K and V once,"
                    " in bfloat16."
                ),
            ),
            (
                right | {f"{name} forward": 4 for name in heads},
                (
                    "forward: with grouped queries the ring turns KV heads only, while Ulysses also exchanges"
                    " Q and the output: the models differ in the ratio of query heads to KV heads."
                ),
            ),
            (
                right | {"llama2-7b forward": 2},
                "llama2-7b forward: at 2 ranks both send the same. The question is where Ulysses sends less.",
            ),
            (
                right | {"hidden_from": block / 2},
                (
                    "hidden_from: a causal mask halves the work that a hop can hide behind, and the hop stays"
                    " as it is."
                ),
            ),
            (
                right | {"hidden_from": 4 * block},
                (
                    "hidden_from: only KV heads travel. The 32/8 = 4 query heads that share one are four"
                    " times the work for a hop."
                ),
            ),
            (
                right | {"hidden_from": block / 4},
                (
                    "hidden_from: with grouped queries the block shrinks by kv_heads/heads once; the causal"
                    " mask doubles it."
                ),
            ),
            (
                right | {"hidden_from": block / 2 * 4},
                (
                    "hidden_from: that is C/β alone. Two things change it: grouped queries make it smaller,"
                    " the causal mask twice as large."
                ),
            ),
            (
                right | {"llama3-8b step": 2},
                "llama3-8b step: at N = 2 Ulysses still sends more: 4 (n + k) (N-1)/N against 8 k (N-1).",
            ),
        ],
        hint=(
            "Take both rows of the table above, with the heads of this model, for N = 2, 4, 8; N must divide"
            " the KV heads. The block is in the formula above it."
        ),
        tolerance=0.02,  # rounded by hand
        nudges=["Write down what each sends for N = 2, 4 and 8, once forward and once for a step."],
        because=(
            "Forward, the ring sends 2k(N-1) and Ulysses (2n+2k)(N-1)/N, so Ulysses wins from N > 1 + n/k on;"
            " in a step the ring sends four times as much and Ulysses twice, so from half of that on. Ulysses"
            " needs N to divide k. A hop hides from 2 · C/β · k/n positions per device on; the 2 is the"
            " causal mask."
        ),
    )
