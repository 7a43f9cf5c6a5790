"""Exercises of lesson 05: which dim to cut, and what that sends."""

from llmpar.exercises import Exercise


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
        ],
        hint=(
            "Count one all-reduce after each row matrix, then mirror them in the backward pass, and ask which"
            " of these is of use."
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
        ],
        hint="Heads do not talk to one another between Q, K, V and O. Cut n (or k) in all four.",
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
        return [list(learner(rank, tp, n, k)) for tp, n, k in cases for rank in range(tp)]

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
        ],
        hint=(
            "List the query heads of the device, then the KV head of each: query head i belongs to KV head"
            " i·k/n, rounded down."
        ),
        observe=observe,
    )


def ring_permutes() -> Exercise:
    """Ask how many permutes a layer's four gathers and four scatters become as ring products."""
    return Exercise(
        level="expert",
        solution=lambda tp: 8 * (tp - 1),
        wrong=[
            (
                lambda tp: 8 * tp,
                (
                    "One hop too many in each ring: after t-1 hops every block has been everywhere, and a"
                    " t-th would carry each home for nobody."
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
        ],
        hint=(
            "Count the collectives of a layer with sequence parallelism, forward and backward; each is a ring"
            " of t-1 hops."
        ),
        observe=lambda learner: [learner(tp) for tp in (2, 4, 8, 16)],
    )
