"""The explorers' state: what is held and sent is what the formulas say, and a refusal says what works."""

import json
import math
import re

import pytest

from llmpar.config import PRESETS, preset
from llmpar.draw import geometry
from llmpar.draw.scene import Rect, Text, flatten, to_svg
from llmpar.explore import answers
from llmpar.notation import AXES, parse_layout, parse_mesh
from llmpar.plan import Plan
from llmpar.predict import memory, traffic, workload
from llmpar.predict.hardware import CHIPS, chip
from llmpar.predict.time import step_time
from llmpar.schedules import layer_order

TINY = answers.START | {"model": "tiny", "seq_len": 64, "chip": "a100-40"}


def total(state, kind):
    """Bytes that a device holds of one kind of tensor, by the state's own layouts."""
    heads, out = preset(state["model"]).num_kv_heads, 0
    sizes, order = geometry.parted(parse_mesh(state["mesh"]).sizes, AXES, heads)
    for row in answers.tensors(state):
        if row["kind"] == kind:
            layout = parse_layout(row["layout"][answers.mode(state)])
            cut = geometry.slices(
                layout, answers.shape_of(row, state, sizes), sizes, geometry.coordinates(sizes, order, 0)
            )
            out += row["itemsize"] * row["times"] * math.prod(b - a for a, b in cut)
    return out


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "mesh", ["dp=1", "dp=2 fsdp=2 tp=2", "fsdp=4 sp=2", "tp=8", "pp=2 dp=2 tp=2", "pp=4 fsdp=2"]
)
def test_tensors_add_up_to_the_predicted_arguments(mesh, zero):
    state = TINY | {"mesh": mesh, "zero": zero, "tp_sequence": "tp" in mesh, "microbatches": 4}
    held = memory.argument_bytes(
        answers.make_plan(state, mesh).resolve(preset("tiny")), state["batch_size"], 64
    )
    assert (total(state, "weight"), total(state, "moments")) == (held["params"], held["optimizer"])
    assert total(state, "batch") == held["batch"]
    assert dict(answers.answer(state)["memory"])["weights"] == held["params"]


@pytest.mark.parametrize("mesh", ["tp=16", "fsdp=2 tp=32"])
def test_copies_of_kv_heads_are_held_and_sent_as_predicted(mesh):
    """8 KV heads on more ranks: neighbours hold the same one, and sum its gradients over `kv`."""
    state = TINY | {"model": "llama3-8b", "mesh": mesh, "tp_sequence": True, "axis": "tp"}
    held = memory.argument_bytes(
        answers.make_plan(state, mesh).resolve(preset("llama3-8b")), state["batch_size"], 64
    )
    reply = answers.answer(state)
    assert reply["refusal"] is None
    assert (total(state, "weight"), total(state, "moments")) == (held["params"], held["optimizer"])
    assert any(row["axes"] == ["kv"] and "gradients" in row["what"] for row in reply["traffic"])
    rows, sizes = answers.tensors(state), parse_mesh(mesh).sizes
    slices = [
        {row[0]: row[2] for row in answers.device_rows(state | {"device": d}, rows, sizes, AXES)}
        for d in (0, 1)
    ]
    assert slices[0]["weight blocks.attention.k"] == slices[1]["weight blocks.attention.k"]
    assert slices[0]["weight blocks.attention.q"] != slices[1]["weight blocks.attention.q"]
    assert "tp,kv" in answers.scene(state).text


def test_a_pipeline_pads_layers_as_the_plan_does():
    for schedule in ("1f1b", "interleaved", "zb-v"):
        state = TINY | {"mesh": "pp=4", "schedule": schedule, "microbatches": 4}
        padded = len(layer_order(answers.make_plan(state, "pp=4").pipeline, 6))
        row = next(row for row in answers.tensors(state) if row["name"] == "weight blocks.ffn.gate") | {
            "shape": [6, 64, 128]
        }
        assert answers.shape_of(row, state, parse_mesh("pp=4").sizes) == [padded, 64, 128]
    pipeline = answers.answer(TINY | {"mesh": "pp=4", "microbatches": 4})
    assert any(row["axes"] == ["pp"] and "activations" in row["what"] for row in pipeline["traffic"])
    ring = answers.answer(TINY | {"mesh": "pp=2 sp=2", "microbatches": 4})
    assert ring["refusal"] is None
    assert (
        answers.answer(TINY | {"mesh": "pp=2 sp=2", "microbatches": 4, "context_parallel": "ulysses"})[
            "refusal"
        ]
        is None
    )


@pytest.mark.parametrize("mesh", ["dp=2 ep=4", "ep=2 tp=2", "fsdp=2 ep=2 sp=2"])
def test_experts_are_held_and_sent_as_predicted(mesh):
    state = TINY | {"model": "tiny-moe", "mesh": mesh, "tp_sequence": "tp" in mesh}
    reply = answers.answer(state)
    assert reply["refusal"] is None and total(state, "weight") == dict(reply["memory"])["weights"]
    assert any("experts" in row["what"] and row["axes"] == ["ep"] for row in reply["traffic"])
    assert [row["layout"]["3"] for row in answers.tensors(state) if row["name"].endswith("experts.gate")][
        0
    ].startswith("l/pp e/ep")


def test_layouts_are_the_plans_on_any_mesh():
    """Layouts are written once, for a mesh where every axis is live; sizes of one cut nothing."""
    for mesh in ("dp=2 tp=2", "fsdp=8", "pp=1 sp=2"):
        sizes = parse_mesh(mesh).sizes | {"kv": 1}
        plan = answers.make_plan(TINY, mesh)
        for row in answers.tensors(TINY):
            if row["kind"] == "weight":
                weight = preset("tiny").weights()[row["name"].partition(" ")[2]]
                dims, shape = weight.dims, weight.shape
                all_live = parse_layout(row["layout"]["3"])
                assert all_live.shard_shape(shape, sizes) == plan.resolve().stored(dims).shard_shape(
                    shape, sizes
                )


def test_traffic_is_the_prediction():
    state = TINY | {"mesh": "dp=2 fsdp=2 tp=2", "tp_sequence": True}
    plan = answers.make_plan(state, state["mesh"])
    want = traffic.step_traffic(plan.resolve(preset("tiny")), 16, 64)
    got = {
        (",".join(row["axes"]), row["kind"]): (row["count"], row["bytes"])
        for row in answers.answer(state)["traffic"]
    }
    assert got == {key: (row.count, row.bytes_sent) for key, row in want.items()}
    assert all(row["what"] and row["seconds"] > 0 for row in answers.answer(state)["traffic"])


def test_the_code_builds_the_plan():
    state = TINY | {"mesh": "fsdp=4 tp=2", "zero": 1, "tp_sequence": True}
    flag, code = answers.answer(state)["code"].splitlines()
    assert flag == '--mesh "fsdp=4 tp=2"' and eval(code, {"Plan": Plan}) == answers.make_plan(
        state, "fsdp=4 tp=2"
    )


@pytest.mark.parametrize(
    "change, words, nearest",
    [
        ({"mesh": "dp=3 tp=5"}, "batch 16 is not a multiple of dp·fsdp·ep = 3", True),
        ({"mesh": "tp=32"}, "heads 16 is not a multiple of tp = 32", True),
        ({"mesh": "dp=2 xp=2"}, "^", True),
        ({"mesh": ""}, "empty mesh", True),
        ({"mesh": "dp=509"}, "509", True),
        ({"model": "gpt5"}, "unknown model", False),
        ({"model": "deepseek-v3"}, "cannot run here", False),
        ({"mesh": "ep=2"}, "no experts in 'tiny'", True),
        ({"chip": "abacus"}, "'abacus' is not known", False),
        ({"order": "dp tp"}, "each axis once", False),
        ({"mesh": "dp=2 fsdp=-1"}, "needs the number of devices; write its size", True),
        ({"mesh": "dp=2 " * 2000}, "a mesh text of 10000 characters", True),
        ({"batch_size": 0}, "from 1 on", False),
        ({"batch_size": None}, "None", False),
        ({"microbatches": 0}, "from 1 on", False),
        ({"zero": 4}, "one of 0, 1, 2, 3", False),
        ({"schedule": "2f2b"}, "one of", False),
        ({"mesh": "dp=200000"}, "at most 131072", True),
    ],
)
def test_a_refusal_says_why_and_what_works(change, words, nearest):
    reply = answers.answer(TINY | change)
    assert words in reply["refusal"]["why"] and reply["says"].count("refused") == 1
    assert bool(reply["refusal"]["nearest"]) == nearest and len(reply["says"]) < 600
    assert nearest or reply["refusal"]["batch_size"] or reply["refusal"]["text"] == "", (
        "no advice where there is none"
    )
    if nearest:
        works = TINY | change | {"mesh": reply["refusal"]["nearest"], "order": answers.START["order"]}
        assert answers.answer(works)["refusal"] is None
    answers.scene(TINY | change)  # a picture of it, not an exception
    json.dumps(reply)


@pytest.mark.parametrize(
    "asked, near, batch",
    [
        ("dp=3 tp=5", "dp=2 tp=4", None),
        ("garbage", answers.START["mesh"], None),
        ("fsdp=7", "fsdp=4", 21),
        ("tp=3", "tp=2", None),
        ("fsdp=4096", "fsdp=16", 4096),
    ],
)
def test_advice_stays_with_the_axes_that_the_reader_named(asked, near, batch):
    """No stages for one microbatch, of which a pipeline idles most of its time, and no unasked axis."""
    refusal = answers.answer(answers.START | {"mesh": asked})["refusal"]
    assert refusal["nearest"] == near
    if batch:
        worked = answers.answer(answers.START | {"mesh": asked, "batch_size": refusal["batch_size"]})
        assert worked["refusal"] is None or asked == "fsdp=7", (
            "the other remedy: a batch that the mesh divides"
        )


def test_llama_3s_published_cluster_is_answered():
    """Grattafiori et al. 2024, table 4: 16,384 GPUs, tp 8, pp 16, dp 128."""
    state = answers.START | {
        "mesh": "pp=16 dp=128 tp=8",
        "model": "llama3.1-405b",
        "batch_size": 2048,
        "microbatches": 16,
    }
    reply = answers.answer(state)
    assert reply["refusal"] is None and "16384 devices" in reply["says"]
    drawn = answers.scene(state | {"device": 16383, "axis": "tp"})
    filled = [item for item in flatten(drawn.items) if isinstance(item, Rect) and item.fill == "tp"]
    assert len(filled) == 1, "the cell that holds the group of the last device, though not its first device"


def test_axis_order_changes_time_not_bytes():
    state = answers.START | {"mesh": "fsdp=8 tp=8", "batch_size": 64}
    inner, outer = (
        answers.answer(state | {"order": order}) for order in ("pp dp fsdp ep sp tp", "tp pp dp fsdp ep sp")
    )
    seconds = [{tuple(r["axes"]): r["seconds"] for r in reply["traffic"]} for reply in (inner, outer)]
    assert seconds[0]["tp",] < seconds[1]["tp",], "outermost, tp crosses nodes"
    assert [r["bytes"] for r in inner["traffic"]] == [r["bytes"] for r in outer["traffic"]]
    term = "tensor-parallel links"
    assert inner["time"]["terms"][term] < outer["time"]["terms"][term] / 3


def test_time_is_the_planners():
    """The seconds by term of `llmpar plan`; what is sent has its seconds at the links' own rate, too."""
    state = answers.START | {"mesh": "pp=2 fsdp=2 tp=2", "batch_size": 16, "microbatches": 8}
    reply = answers.answer(state)
    plan = Plan("pp=2 fsdp=2 tp=2", microbatches=8, remat="block", dtype="bfloat16")
    time = step_time(workload.of_plan(preset("llama3-8b"), plan, chip("h100"), 16, 4096))
    assert reply["time"]["terms"] == time.terms and reply["time"]["step_s"] == time.step_s
    assert time.terms["bubble"] > 0 and reply["says"].endswith(answers.time_words(reply["time"]))
    assert re.match(r"[\d.]+ s, \d\d\.\d% MFU \(products [\d.]+ ms, ", answers.time_words(reply["time"]))
    assert "not predicted" in answers.time_words(answers.answer(TINY | {"chip": "cpu"})["time"])


def test_a_hop_of_a_pipeline_is_between_stages_and_as_large_as_a_message():
    """32 MiB from stage to stage: 4096 tokens, width 4096, bfloat16; nothing from the last to the first."""
    state = answers.START | {"mesh": "pp=4", "batch_size": 8, "microbatches": 8}
    (row,) = [row for row in answers.answer(state)["traffic"] if row["kind"] == "collective-permute"]
    assert row["largest"] == 2**25 and row["sizes"] == 1 and row["pairs"] == [[0, 1], [1, 2], [2, 3]]
    looped = answers.answer(state | {"schedule": "interleaved"})["traffic"]
    assert [[3, 0]] == [row["pairs"][3:] for row in looped if "pairs" in row][0], "chunks come round again"
    drawn = answers.scene(state | {"axis": "pp", "row": 1, "step": 1})
    words = " ".join(t.text for t in flatten(drawn.items) if isinstance(t, Text))
    assert "One collective-permute over pp: round 1 of 1, 32 MiB a device." in words


def test_no_row_shows_a_size_that_no_collective_has():
    config = preset("llama3-8b")
    state = answers.START | {"mesh": "fsdp=8", "batch_size": 8}
    row = answers.answer(state)["traffic"][0]
    assert row["what"] == "weights" and row["sizes"] > 1
    assert row["largest"] == config.vocab_size * config.width * 2 * 7 // 8, "the embedding, in bfloat16"
    sp = answers.START | {"mesh": "sp=8", "batch_size": 1, "seq_len": 131072}
    (ring,) = [row for row in answers.answer(sp)["traffic"] if row["kind"] == "collective-permute"]
    assert ring["largest"] == 2**27 and ring["sizes"] == 2, "float32 gradients; keys with values 64 MiB"
    assert "keys and values" in ring["what"] and "ids" not in ring["what"]


def test_the_links_that_seconds_assume_are_said():
    assert "one axis of the torus of v5p" in answers.answer(answers.START | {"chip": "v5p"})["says"]
    assert "nodes of 8 devices" in answers.answer(answers.START)["says"]
    reply = answers.answer(answers.START)
    assert reply["capacity"] <= reply["whole"] == int(chip("h100").usable_hbm_gib * 2**30)
    assert "1 device of" in answers.answer(TINY | {"mesh": "dp=1"})["says"]


def test_every_model_and_chip_answers():
    assert {"deepseek-v3"} == set(PRESETS) - set(answers.MODELS)
    for name in answers.MODELS:
        for kind in (CHIPS[0].name, CHIPS[-1].name):
            reply = answers.answer(answers.START | {"model": name, "chip": kind, "mesh": "fsdp=2"})
            assert reply["refusal"] is None and all(value >= 0 for _, value in reply["memory"]), name


def test_any_six_axis_mesh_from_1_to_512_devices_has_a_picture_and_words():
    meshes = "dp=1|pp=2 dp=2 fsdp=2 ep=2 sp=2 tp=2|dp=8 fsdp=8 tp=8|dp=3 fsdp=5 tp=7|fsdp=512"
    for mesh in meshes.split("|"):
        for axis in ("", "fsdp"):
            drawn = answers.scene(TINY | {"mesh": mesh, "axis": axis, "step": 1})
            assert drawn.text.startswith(f"mesh {parse_mesh(mesh)}") and to_svg(drawn)


def test_neighbours_are_what_an_export_looks_up():
    stored = answers.neighbours(TINY, most=60)
    keys = [answers.key(one) for one in stored]
    assert len(set(keys)) == 60 and stored[0] == TINY and answers.key(TINY | {"zero": 0}) in keys


@pytest.mark.parametrize("mesh", ["ep=16 fsdp=4", "tp=2 dp=2", "dp:2,fsdp:2", "2,2,2", "!dp=2"])
def test_a_state_is_found_however_its_mesh_is_written(mesh):
    state = TINY | {"mesh": mesh, "order": "pp,dp, fsdp ep sp tp"}
    shape = str(parse_mesh(mesh))
    assert answers.key(state) == answers.key(TINY | {"mesh": shape}) == answers.answer(state)["key"]
    stored = [answers.key(one) for one in answers.neighbours(state, most=20)]
    assert stored[0] == answers.key(state) and len(set(stored)) == len(stored)


def test_what_no_mesh_can_help_is_stored_once():
    for refused in ({"model": "deepseek-v3"}, {"mesh": "garbage"}, {"batch_size": 0}):
        assert answers.neighbours(TINY | refused) == [TINY | refused]


def test_a_key_ignores_what_is_only_looked_at():
    assert answers.key(TINY) == answers.key(TINY | {"device": 3, "axis": "tp", "step": 2})
    assert (
        len({answers.key(TINY | {n: "?"}) for n in TINY if n not in answers.VIEW} | {answers.key(TINY)})
        == len(TINY) - 5 + 1
    )
