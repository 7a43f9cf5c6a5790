"""An arrow between two meshes: every device gets what it lacks, once; rounds are few; the sampler learns."""

import collections
import itertools
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parity import LLAMA, full_rows

from llmpar import Plan, Step, look, make_mesh, two_meshes
from llmpar.cli.rl import Rl
from llmpar.model import llama
from llmpar.plan.layout import Dim, Layout, parse_arrow
from llmpar.plan.two_meshes import TwoMeshes
from llmpar.predict.hardware import chip
from llmpar.predict.two_meshes import link_loads, rounds_seconds
from llmpar.serve.engine import Engine
from llmpar.serve.two_meshes import Mover, Permutes

ARROW = "d/fsdp m/tp @train -> d m/tp @serve"
MESHES = {"train": "fsdp=2 tp=2", "serve": "tp=4"}


def random_layout(rng, letters, sizes, mesh):
    """A layout with random axes on random dims."""
    cuts = {letter: [] for letter in letters}
    for axis in rng.sample(sorted(sizes), rng.randint(0, len(sizes))):
        cuts[rng.choice(letters)].append(axis)
    return Layout(tuple(Dim(letter, tuple(axes)) for letter, axes in cuts.items()), mesh=mesh)


def random_pair(seed, most=12, even=False):
    """Two values between two random meshes, which may share devices."""
    rng = random.Random(seed)
    while True:
        sizes = [{a: rng.choice([1, 2, 2, 3, 4]) for a in rng.sample(["dp", "fsdp", "tp"], 2)} for _ in "ab"]
        counts = [math.prod(s.values()) for s in sizes]
        if max(counts) <= most:
            break
    devices = [rng.sample(range(most), n) for n in counts]
    letters = ["bsd"[:n] for n in (rng.randint(1, 3), rng.randint(1, 3))]
    dims = [6, 8, 12, 24] if not even else [24, 48]
    shapes = [tuple(rng.choice(dims) - (rng.random() < 0.4) * (not even) for _ in text) for text in letters]
    sides = [*zip(sizes, "ab", strict=True)]
    arrows = [" -> ".join(str(random_layout(rng, text, *side)) for side in sides) for text in letters]
    texts = [" ".join(f"{a}={n}" for a, n in s.items()) for s in sizes]
    return arrows, texts, devices, shapes


def masks(layout, shape, text, devices):
    """What each device has of a value, element by element."""
    sizes = {a: int(n) for a, n in (word.split("=") for word in text.split())}
    sizes = {a: sizes[a] for a in ("dp", "fsdp", "tp") if a in sizes}  # as meshes order them
    places, out = np.array(devices).reshape(*sizes.values()), {}
    for at in np.ndindex(places.shape):
        mask = np.ones(shape, bool)
        for k, dim in enumerate(layout.dims):
            of_axis = [sizes[a] for a in dim.axes]
            index = np.ravel_multi_index([at[[*sizes].index(a)] for a in dim.axes], of_axis) if of_axis else 0
            block = np.arange(shape[k]) // -(-shape[k] // math.prod(of_axis)) == index
            mask &= block.reshape([-1 if i == k else 1 for i in range(len(shape))])
        out[int(places[at])] = mask
    return out


PAIRS = [*range(60), *(pytest.param(i, marks=pytest.mark.nightly) for i in range(60, 1000))]


@pytest.mark.parametrize("seed", PAIRS)
def test_every_device_gets_what_it_lacks_once_from_one_that_has_it_near_if_any_is(seed):
    arrows, texts, devices, shapes = random_pair(seed)
    meshes = dict(zip("ab", zip(texts, devices, strict=True), strict=True))
    plan = two_meshes(arrows, meshes, shapes, 2, node_size=4, uneven=True)
    got, lacking, loads = collections.Counter(), 0, collections.Counter()
    for k, (text, shape) in enumerate(zip(arrows, shapes, strict=True)):
        arrow = parse_arrow(text)
        had, wanted = (masks(side, shape, *meshes[side.mesh]) for side in (arrow.before, arrow.after))
        left = {n: mask & ~had.get(n, np.zeros(shape, bool)) for n, mask in wanted.items()}
        lacking += 2 * sum(int(mask.sum()) for mask in left.values())
        for (i, j), parts in plan.messages.items():
            for box in (box for value, box in parts if value == k):
                cut = tuple(slice(*ends) for ends in box)
                assert had[i][cut].all() and left[j][cut].all(), "it is there, and is lacking: once"
                left[j][cut] = False
                near = [n for n, mask in had.items() if mask[cut].all() and n // 4 == j // 4]
                assert not near or i // 4 == j // 4
                got[i, j] += 2 * int(np.prod(had[i][cut].shape))
        assert not any(mask.any() for mask in left.values())
    assert plan.matrix == dict(got) and sum(got.values()) == plan.bound == lacking
    for (i, j), sent in got.items():
        loads.update({(i, "sends"): sent, (j, "receives"): sent})
    assert link_loads(plan) == loads
    ends = [collections.Counter(pair[side] for pair in got).values() for side in (0, 1)]
    assert len(plan.rounds) == max(map(max, ends), default=0) if got else plan.rounds == []
    assert sorted(pair for one in plan.rounds for pair in one) == sorted(got)
    assert all(len({*ends}) == len(one) for one in plan.rounds for ends in zip(*one, strict=True))


def test_time_is_that_of_the_slowest_message_of_each_round():
    h100 = chip("h100")
    near, far = (two_meshes(ARROW, MESHES, (64, 1 << 20), 2, node_size=n) for n in (8, 4))
    message, start = 1 << 24, 2 * h100.rates.start_s
    link = h100.link_bytes_per_s * h100.rates.links
    network = h100.dcn_bytes_per_s * h100.rates.network
    assert rounds_seconds(near, h100) == pytest.approx([start + message / link] * 2)
    assert rounds_seconds(far, h100) == pytest.approx([start + message / network] * 2)


def permuted(permutes, text):
    """The bytes of each pair in compiled rounds, whose messages are of 4-byte integers."""
    rounds = r"u32\[(\d+)\]\S* collective-permute\(.*?source_target_pairs=\{(.*?)\}\}"
    for size, pairs in re.findall(rounds, text):
        for i, j in re.findall(r"\{(\d+),(\d+)", pairs):
            yield permutes.order[int(i)], permutes.order[int(j)], 4 * int(size)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_transferred_is_the_matrix_and_the_values_are_those_of_device_put(seed, monkeypatch):
    arrows, texts, numbers, shapes = random_pair(seed, 8, even=True)
    devices = jax.devices()
    made = [make_mesh("!" + text, [devices[n] for n in of]) for text, of in zip(texts, numbers, strict=True)]
    meshes = dict(zip("ab", made, strict=True))
    plan, sent, put = two_meshes(arrows, meshes, shapes), collections.Counter(), jax.device_put
    move, rng = Mover(plan), np.random.default_rng(seed)
    bits = [rng.integers(1 << 32, size=shape, dtype=np.uint32) for shape in shapes]
    values = [put(x.view(np.float32), place) for x, place in zip(bits, move.given, strict=True)]

    def counted(x, device):
        sent[x.device.id, device.id] += x.nbytes
        return put(x, device)

    monkeypatch.setattr(jax, "device_put", counted)
    moved = move(values)
    assert sent == plan.matrix and move.sent_bytes == plan.bound
    move._send = Permutes(plan, move.devices)  # as between processes
    given, run = [], move._send.program
    move._send.program = lambda messages: given.extend(messages) or run(messages)
    again = move(values)
    sent = [*permuted(move._send, run.lower(given).compile().as_text())]
    assert sorted(sent) == sorted((*pair, n) for pair, n in plan.matrix.items())
    assert move.sent_bytes == plan.bound
    for x, y, z, place, own in zip(values, moved, again, move.results, bits, strict=True):
        assert y.sharding == z.sharding == place
        assert all((np.asarray(one).view(np.uint32) == own).all() for one in (y, z))
        for a, b in zip(put(x, place).addressable_shards, y.addressable_shards, strict=True):
            assert a.device == b.device
            assert (np.asarray(a.data).view(np.uint32) == np.asarray(b.data).view(np.uint32)).all()


def test_an_arrow_has_its_mesh_in_its_text_and_a_mover_refuses_other_values():
    assert str(parse_arrow(ARROW)) == ARROW
    pair = {name: make_mesh(text, jax.devices()[:4]) for name, text in MESHES.items()}
    move = Mover(two_meshes([ARROW, ARROW], pair, [(64, 128)] * 2))
    placed = [jax.device_put(np.ones((64, 128), dtype), move.given[0]) for dtype in ("f4", "i4")]
    for values in (placed[:1], [placed[0], jnp.ones((64, 128))], placed):  # too few, elsewhere, two dtypes
        with pytest.raises(ValueError, match="takes .* of one dtype of 4 bytes.*given are .*float32"):
            move(values)


def batch_with_advantages():
    """Rows of which each token was drawn with another probability; those without a target do not count."""
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(0, 256, (8, 16), dtype=np.int32) for name in ("tokens", "targets")}
    ids["targets"][:, :8] = -1
    numbers = {"logprobs": rng.normal(-5.5, 0.3, (8, 16)), "advantages": rng.normal(size=(8, 16))}
    return full_rows(**ids) | {name: x.astype(np.float32) for name, x in numbers.items()}


@pytest.mark.long
def test_the_clipped_surrogate_is_its_formula_and_the_same_on_meshes_with_stages():
    batch, results = batch_with_advantages(), []
    logs = np.random.default_rng(1).normal(-5.5, 0.3, (8, 16)).astype(np.float32)
    ratio = np.exp(logs - batch["logprobs"])
    clipped = np.where(batch["advantages"] > 0, np.minimum(ratio, 1.2), np.maximum(ratio, 0.8))
    loss = llama.clipped_surrogate(jnp.asarray(-logs), jax.tree.map(jnp.asarray, batch))
    clipped[batch["targets"] < 0] = 0
    np.testing.assert_allclose(loss, -clipped * batch["advantages"], rtol=1e-5)
    for plan in (Plan("dp=1"), Plan("fsdp=2 tp=2", zero=3), Plan("pp=2 dp=2", microbatches=2)):
        step = Step(LLAMA, plan, make_mesh(plan.mesh), optax.sgd(1.0), clip=None)
        state, metrics = step.run(step.init(0), jax.device_put(batch, step.batch_sharding))
        results.append((metrics["loss"], *jax.tree.leaves(jax.device_get(step.to_model_order(state).params))))
    assert abs(results[0][0]) < 4, "the cross-entropies would be some 5.5 nats"
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.long
def test_a_sampler_learns_from_a_trainer_and_the_same_again_by_the_program_between_processes(monkeypatch):
    """Just synchronised, advantages of mean 0 give no loss; one step later trainer and sampler differ."""
    rows, made = [*Rl(steps=40).learn()], Mover.__init__

    def permuting(move, plan):
        made(move, plan)
        move._send = Permutes(plan, move.devices)

    monkeypatch.setattr(Mover, "__init__", permuting)
    assert rows[:3] == [*itertools.islice(Rl(steps=40).learn(), 3)]
    assert all(row["sent_bytes"] == row["bound_bytes"] > 0 for row in rows)
    losses = np.abs([row["loss"] for row in rows])
    assert losses[::2].max() < 1e-6 < losses[11::2].min()
    assert np.mean([row["reward"] for row in rows[-5:]]) > 0.15 > 2 * rows[0]["reward"]


def test_weights_of_which_a_round_was_left_out_are_refused_before_an_answer_is_drawn(monkeypatch):
    every = TwoMeshes.rounds.func
    monkeypatch.setattr(TwoMeshes, "rounds", property(lambda plan: every(plan)[1:]))
    with pytest.raises(ValueError, match="a transfer of the weights sent [0-9,]+ B, not 308,224"):
        next(Rl().learn())


def test_an_engine_of_few_processes_refuses_a_request_without_a_seed(monkeypatch):
    """Processes without its devices would never answer which seed is drawn."""
    engine = Engine.__new__(Engine)
    engine.mesh = make_mesh("tp=2")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="on devices of 1 of 2 processes, .*; give each request a seed"):
        engine._seeds  # noqa: B018


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_the_task_is_learned_with_each_seed(seed):
    rewards = [row["reward"] for row in Rl(seed=seed).learn()]
    assert np.mean(rewards[-20:]) > 0.95


def test_look_names_what_a_mover_and_a_device_put_between_meshes_send():
    devices = jax.devices()
    meshes = {"train": make_mesh("fsdp=2 tp=2", devices[:4]), "serve": make_mesh("tp=4", devices[4:])}
    plan = two_meshes(ARROW, meshes, (8, 16))
    move, x = Mover(plan), jnp.ones((8, 16))
    there, x = move.results[0], jax.device_put(x, move.given[0])
    shown = look(move)
    assert [row["arrow"] for row in shown.rows] == [ARROW] and "512 B from devices" in str(shown)
    assert shown.rows[0]["bytes_sent"] == max(link_loads(plan).values()) == 128
    for f in (lambda t: jax.device_put(t, there), jax.jit(lambda t: jax.device_put(t, there))):
        seen = look(f, {"w": x})
        (row,) = seen.rows
        assert row["arrow"] == "b/fsdp s/tp @first -> b s/tp @second" and row["bytes_sent"] == 128
        assert "test_two_meshes.py" in row["source"] and "no program runs on both meshes" in seen.notes[-1]
    assert look(lambda x: jax.device_put(x, there), jax.device_put(x, there)).rows == []
