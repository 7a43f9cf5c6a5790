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
                "A whole buffer to every other device: each needs its own n-th part only.",
            ),
            (size, "Nearly: one of the n parts is its own, and stays."),
        ],
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
            (right | {"all-reduce": 6.0}, "all-reduce: two laps, a reduce-scatter and an all-gather."),
            (right | {"all-to-all": 8.0}, "all-to-all: of its 8 MB a device keeps its own quarter."),
            (
                right | {"reduce-scatter": 2.0},
                "reduce-scatter: 2 MB is the result; 8 MB are on each device before.",
            ),
        ],
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
        ],
        hint="After j hops rank i holds the block of rank i - j. Collect n of them, then put them in order.",
    )


def half_size(ranks: int = 8) -> Exercise:
    """Ask for the message at which an all-reduce's starts take as long as its bytes: 5 µs a hop, 450 GB/s."""
    right = ranks * 5e-6 * 450e9
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (5e-6 * 450e9, "That is one hop's bytes. Each hop carries an n-th part of the message."),
            (2 * right, "Both laps start and both carry bytes: the factor 2 is on both sides."),
            ((ranks - 1) * 5e-6 * 450e9, "Nearly: N - 1 hops, and (N - 1)/N of the bytes: N is left."),
            (right / 1e6, "Those are MB; bytes are asked for."),
        ],
        hint="2 (N - 1) hops start; 2 (N - 1)/N of the message is sent. Set the two times equal.",
        tolerance=0.01,
    )
