"""Exercises of lesson 02: what collectives send, a ring by hand, and the size at which bytes matter."""

from llmpar.exercises import Exercise


def scattered(devices: int = 8) -> Exercise:
    """Ask how many bytes a device sends when n buffers of 1 MiB are summed and dealt out (reduce-scatter)."""
    size = 2**20
    return Exercise(
        level="core",
        solution=size * (devices - 1) // devices,
        wrong=[
            (
                2 * size * (devices - 1) // devices,
                "That is an all-reduce: its second lap gathers the sums again.",
            ),
            (size // devices, "That is the result. A device sends each other device its part, n - 1 parts."),
            (
                size * (devices - 1),
                (
                    "That is a whole buffer to every other device, or what all devices send together. A"
                    " device sends an n-th part to each other one."
                ),
            ),
            (size, "Nearly: one of the n parts is its own, and stays."),
            (2 * size, "That is an all-reduce, without the parts that stay. Here is one lap only."),
            (
                size * (devices - 1) // devices // 4,
                "You divided by 4 for float32. 1 MiB is already a number of bytes.",
            ),
            (
                4 * size * (devices - 1) // devices,
                "You multiplied by 4 for float32. 1 MiB is already a number of bytes.",
            ),
            (1e6 * (devices - 1) / devices, "A MiB has 2**20 bytes. 1e6 bytes are a MB."),
            (size * devices, "Those are all the buffers together. A device sends from its own."),
        ],
        nudges=["How large is the part that each device keeps, and who has addends for it?"],
        because=(
            "Each of the n parts is summed by the device that keeps it. A device sends its addends for all"
            " parts but its own: (n - 1)/n of 1 MiB."
        ),
        hint="Cut the buffer into N parts. Each part but one leaves the device, summed on its way.",
        unit="bytes",
    )


def sent() -> Exercise:
    """Ask what a device of 4 sends of 8 MB for each kind of collective."""
    right = {"all-gather": 6.0, "reduce-scatter": 6.0, "all-reduce": 12.0, "all-to-all": 6.0}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                right | {"all-gather": 2.0},
                "all-gather: 8 MB is the gathered result; each part of 2 MB goes on 3 times.",
            ),
            (
                right | {"all-gather": 8.0},
                "all-gather: the part that arrives last is not passed on. Three of the four are sent.",
            ),
            (
                right | {"all-gather": 24.0},
                "all-gather: a device's part is 2 MB. You sent 8 MB to each of three others.",
            ),
            (right | {"all-reduce": 6.0}, "all-reduce: two laps, a reduce-scatter and an all-gather."),
            (
                right | {"all-reduce": 16.0},
                "all-reduce: nearly. In each of the two laps one of the four parts is not sent.",
            ),
            (
                right | {"all-reduce": 24.0},
                (
                    "all-reduce: that is the whole buffer to three others. A ring adds on the way, and sends"
                    " parts."
                ),
            ),
            (right | {"all-to-all": 8.0}, "all-to-all: of its 8 MB a device keeps its own quarter."),
            (
                right | {"reduce-scatter": 2.0},
                "reduce-scatter: 2 MB is the result; 8 MB are on each device before.",
            ),
            (
                right | {"reduce-scatter": 8.0},
                "reduce-scatter: one of the four parts is its own. It adds the others' addends to it.",
            ),
            (
                right | {"reduce-scatter": 12.0},
                "reduce-scatter: that is an all-reduce. Here the sums are not gathered afterwards.",
            ),
            (
                right | {"all-to-all": 2.0},
                "all-to-all: 2 MB go to each other device, and there are three of them.",
            ),
            (
                right | {"all-to-all": 24.0},
                "all-to-all: each other device gets its quarter of the 8 MB, not all of it.",
            ),
            (
                {kind: size * 1e6 for kind, size in right.items()},
                "Those are bytes. MB are asked for, 1e6 bytes each.",
            ),
        ],
        nudges=["Cut the message into four parts. Which of them does a device never send?"],
        because=(
            "A device sends three of the four parts of 2 MB. An all-reduce is a reduce-scatter and then an"
            " all-gather, so it sends twice as much."
        ),
        hint="(N - 1)/N of the whole message of 8 MB; an all-reduce twice.",
    )


def ring_gather() -> Exercise:
    """Ask for an all-gather out of permutes, as one device's program."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def run(function):
        x = jnp.arange(8.0).reshape(4, 2)
        return jax.vmap(lambda block: function(block, 4, "tp"), axis_name="tp")(x)

    def hops(block, n):
        pairs = [(i, (i + 1) % n) for i in range(n)]
        found = [block]
        for _ in range(n - 1):
            found.append(lax.ppermute(found[-1], "tp", pairs))
        return found

    def solution(block, n, axis):
        found = jnp.stack(hops(block, n))
        return found[(lax.axis_index(axis) - jnp.arange(n)) % n].reshape(n * block.shape[0])

    def unrolled(block, n, axis):
        return jnp.stack(hops(block, n)).reshape(n * block.shape[0])

    def backwards(block, n, axis):
        found = jnp.stack(hops(block, n))
        return found[(lax.axis_index(axis) + jnp.arange(n)) % n].reshape(n * block.shape[0])

    def own(block, n, axis):
        return jnp.tile(block, n)

    def other_way(block, n, axis):
        found = [block]
        for _ in range(n - 1):
            found.append(lax.ppermute(found[-1], axis, [(i, (i - 1) % n) for i in range(n)]))
        return jnp.stack(found)

    def unrolled_other_way(block, n, axis):
        return other_way(block, n, axis).reshape(n * block.shape[0])

    def wrong_way(block, n, axis):
        found = other_way(block, n, axis)
        return found[(lax.axis_index(axis) - jnp.arange(n)) % n].reshape(n * block.shape[0])

    def sent_again(block, n, axis):
        received = lax.ppermute(block, axis, [(i, (i + 1) % n) for i in range(n)])
        return jnp.concatenate([block] + [received] * (n - 1))

    return Exercise(
        level="stretch",
        solution=solution,
        observe=run,
        wrong=[
            (unrolled, "All blocks are there, in the order in which they came: put block j at place j."),
            (
                backwards,
                "Blocks travel to the next rank: after j hops you hold that of rank i - j, not i + j.",
            ),
            (own, "That is your own block n times. Nothing was received."),
            (sent_again, "Each hop sends the same block again. Pass on what the last hop brought."),
            (
                unrolled_other_way,
                "Each rank's own block stands first, and those of the next ranks follow. Rank 0's is first.",
            ),
            (
                wrong_way,
                (
                    "Only some are in place. After j hops you hold the block of rank i - j if you send to"
                    " the next rank, of i + j if to the one before."
                ),
            ),
        ],
        nudges=[
            "What does a rank pass on in its second hop?",
            "In which order do the blocks arrive at rank i, and at which place does each belong?",
        ],
        because=(
            "Each hop passes on what the last one brought, so n - 1 hops bring all others. Block k came after"
            " (i - k) mod n hops: that is where it is found."
        ),
        hint="After j hops rank i holds the block of rank i - j. Collect n of them, then put them in order.",
    )


def half_size(ranks: int = 8) -> Exercise:
    """Ask for the message at which an all-reduce's starts take as long as its bytes: 5 µs a hop, 450 GB/s."""
    right = ranks * 5e-6 * 450e9
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (
                5e-6 * 450e9,
                "Those are the bytes of one hop's start. Each hop carries an n-th part of the message.",
            ),
            (
                2 * (ranks - 1) * 5e-6 * 450e9,
                "All the starts, but the bytes counted once. 2 (N - 1)/N of the message is sent.",
            ),
            (right / 2, "Starts of one lap, and bytes of both. The factor 2 belongs on both sides."),
            (8 * right, "450 GB/s are bytes already: no factor 8."),
            (1000 * right, "5 µs are 5e-6 s, not 5e-3."),
            (2 * right, "Both laps start and both carry bytes: the factor 2 is on both sides."),
            ((ranks - 1) * 5e-6 * 450e9, "Nearly: N - 1 hops, and (N - 1)/N of the bytes: N is left."),
        ],
        hint="2 (N - 1) hops start; 2 (N - 1)/N of the message is sent. Set the two times equal.",
        nudges=[
            "How many hops does a ring all-reduce make, and what part of the message does each carry?",
            "One hop's start and one hop's bytes take equally long.",
        ],
        because=(
            "Each of the 2 (N - 1) hops starts once and carries an N-th part. So that part takes 5 µs at 450"
            " GB/s, which is 2.25 MB, and the message has N such parts."
        ),
        tolerance=0.01,
        unit="bytes",
    )
