"""Exercises of lesson 05: which dim to cut, and what that sends."""

from collections.abc import Iterable

import jax
import numpy as np
from jax import lax

from llmpar.exercises import Exercise
from llmpar.exercises.spread import carried_out

DEVICES, POSITIONS, WIDTH, HIDDEN = 4, 6, 8, 3
"""Of `gated_pair`: HIDDEN is what one device has of the feed-forward's width."""


def stack_all_reduces(layers: int = 4, devices: int = 8) -> Exercise:
    """Ask how many all-reduces one forward and backward pass of a stack of column-row pairs runs."""
    some = devices > 1  # one device sends nothing
    return Exercise(
        level="core",
        solution=(2 * layers - 1) * some,
        wrong=[
            (
                2 * layers * some,
                (
                    "Almost: one forward and one backward per layer, but the gradient of the first layer's"
                    " input is the gradient of data. Nobody asks for it."
                ),
            ),
            (
                layers * some,
                (
                    "That is the forward pass. In the backward pass each device knows the gradient of x"
                    " through its own columns alone: these must be summed too."
                ),
            ),
            (
                4 * layers * some,
                (
                    "That is a transformer, whose layer has two column-row pairs: attention and feed-forward."
                    " Here a layer is one pair."
                ),
            ),
            (
                (4 * layers - 1) * some,
                (
                    "You also reduce between the column and the row matrix. Nothing moves there: that is the"
                    " point of the pair."
                ),
            ),
            (
                1 * some,
                "That is one pair, forward. The stack has several, and each also has a backward pass.",
            ),
            (
                (layers - 1) * some,
                (
                    "In the forward pass every pair ends with one, also the last: the loss needs a finished"
                    " sum. Then count the backward pass."
                ),
            ),
        ],
        hint=(
            "Count one all-reduce after each row matrix, then mirror them in the backward pass, and ask which"
            " of these is of use."
        ),
        nudges=["Where is a sum unfinished in the forward pass? And where in the backward pass?"],
        because=(
            "One per pair forward, after the row matrix; one per pair backward, for the gradient of its"
            " input, but none for the first pair, whose input is data."
        ),
    )


def attention_layouts() -> Exercise:
    """Ask for the layouts of the four attention matrices under tensor parallelism."""
    right = {"q": "d n/tp h", "k": "d k/tp h", "v": "d k/tp h", "o": "n/tp h d"}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                right | {"o": "n h d/tp"},
                (
                    "With O cut by columns each device needs the outputs of all heads first: a gather, and"
                    " another one after it. Cut O where its input is cut already."
                ),
            ),
            (
                right | {"q": "d n h/tp", "k": "d k h/tp", "v": "d k h/tp", "o": "n h/tp d"},
                (
                    "This cuts inside the heads: each score q·k "
                    "becomes an unfinished sum, one all-reduce of s × t numbers per head. Cut between heads."
                ),
            ),
            (
                {"q": "d/tp n h", "k": "d/tp k h", "v": "d/tp k h", "o": "n/tp h d"},
                (
                    "Cutting d makes Q, K and V row matrices: their "
                    "results are unfinished sums, which must be reduced before the softmax."
                ),
            ),
            (
                right | {"k": "d k h", "v": "d k h"},
                (
                    "It works, but every device computes and stores all KV heads, of which its own query"
                    " heads need a share."
                ),
            ),
            (
                right | {"o": "n h d"},
                (
                    "O whole is right in value, but each device holds all of it and uses only the rows of its"
                    " heads."
                ),
            ),
            (
                right | {"o": "n/tp h d/tp"},
                "o: one axis cannot cut two dims. O's input is cut by heads, so cut it there.",
            ),
            (
                right | {"o": "d n/tp h"},
                "o: the cut is right, the dims are not: O goes from heads to width, `n h d`.",
            ),
            (
                right | {"q": "d n h"},
                "q: whole, every device computes all query heads. Cut it by heads, like the others.",
            ),
        ],
        hint="Heads do not talk to one another between Q, K, V and O. Cut n (or k) in all four.",
        nudges=["Which dim of Q, K, V and O do heads share, and do heads talk to one another?"],
        because=(
            "Heads are to attention what hidden units are to the feed-forward: Q, K and V are column matrices"
            " cut between heads, and O is the row matrix that reads the same heads."
        ),
    )


def gated_pair() -> Exercise:
    """Ask for a gated feed-forward as a column-row pair, as one device writes it."""
    draw = np.random.default_rng(0).standard_normal
    x = np.broadcast_to(draw((POSITIONS, WIDTH)), (DEVICES, POSITIONS, WIDTH)).astype(np.float32)
    columns = (DEVICES, WIDTH, HIDDEN)
    gate, up, down = (
        draw(shape).astype(np.float32) for shape in (columns, columns, (DEVICES, HIDDEN, WIDTH))
    )

    def hidden(x, gate, up):
        return jax.nn.silu(x @ gate) * (x @ up)

    def solution(x, gate, up, down):
        mine = jax.nn.silu(x @ gate) * (x @ up)
        return lax.psum(mine @ down, "tp")

    def unfinished(x, gate, up, down):
        return hidden(x, gate, up) @ down

    def mean(x, gate, up, down):
        return lax.pmean(hidden(x, gate, up) @ down, "tp")

    def early(x, gate, up, down):
        return lax.psum(hidden(x, gate, up), "tp") @ down

    def between(x, gate, up, down):
        return lax.psum(jax.nn.silu(lax.psum(x @ gate, "tp")) * lax.psum(x @ up, "tp") @ down, "tp")

    def gathered(x, gate, up, down):
        return lax.all_gather(unfinished(x, gate, up, down), "tp").sum(0)

    def scattered(x, gate, up, down):
        return lax.psum_scatter(unfinished(x, gate, up, down), "tp", scatter_dimension=1, tiled=True)

    def ungated(x, gate, up, down):
        return lax.psum(jax.nn.silu(x @ gate) @ down, "tp")

    def twice(x, gate, up, down):
        return lax.psum(solution(x, gate, up, down), "tp")

    return Exercise(
        level="stretch",
        solution=solution,
        observe=lambda learner: carried_out(learner, "tp", DEVICES, x, gate, up, down),
        wrong=[
            (unfinished, "Every device returns its own addends: the sum over tp is still to be finished."),
            (mean, "A mean divides by the devices. The rows of `down` make addends: add them."),
            (
                early,
                (
                    "The hidden units of different devices are different units: they are not added up. Add"
                    " behind `down`."
                ),
            ),
            (
                between,
                (
                    "Columns of `gate` and `up` give finished numbers of some hidden units. Nothing is added"
                    " before `down`."
                ),
            ),
            (
                gathered,
                "The value is right, but to gather all addends sends N/2 times as much as one all-reduce.",
            ),
            (
                scattered,
                (
                    "That is sequence parallelism's way out: each device keeps a part. Here all want the"
                    " whole sum."
                ),
            ),
            (ungated, "`up` is left out: a hidden value is silu of the gate, times up."),
            (
                twice,
                (
                    "Added twice: after the first psum all devices have the sum, and the second one"
                    " multiplies it by N."
                ),
            ),
        ],
        hint='Multiply as one device would with its own columns and rows; then one psum over "tp".',
        nudges=["Which of the three products gives an unfinished sum?"],
        because=(
            "gate and up are column matrices, and what follows looks at one hidden unit at a time; down is"
            " the row matrix, so its results are addends: one all-reduce."
        ),
    )


def kv_heads() -> Exercise:
    """Ask which KV heads a device needs, also when there are more devices than KV heads."""

    def solution(rank, tp, num_heads, num_kv_heads):
        mine = range(rank * num_heads // tp, (rank + 1) * num_heads // tp)
        return sorted({head * num_kv_heads // num_heads for head in mine})

    def round_robin(rank, tp, num_heads, num_kv_heads):
        return [rank % num_kv_heads] if tp > num_kv_heads else solution(rank, tp, num_heads, num_kv_heads)

    def repeated(rank, tp, num_heads, num_kv_heads):
        return [
            head * num_kv_heads // num_heads
            for head in range(rank * num_heads // tp, (rank + 1) * num_heads // tp)
        ]

    def one_only(rank, tp, num_heads, num_kv_heads):
        return [rank * num_kv_heads // tp]

    def everything(rank, tp, num_heads, num_kv_heads):
        return list(range(num_kv_heads))

    def even_blocks(rank, tp, num_heads, num_kv_heads):
        return list(range(rank * num_kv_heads // tp, (rank + 1) * num_kv_heads // tp))

    def observe(learner):
        cases = [
            (tp, n, k)
            for tp, n, k in ((2, 8, 4), (8, 32, 8), (16, 32, 8), (8, 16, 2), (4, 8, 1))
            if n % tp == 0
        ]
        found = [learner(rank, tp, n, k) for tp, n, k in cases for rank in range(tp)]
        return [list(heads) if isinstance(heads, Iterable) else heads for heads in found]

    return Exercise(
        level="stretch",
        solution=solution,
        wrong=[
            (
                round_robin,
                (
                    "Dealing KV heads round robin gives a device a head that its own query heads do not use:"
                    " query heads in one group are neighbours, and so are the devices that hold them."
                ),
            ),
            (repeated, "The right heads, once for every query head that uses them; name each head once."),
            (
                one_only,
                (
                    "Right for more devices than KV heads, but with fewer devices than KV heads a device"
                    " needs several."
                ),
            ),
            (
                everything,
                (
                    "Every device would compute all KV heads. That is right, and wasteful: K and V would not"
                    " be cut at all."
                ),
            ),
            (
                even_blocks,
                (
                    "With more devices than KV heads this leaves devices without any. A KV head must then be"
                    " held by several devices."
                ),
            ),
            (
                lambda rank, tp, num_heads, num_kv_heads: [rank],
                (
                    "There are fewer KV heads than devices in some cases, and more in others; which one does"
                    " query head i read?"
                ),
            ),
            (
                lambda rank, tp, num_heads, num_kv_heads: list(
                    range(rank * num_heads // tp, (rank + 1) * num_heads // tp)
                ),
                "These are the query heads of the device. Which KV heads do they read?",
            ),
            (
                lambda rank, tp, num_heads, num_kv_heads: (
                    [0] if tp > num_kv_heads else solution(rank, tp, num_heads, num_kv_heads)
                ),
                (
                    "With more devices than KV heads, not all of them read head 0: the query heads of rank i"
                    " read head i·k/tp, rounded down."
                ),
            ),
        ],
        hint=(
            "List the query heads of the device, then the KV head of each: query head i belongs to KV head"
            " i·k/n, rounded down."
        ),
        observe=observe,
        nudges=["Which query heads does the device have, and which KV head does each of them read?"],
        because=(
            "Query head i reads KV head i·k/n, rounded down. Where a KV head lies on several devices, each of"
            " them has a part of its gradient only: the parts must be added over those devices."
        ),
    )


def ring_permutes() -> Exercise:
    """Ask how many permutes a layer's four gathers and four scatters become as ring products."""

    def solution(tp):
        return 8 * (tp - 1)

    return Exercise(
        level="expert",
        solution=solution,
        wrong=[
            (
                lambda tp: 8 * tp,
                (
                    "One hop too many in each ring: after N-1 hops every block has been everywhere, and an"
                    " N-th would carry each home for nobody."
                ),
            ),
            (
                lambda tp: 4 * (tp - 1),
                (
                    "That is the forward pass: two gathers and two scatters. The backward pass mirrors each"
                    " of them."
                ),
            ),
            (
                lambda tp: tp - 1,
                (
                    "That is one product. A layer has two column-row pairs, each with a ring on both sides,"
                    " and a backward pass."
                ),
            ),
            (lambda tp: 8, "That is the number of collectives. Each becomes a ring of several hops."),
            (
                lambda tp: 2 * (tp - 1),
                "That is one pair, forward. A layer has two pairs, and a backward pass.",
            ),
            (
                lambda tp: 4 * tp,
                (
                    "That is the forward pass, and one hop too many in each ring: after N-1 hops every block"
                    " has been everywhere."
                ),
            ),
            (
                lambda tp: 6 * (tp - 1),
                "A pair has a gather before and a scatter behind. Two pairs, forward and backward: how many?",
            ),
            (lambda tp: 8 * tp - 1, "N-1 hops is said of each ring, not of all of them together."),
            (
                lambda tp: tp,
                (
                    "That is one ring, with a hop that nobody needs. Count the rings of a layer, forward and"
                    " backward."
                ),
            ),
        ],
        hint=(
            "Count the collectives of a layer with sequence parallelism, forward and backward; each is a ring"
            " of N-1 hops."
        ),
        observe=lambda learner: [learner(tp) for tp in (2, 4, 8, 16)],
        nudges=["How many gathers and scatters has a layer, in both passes? How many hops does each become?"],
        because=(
            "A layer enters and leaves two pairs, forward and backward: eight collectives, and a ring of N"
            " devices has N-1 hops."
        ),
    )
