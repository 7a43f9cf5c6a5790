"""Exercises of lesson 02 that are computed: a ring by hand."""

from llmpar.exercises import Exercise


def ring_gather() -> Exercise:
    """Ask for an all-gather out of permutes, as one device's program."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def run(function):
        x = jnp.arange(8.0).reshape(4, 2)
        return jax.vmap(lambda block: function(block, 4, "tp"), axis_name="tp")(x)

    def hops(block, n, step=1):
        found = [block]
        for _ in range(n - 1):
            found.append(lax.ppermute(found[-1], "tp", [(i, (i + step) % n) for i in range(n)]))
        return found

    def solution(block, n, axis):
        found = jnp.stack(hops(block, n))
        return found[(lax.axis_index(axis) - jnp.arange(n)) % n].reshape(n * block.shape[0])

    def counted(sign, step):
        def gather(block, n, axis):
            found = jnp.stack(hops(block, n, step))
            return found[(lax.axis_index(axis) + sign * jnp.arange(n)) % n].reshape(n * block.shape[0])

        return gather

    wrong = dict(
        unrolled=lambda block, n, axis: jnp.concatenate(hops(block, n)),
        backwards=counted(1, step=1),
        own=lambda block, n, axis: jnp.tile(block, n),
        sent_again=lambda block, n, axis: jnp.concatenate([block] + [hops(block, n)[1]] * (n - 1)),
        unrolled_other_way=lambda block, n, axis: jnp.concatenate(hops(block, n, step=-1)),
        wrong_way=counted(-1, step=-1),
    )
    return Exercise("stretch", solution, wrong, observe=run)
