"""Models that are planned alone: priced as models that run, and kinds of layers add up to one model."""

import dataclasses
import json
import math
import pickle
import random

import pytest
from shared import CASES, HERE

from llmpar.plan import checks, families, places
from llmpar.plan.config_json import write_config
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS, described_model
from llmpar.planner import planner
from llmpar.predict import memory, serving, traffic
from llmpar.predict.hardware import chip
from llmpar.predict.parameters import notes_on, params_of_a_layer, with_further
from llmpar.predict.time import HEAD_AND_LOSS, step_time
from llmpar.predict.workload import Run, of_plan

H100 = chip("h100")
PUBLISHED = json.loads((HERE / "families.json").read_text())["published"]
PLANNED = [name for name, config in PRESETS.items() if not config.runs]
MESHES = "dp=2 fsdp=4", "fsdp=2 sp=2 tp=2", "pp=2 fsdp=2 tp=2", "pp=4 sp=2"
"""Of eight devices."""


NAMES = "qwen2.5-14b", "qwen3-0.6b", "qwen3-30b-a3b"
RUNNING = {name: dataclasses.replace(PRESETS[name], num_layers=8) for name in NAMES}
EQUAL = [(name, mesh) for name in RUNNING for mesh in MESHES]
EQUAL += [("qwen3-30b-a3b", mesh) for mesh in ("fsdp=2 ep=4", "ep=2 tp=2 sp=2")]


def twin(config: ModelConfig) -> ModelConfig:
    return described_model(config.name, write_config(dataclasses.asdict(config)))


def in_two_kinds(config: ModelConfig) -> ModelConfig:
    """The same planned model as if its layers were of two kinds, in an order with a lead and a period."""
    kinds = tuple(dataclasses.replace(config, num_layers=1) for _ in range(2))
    return dataclasses.replace(config, kinds=kinds, lead=(1, 1), period=(0, 1, 1, 1))


def quantities(config: ModelConfig, mesh: str, **fields) -> dict:
    """What is predicted of a step: bytes by part, messages by axes and kind, FLOPs, seconds by term."""
    plan = Plan(mesh, dtype="bfloat16", loss_chunks=8, **fields).resolve(config, "gpu", 64, 8192)
    run = of_plan(config, plan, H100, 64, 8192)
    sent = [traffic.step_traffic(plan, 64, 8192, stage) for stage in range(plan.mesh.pp)]
    return {
        "params": (config.num_params, config.active_params),
        "memory": memory.parts_bytes(plan, 64, 8192),
        "sent": [{key: row.bytes_sent for key, row in one.items()} for one in sent],
        "executions": [{key: row.count for key, row in one.items()} for one in sent],
        "flops": run.flops(),
        "seconds": step_time(run).terms,
        "closed form": step_time(run, simulate=False).terms,
    }


def assert_equal(one, other, rel=1e-9):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert value == pytest.approx(other[name], rel=rel), name
        else:
            assert value == (pytest.approx(other[name], rel=rel) if name == "flops" else other[name]), name


@pytest.mark.parametrize("name, mesh", EQUAL)
def test_a_planned_model_is_priced_as_the_one_that_runs(name, mesh):
    config = RUNNING[name]
    fields = {"microbatches": 8} if "pp=" in mesh else {}
    if "tp=" in mesh:
        fields |= {"tp_sequence": True}
    assert_equal(quantities(config, mesh, **fields), quantities(twin(config), mesh, **fields))


@pytest.mark.parametrize("name, mesh", [pair for pair in EQUAL if "pp=4" not in pair[1]])
def test_kinds_of_layers_add_up_to_the_model(name, mesh):
    """But not on four stages: one of two layers is no loop."""
    whole = twin(RUNNING[name])
    # a stage has one period of two kinds, and so no loop; what it saves is stacked as a loop's
    fields = {"microbatches": 8, "stage_saves": "residuals"} if "pp=" in mesh else {}
    one, two = (quantities(x, mesh, **fields) for x in (whole, in_two_kinds(whole)))
    for quantity in (one, two):  # what is summed at the end has more arrays, each with a start
        del quantity["executions"], quantity["seconds"][traffic.LATE]
        if "pp=" not in mesh:  # and of two blocks of an iteration one waits for the other's
            for part in ("activations", "copies", "total"):
                del quantity["memory"][part]
    assert_equal(one, two)


@pytest.mark.parametrize("name", PLANNED)
def test_the_parts_of_a_planned_model_add_up(name):
    """Layers, parameters, and the stages of a pipeline; what is trained is counted once on each mesh."""
    config, rng = PRESETS[name], random.Random(name)
    assert sum(count for count, _ in config.blocks) == config.num_layers == len(config.layer_kinds)
    of_blocks = sum(count * params_of_a_layer(block) for count, block in config.blocks)
    ends = sum(math.prod(w.shape) for p, w in config.weights().items() if not p.startswith("blocks."))
    assert of_blocks + ends == config.num_params >= config.active_params > 0
    start = rng.randrange(config.num_layers)
    halves = config.count_kinds(0, start), config.count_kinds(start, config.num_layers)
    assert [a + b for a, b in zip(*halves, strict=True)] == [count for count, _ in config.blocks]
    plan = Plan("pp=4 fsdp=2", microbatches=8).resolve(config, "gpu", 32, 4096)
    table = places.chunk_places(config.layer_kinds, 4)
    filled = [(place.kind, layer) for place in table for layer in place.layers if layer >= 0]
    assert sorted(filled, key=lambda pair: pair[1]) == [(k, i) for i, k in enumerate(config.layer_kinds)]
    assert all(4 * n >= count for n, (count, _) in zip(plan.places_per_stage, config.blocks, strict=True))
    one = Plan("fsdp=1").resolve(config, "gpu", 8, 4096)
    assert memory.argument_bytes(one, 8, 4096)["params"] == 4 * config.num_params
    cut = memory.argument_bytes(Plan("fsdp=8").resolve(config, "gpu", 8, 4096), 8, 4096)["params"]
    assert config.num_params / 2 <= cut <= 1.02 * config.num_params / 2, "padded, and vectors not all cut"
    to_serve = serving.decode_seconds(config, H100, 8, 8192, 8)
    assert 0 < sum(to_serve.values()) < 0.1 and min(to_serve.values()) >= 0
    there = pickle.loads(pickle.dumps(dataclasses.replace(config)))  # with its blocks, to other processes
    assert there == config and hash(there) == hash(config)


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_model_says_that_it_does_not_run(name):
    config = PRESETS[name]
    with pytest.raises(ValueError, match=rf"'{name}' cannot run here: .* not implemented; 'llmpar plan'"):
        config.must_run()
    assert notes_on(config)[0].startswith(f"'{name}' is planned, and does not run here: ")


def sent(plan, value):
    """The messages of this kind, of 8 rows of 8,192 tokens, and how often each is sent."""
    rows = traffic.step_traffic(plan, 8, 8192).values()
    return [pair for row in rows for pair in row.messages.items() if pair[0].value == value]


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3"])
@pytest.mark.parametrize("way", ["ring", "gather"])
def test_what_heads_share_is_all_that_a_sequence_sends(name, way):
    """576 numbers a token and layer, and no more for 64 heads than for 128."""
    config = PRESETS[name]
    plan = Plan("sp=4 fsdp=2", dtype="bfloat16", context_parallel=way).resolve(config, "gpu", 8, 8192)
    message, times = next((m, n) for m, n in sent(plan, "keys and values") if m.num_bytes > 0)
    tokens = 4 * 8192 // 4
    local = tokens * 576 * 2
    assert message.num_bytes == local * (4 if way == "gather" else 1)
    assert times == (2 if way == "ring" else 1) * 61 * (3 if way == "ring" else 1)


FURTHER_KEYS = "num_nextn_predict_layers", "mtp_num_hidden_layers"
FURTHER = ["deepseek-ai--DeepSeek-V3", "Qwen--Qwen3.5-35B-A3B", "XiaomiMiMo--MiMo-7B-Base"]


@pytest.mark.parametrize("name", FURTHER)
def test_layers_for_further_tokens_are_counted_where_the_file_has_some(name):
    """A layer like the last, a join of twice the width, three norms, a second use of embedding and head."""
    raw = next(families.text_part(case["config"]) for case in PUBLISHED if name in case["names"])
    bare = {key: x for key, x in raw.items() if key not in FURTHER_KEYS}
    config, without = described_model(name, raw), described_model(name, bare)
    assert with_further(without) is without and config.num_params == without.num_params
    more, last, d = with_further(config), config.blocks[config.layer_kinds[-1]][1], config.width
    assert with_further(more) is more and more.layer_kinds[: config.num_layers] == config.layer_kinds
    new = [more.blocks[kind][1].block_weights() for kind in more.layer_kinds[config.num_layers :]]
    assert new == [last.block_weights()]
    added = params_of_a_layer(last) + 2 * d * d + 3 * d
    assert more.num_params - config.num_params == added
    rows = [row for row in last.block_weights().values() if not row.is_vector]
    visited = last.experts.top_k / last.experts.num_experts if last.experts else 0
    read = sum(math.prod(row.shape) * (visited if row.dims.startswith("experts ") else 1) for row in rows)
    products = 6 * (read + 2 * d * d + config.vocab_size * d)
    scores = 6 * last.num_heads * (last.head_width + last.value_width) * 512
    runs = [Run(x, H100, Plan("fsdp=8").mesh, 512) for x in (config, more)]
    assert runs[1].flops() - runs[0].flops() == pytest.approx((products + scores) * runs[0].tokens_per_step)
    one, two = (quantities(x, "fsdp=8") for x in (config, more))
    assert 2 < two["seconds"][HEAD_AND_LOSS] / one["seconds"][HEAD_AND_LOSS] < 2.5
    assert two["memory"]["params"] - one["memory"]["params"] == pytest.approx(4 * added / 8, rel=1e-3)
    assert two["memory"]["activations"] > one["memory"]["activations"]
    said = [[note for note in notes_on(x) if "(MTP)" in note] for x in (config, more, without)]
    others = [[note for note in notes_on(x) if "(MTP)" not in note] for x in (config, more)]
    assert others[0] == others[1]  # of parameters what it holds without them
    assert "are not counted" in said[0][0] and "training here leaves them out" in said[1][0] and not said[2]


@pytest.mark.parametrize("name, kind, devices, batch, seq, mesh", CASES["planned_questions"])
def test_the_planner_offers_no_command_that_would_be_refused(name, kind, devices, batch, seq, mesh):
    q = planner.Question(PRESETS[name], chip(kind), devices, batch, seq, Plan(mesh).mesh.user_sizes)
    answer = planner.document(planner.decide(q))
    best = answer["plans"][0]
    assert best["fits"] and 0.02 < best["mfu"] < 0.9
    runs = not checks.why_not_run(Plan(mesh).resolve(q.config, None))
    assert runs == (name in ("deepseek-v3", "gpt-oss-120b"))
    assert [bool(best[key]) for key in ("train", "compile", "launch")] == [runs] * 3


SHARED = [("qwen3.5-27b", 8, 4, 256, 16), ("gemma-4-31b", 8, 4, 512, 10), ("mimo-v2-flash", 8, 4, 192, 9)]


@pytest.mark.parametrize("name, tp, heads, width, layers", SHARED)
def test_a_kind_with_fewer_kv_heads_than_tp_has_copies_of_them(name, tp, heads, width, layers):
    """On the links and in the cache of a rank is a head of each kind."""
    config = PRESETS[name]
    kinds = [(n, c) for n, c in config.blocks if c.mixer == "attention" and c.num_kv_heads == heads]
    assert sum(n for n, _ in kinds) == layers and heads < tp
    plan = Plan(f"sp=2 tp={tp}", dtype="bfloat16").resolve(config, "gpu", 8, 8192)
    sizes = [message.num_bytes for message, times in sent(plan, "keys and values") if times]
    tokens = 8 * 8192 // 2
    assert (tokens * (width + kinds[0][1].value_width) * 2) in sizes
    device = dataclasses.replace(config, num_layers=1, lead=(), period=(config.kinds.index(kinds[0][1]),))
    read = serving.decode_seconds(device, H100, 1, 100, tp)["keys and values read"]
    assert read == pytest.approx(4 * serving.decode_seconds(device, H100, 1, 25, tp)["keys and values read"])
    whole = serving.decode_seconds(device, H100, 1, 100, 1)["keys and values read"]
    assert read == pytest.approx(whole / heads)


@pytest.mark.parametrize("tp, which, heads", [(2, "KV", 2), (8, "query", 3)])
def test_ranks_of_sp_exchange_heads_that_each_layer_has(tp, which, heads):
    config = PRESETS["qwen3.5-27b"]
    assert config.exchanged_heads(tp) == (which, heads)
    with pytest.raises(ValueError, match=f"the {heads} {which} heads of a device by sp = 4"):
        Plan(f"sp=4 tp={tp}", context_parallel="ulysses").resolve(config, "gpu", 8, 8192)
