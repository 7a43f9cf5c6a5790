"""Programs of lesson 19, as ranks run them: ten that are wrong in silence, and their cures.

Who has not done the lesson reads its clues first. What is public about each one stands at the lesson's end.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
from jax import lax

from llmpar.parallel.mesh import make_mesh, sharding
from llmpar.plan.layout import parse_layout
from llmpar.plan.sequence_order import sequence_permutation

RATE = 0.01


def norm(weight, bias):
    """Return the norm of both gradients; tp cuts the weight's."""
    squares = lax.psum(jnp.sum(weight**2) + jnp.sum(bias**2), "tp")
    return jnp.sqrt(squares)


def cured_norm(weight, bias):
    """Return the norm of both gradients; tp cuts the weight's."""
    squares = lax.psum(jnp.sum(weight**2), "tp") + jnp.sum(bias**2)
    return jnp.sqrt(squares)


def step(router, experts, own, x, y):
    """Move the router of a layer whose experts tp shares; `own` picks their scores."""
    outputs = lambda r: jax.nn.softmax(x @ r) @ own @ experts  # of my experts
    part, back = jax.vjp(outputs, router)
    error = lax.psum(part, "tp") - y
    return router - RATE * back(error)[0]


def cured_step(router, experts, own, x, y):
    """Move the router of a layer whose experts tp shares."""
    outputs = lambda r: jax.nn.softmax(x @ r) @ own @ experts
    part, back = jax.vjp(outputs, router)
    error = lax.psum(part, "tp") - y
    return router - RATE * lax.psum(back(error)[0], "tp")


adam = optax.adam(1e-3)


def update(weights, state, grads):
    """Take a step of Adam."""
    change, state = adam.update(grads, state)
    return optax.apply_updates(weights, change), state


def lying(arrays):
    """Return the layouts of arrays, as they lie; the step's number has none."""
    return jax.tree.map(lambda x: x.sharding if x.ndim else None, arrays)


def begin(weights, zero=1):
    """Make Adam's state, and the step that keeps all layouts."""
    state = adam.init(weights)
    return state, jax.jit(update, out_shardings=lying((weights, state)))


def cured_begin(weights, zero=1):
    """Make Adam's state, and the step that keeps all layouts."""
    places = laid_out(weights, "d/fsdp m" if zero else "d m")
    state = jax.jit(adam.init, out_shardings=places)(weights)
    return state, jax.jit(update, out_shardings=(lying(weights), places))


def laid_out(weights, layout):
    """Return layouts of Adam's state on eight devices; the step's number cannot be cut."""
    mesh, state = make_mesh("fsdp=8"), jax.eval_shape(adam.init, weights)
    texts = jax.tree.map(lambda x: layout if x.ndim else "", state)
    return jax.tree.map(lambda text: sharding(mesh, parse_layout(text)), texts)


def dropped(x):
    """Set half of the numbers to 0, and double the others."""
    kept = jax.random.bernoulli(jax.random.key(31), 0.5, x.shape)
    return 2 * x * kept


def cured_dropped(x):
    """Set half of the numbers to 0, and double the others."""
    key = jax.random.fold_in(jax.random.key(31), lax.axis_index("dp"))
    return 2 * x * jax.random.bernoulli(key, 0.5, x.shape)


def rotated(x, at):
    """Turn pairs of numbers by an angle for each position, as RoPE does."""
    (a, b), angle = jnp.split(x, 2, 1), at[:, None] * 0.1
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], 1)


def attention(x):  # s/sp d
    """Attend to all positions before; sp cuts the queries."""
    at = jnp.arange(len(x))
    keys, values = lax.all_gather((rotated(x, at), x), "sp", tiled=True)
    before = at[:, None] >= jnp.arange(len(keys))
    scores = jnp.where(before, rotated(x, at) @ keys.T, -jnp.inf)
    return jax.nn.softmax(scores) @ values


def cured_attention(x):
    """Attend to all positions before; sp cuts the queries."""
    at = jnp.arange(len(x)) + lax.axis_index("sp") * len(x)
    keys, values = lax.all_gather((rotated(x, at), x), "sp", tiled=True)
    before = at[:, None] >= jnp.arange(len(keys))
    scores = jnp.where(before, rotated(x, at) @ keys.T, -jnp.inf)
    return jax.nn.softmax(scores) @ values


def loss(x, w, counted):  # counted: 1 for a token of an answer, 0 for padding
    """Return the mean error of the tokens that are counted."""
    errors = ((x @ w) ** 2).sum(1) * counted
    return lax.pmean(errors.sum() / counted.sum(), "dp")


def cured_loss(x, w, counted):
    """Return the mean error of the tokens that are counted."""
    errors = ((x @ w) ** 2).sum(1) * counted
    return lax.psum(errors.sum(), "dp") / lax.psum(counted.sum(), "dp")


def total(x, axes=("dp", "tp")):
    """Add over all ranks."""
    return lax.psum(x, axes)


def own_part(x, axis):
    """Take this rank's part of an axis."""
    size = len(x) // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size)


def gathering(axis, add=total):
    """Return what gathers positions over an axis, forward, and adds up backward."""
    gathered = jax.custom_vjp(lambda x: lax.all_gather(x, axis, tiled=True))
    forward = lambda x: (gathered(x), None)
    gathered.defvjp(forward, lambda _, slope: (own_part(add(slope), axis),))
    return gathered


gathered_over_tp = gathering("tp")


def two_layers(first, second, x, y, gathered=gathered_over_tp):
    """Return the loss, and the first weight after a step."""

    def squares(first):
        hidden = gathered(jnp.tanh(x @ first))  # of my positions, then of all
        return ((hidden @ second - y) ** 2).sum()

    error, slope = jax.value_and_grad(squares)(first)
    return total(error), first - RATE / 10 * total(slope)


def cured_two_layers(first, second, x, y):
    """Return the loss, and the first weight after a step."""
    gathered = gathering("tp", lambda slope: lax.psum(slope, "tp"))
    return two_layers(first, second, x, y, gathered)


def balance(router, x):
    """Return my part of the balance, which is 1 where all experts have equally many tokens."""
    chances = jax.nn.softmax(x @ router)
    chosen = chances == chances.max(1, keepdims=True)
    tokens = lax.psum(len(x), "dp")
    load = lax.psum(chosen.sum(0), "dp") / tokens
    return router.shape[1] * (load * chances.sum(0) / tokens).sum()


def cured_balance(router, x):
    """Return the balance of my tokens: its mean is 1 where all experts have equally many tokens."""
    chances = jax.nn.softmax(x @ router)
    load = lax.pmean((chances == chances.max(1, keepdims=True)).mean(0), "dp")
    return router.shape[1] * (load * chances.mean(0)).sum()


def router_step(router, experts, x, y, term=balance):
    """Move the router by the gradients of the error and of a second term."""
    error = lambda router: ((jax.nn.softmax(x @ router) @ experts - y) ** 2).mean()
    slopes = jax.grad(error)(router), 2 * jax.grad(term)(router, x)
    return router - 10 * RATE * sum(lax.pmean(slopes, "dp"))


def rank_key():
    """Return the key of this rank."""
    return jax.random.fold_in(jax.random.key(31), lax.axis_index("dp"))


def my_texts(num, key=rank_key):
    """Return which texts this rank reads in an epoch, in random order."""
    order = jax.random.permutation(key(), num).reshape(-1, lax.axis_size("dp"))
    return order[:, lax.axis_index("dp")]


def epoch(table, texts, key=rank_key):
    """Move the rows of all texts half of the distance, and return the table."""
    own = my_texts(len(texts), key)
    change = jnp.zeros_like(table).at[own].add(texts[own] - table[own])
    return table + lax.psum(change, "dp") / 2


def cured_epoch(table, texts):
    """Move the rows of all texts half of the distance, and return the table."""
    return epoch(table, texts, key=lambda: jax.random.key(31))


BALANCED = ("all_gather",)  # strategies whose ranks get a part of the front and one of the back


def dealt(positions, ranks, strategy):
    """Return the order in which tokens are dealt to the ranks."""
    order = "zigzag" if strategy in BALANCED else "contiguous"
    return sequence_permutation(order, positions, ranks)


def cured_dealt(positions, ranks, strategy):
    """Return the order in which tokens are dealt to the ranks."""
    return sequence_permutation("zigzag", positions, ranks)


def attend_in_ring(x, at):  # s/sp d, and the positions of its rows
    """Return attention, and the tiles of scores that this rank computed on each hop."""
    size, tiles = lax.axis_size("sp"), []
    own = block = x.reshape(2, -1, x.shape[1]), at.reshape(2, -1)
    sums = jnp.zeros((*own[1].shape, x.shape[1] + 1))
    for _ in range(size):
        # tiles: the halves of my rows × those of the block
        seen = own[1][:, None, :, None] >= block[1][:, None]
        tiles.append(seen.any((2, 3)).sum())
        for i, j in itertools.product(range(2), range(2)):
            given = own[0][i], block[0][j], seen[i, j]
            sums = sums.at[i].add(lax.cond(seen[i, j].any(), attended, skipped, *given))
        block = lax.ppermute(block, "sp", [(rank, (rank + 1) % size) for rank in range(size)])
    sums = sums.reshape(len(x), -1)
    return sums[:, :-1] / sums[:, -1:], jnp.stack(tiles)[None]


def attended(queries, keys, seen):
    """Return sums of a tile: of values and, in the last column, of weights."""
    weights = jnp.where(seen, jnp.exp(queries @ keys.T), 0)
    return weights @ jnp.append(keys, jnp.ones((len(keys), 1)), axis=1)


def skipped(queries, keys, seen):
    """Return the sums of a tile of which nothing is seen."""
    return jnp.zeros((len(queries), keys.shape[1] + 1))
