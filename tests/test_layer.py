"""One layer in time computes and sends what a step counts for it, and hides what the step's law hides."""

import dataclasses
import itertools
import random

import pytest

from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.predict import hardware, layer, workload
from llmpar.predict.time import Clock
from llmpar.predict.traffic import runs, step_traffic


def random_runs(num, seed):
    """Plans of ours on chips with rates, with the axes and fields that change what a layer sends."""
    rng, out = random.Random(seed), []
    while len(out) < num:
        config = preset(name := rng.choice(("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-30b-a3b")))
        axes = ("pp", "dp", "fsdp", "sp", "tp") + ("ep",) * bool(config.experts)
        sizes = {axis: rng.choice((1, 1, 2, 4, 8)) for axis in axes}
        fields = {"zero": rng.randrange(4), "remat": rng.choice(("none", "block")), "microbatches": 8}
        fields |= {name: rng.random() < 0.5 for name in ("tp_sequence", "tp_comm_overlap")}
        fields["context_parallel"] = rng.choice(("ring", "ulysses", "gather", "usp"))
        fields |= {"ffn_chunks": rng.choice((1, 2)), "reshard_after_forward": rng.random() < 0.7}
        mesh = " ".join(f"{axis}={n}" for axis, n in sizes.items()) or "dp=1"
        try:
            plan = Plan(mesh, dtype="bfloat16", **fields).resolve(config, None).effective
            plan.resolve(config, None, batch := 8 * plan.mesh.dp * plan.mesh.fsdp * plan.mesh.ep, 4096)
        except ValueError:
            continue
        chip = hardware.chip(rng.choice(("h100", "b200", "v5p")))
        out.append((name, workload.of_plan(config, plan, chip, batch, 4096)))
    return out


RUNS = random_runs(20, 3)


@pytest.mark.parametrize("name, run", RUNS, ids=[f"{name} {run.mesh}" for name, run in RUNS])
def test_a_layer_in_time_is_what_the_step_counts(name, run):
    segments, clock = layer.layer_segments(run), Clock(run)
    terms = dict(clock.layer(False, 0.0)[0].terms)
    computed = [one for one in segments if one.lane == "compute"]
    travels = [one for one in segments if one.lane != "compute"]
    took = sum(one.end_s - one.start_s - one.exposed_s for one in computed)
    assert took == pytest.approx(sum(terms.values())), "a forward pass without links"
    assert [one.name for one in computed] == list(layer.COMPUTED)

    # what a step sends more when one more layer runs forward
    def step(**more):
        now = runs(clock.plan, run.seq_len)[0]
        now = dataclasses.replace(now, **{name: getattr(now, name) + n for name, n in more.items()})
        return step_traffic(clock.plan, run.batch_size, run.seq_len, run=now)

    few, more = step(), step(forward=1, matrices=1, vectors=1)
    for key, row in more.items():
        mine = [one for one in travels if (",".join(one.axes), one.kind) == key]
        less = few.get(key)
        assert sum(one.times for one in mine) == row.count - (less.count if less else 0), key
        assert sum(one.bytes_sent for one in mine) == row.bytes_sent - (less.bytes_sent if less else 0), key
        assert {one.group for one in mine} <= {row.group_size}

    # the whole takes what the law of a step makes of these seconds
    links = dict[tuple[str, str], float]()
    for key, row in step(forward=1, matrices=1, vectors=1).items():
        less = few.get(key)
        for message, times in row.messages.items():
            extra = times - (less.messages[message] if less else 0)
            of = message.term, message.hidden_by
            links[of] = links.get(of, 0.0) + extra * clock.message(row, message)
    open_s = 0.0
    for (term, hidden_by), seconds in sorted(links.items()):
        beside = terms.get(hidden_by, sum(terms.values())) if hidden_by else 0.0
        open_s += max(0.0, seconds - beside)
        terms[term] = terms.get(term, 0.0) + clock.exposed(seconds, beside, hidden_by != "")
    waits = sum(one.exposed_s for one in travels)
    assert waits == pytest.approx(open_s)
    assert sum(one.end_s - one.start_s for one in computed) + waits == pytest.approx(sum(terms.values()))
    assert all(one.start_s >= 0 and one.exposed_s <= 1.0001 * (one.end_s - one.start_s) for one in segments)
    for one, other in itertools.pairwise(computed):
        assert other.start_s - one.end_s <= waits + 1e-9
    waited = lambda one: one.exposed_s > 0.999 * (one.end_s - one.start_s)
    for lane, alone in {(one.lane, waited(one)) for one in travels}:
        mine = [one for one in travels if one.lane == lane and waited(one) == alone]
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in itertools.pairwise(mine)), lane


def test_a_layer_in_time_needs_seconds():
    config = preset("tiny")
    run = workload.of_plan(config, Plan("dp=1").resolve(config, None).effective, hardware.chip("cpu"), 8, 64)
    with pytest.raises(ValueError, match="cpu"):
        layer.layer_segments(run)
