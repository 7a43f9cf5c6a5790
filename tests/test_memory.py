"""The memory formula against compilers of clusters (`compare_memory.py`) and small programs of CPUs."""

import dataclasses
import json
import statistics

import compare_memory
import jax
import optax
import pytest
from compare_memory import argument_bytes as given
from shared import TABLES

from llmpar import Plan, Step, make_mesh
from llmpar.inspect.census import compiled_memory
from llmpar.pipeline import executor
from llmpar.plan.model_config import LoraConfig, from_dict
from llmpar.plan.presets import described_model, preset
from llmpar.predict import memory
from llmpar.predict.hardware import chip
from llmpar.predict.workload import POLICIES

RECORD = json.loads(compare_memory.RECORD.read_text())
H100, V5E, V5P = "h100:8x8", "v5e:4x8", "v5p:4x4x4"
GIB = 2**30
ROOM = 1.5 * chip("h100").usable_bytes
COMPARED = [name for name, row in RECORD[H100]["plans"].items() if row["temp"] < ROOM]
"""What is too large by a half is left out: there the compiler computes again what the program keeps."""


def errors(target):
    """Of the formula, by plan; for GPUs of those in `COMPARED`."""
    rows = RECORD[target]["plans"]
    cases = [c for c in compare_memory.cases(target) if c.name in rows and not rows[c.name]["refused"]]
    cases = [c for c in cases if compare_memory.devices_of(target) == "tpu" or c.name in COMPARED]
    return {case.name: compare_memory.formula(case, target) / rows[case.name]["temp"] - 1 for case in cases}


OTHER_GPUS = {"a100-80:8x8": 0.28, "l4:8x8": 0.28, "b200:8x8": 0.25, "t4:8x8": 0.45}
LAWS = dict.fromkeys((H100, V5E, V5P), (0.18, 0.05, 0.9))
LAWS |= {name: (most, 0.08, 0.67) for name, most in OTHER_GPUS.items()}
"""The largest error, the median, and the share of plans within 15 %. The last four had no say in it."""


@pytest.mark.parametrize("target", LAWS)
def test_the_formula(target):
    """T4s have no bfloat16, and XLA computes in float32; B200s hold the gradient of all logits twice."""
    most, median, share = LAWS[target]
    found = errors(target)
    assert len(found) > 12 and not {name: f"{e:+.1%}" for name, e in found.items() if abs(e) > most}
    assert statistics.median(map(abs, found.values())) <= median
    assert sum(abs(e) <= 0.15 for e in found.values()) >= share * len(found)


@pytest.mark.parametrize("device", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("fields", [{"num_layers": 1}, {"zero": 1}, {"mesh": "pp=2", "microbatches": 2}])
def test_no_policy_holds_less_than_the_last(fields, device):
    fields = dict(fields)
    config = dataclasses.replace(preset("llama2-7b"), num_layers=fields.pop("num_layers", 4))
    plans = (Plan(remat=remat, **fields).resolve(config, device) for remat in POLICIES)
    sizes = [memory.parts_bytes(plan, 8, 128)["total"] for plan in plans]
    assert min(sizes) == sizes[-1], sizes


def test_arguments_are_exact():
    for target, kept in RECORD.items():
        for case in compare_memory.cases(target):
            row = kept["plans"].get(case.name, {})
            if "arguments" in row:
                padding = 1e-3 * (compare_memory.devices_of(target) == "tpu")  # vectors of whole tiles
                assert row["arguments"] == pytest.approx(given(case), rel=padding, abs=0), case.name


def test_bytes_are_exact():
    """Per axis, collective and arrow, in every program that a compiler took."""
    rows = {(target, name): row for target in RECORD for name, row in RECORD[target]["plans"].items()}
    taken = {name: row["as_predicted"] for name, row in rows.items() if not row["refused"]}
    assert len(taken) >= 220 and [name for name, same in taken.items() if not same] == []


def verdicts(target, capacity):
    """Cases that are called feasible and are not, or too large and fit with 10 % to spare."""
    rows, wrong = RECORD[target]["plans"], []
    for case in compare_memory.cases(target):
        if (row := rows.get(case.name)) is None:
            continue
        predicted = given(case) + compare_memory.formula(case, target)
        needs = row["total"] if row["refused"] else given(case) + row["temp"]
        if predicted <= capacity and needs > capacity:
            wrong.append(f"{case.name} is called feasible")
        if predicted > capacity and needs <= 0.9 * capacity:
            wrong.append(f"{case.name} is refused")
    return wrong


@pytest.mark.parametrize("gib", [59.3, 75.1, 79.1])  # what JAX takes by default, at .95, and all there is
def test_verdicts_on_a_gpu(gib):
    """But one plan, of 75.6 GiB where there are 75.1; the planner refuses it: it leaves `FREE_SHARE` free."""
    assert verdicts(H100, gib * GIB) == ["pp4-zb-h1 is called feasible"] * (gib == 75.1)


@pytest.mark.parametrize("target", [V5E, V5P])
def test_verdicts_on_a_tpu(target):
    """The compiler refuses there itself."""
    capacity = chip(target.partition(":")[0]).usable_bytes
    rows = RECORD[target]["plans"].values()
    assert len(rows) >= 20 and all(row["total"] > capacity for row in rows if row["refused"])
    assert not verdicts(target, capacity)


SMALL, SHAPE = dataclasses.replace(preset("tiny"), num_layers=3), (2, 256)


def foretold(plan: Plan, config=SMALL) -> int:
    """Bytes of temporaries on one CPU."""
    return memory.temp_bytes(plan.resolve(config, "cpu"), *SHAPE)


def compiled(plan: Plan) -> int:
    step = Step(SMALL, plan, make_mesh(plan.mesh), optax.sgd(0.1))
    return compiled_memory(step.lower(*SHAPE).compile())["temp_bytes"]


@pytest.mark.long
def test_a_policy_keeps_what_it_says_it_keeps():
    """All results of matmuls but those that nothing reads again: 11.5 times the stream of Llama 3 8B."""
    llama = Plan("fsdp=8", dtype="bfloat16").resolve(preset("llama3-8b"), "gpu")
    mib = {name: size / 2**20 for name, size in memory.kept_bytes(llama, 8, 8192).items()}
    assert mib | {"selective": 736, "ffn": 288, "block": 64} == mib
    selective, block = (Plan("dp=1", remat=remat) for remat in ("selective", "block"))
    kept = memory.kept_bytes(block.resolve(SMALL, "cpu"), *SHAPE)
    sums = 4 * SMALL.num_heads * 2 * 256
    more = 3 * (kept["selective"] - kept["block"] + sums)
    assert compiled(selective) - compiled(block) == pytest.approx(more, rel=1e-3)


def test_what_is_kept_is_what_gradients_of_trained_weights_read():
    """Of a layer whose adapters are beside q and v, and beside one more matrix."""

    def kept(*more):
        config = dataclasses.replace(SMALL, head_width=8, lora=LoraConfig(4, 4.0, ("q", "v", *more)))
        return memory.kept_bytes(Plan("fsdp=1").resolve(config, "gpu"), *SHAPE)["none"]

    numbers = {"o": 8 * SMALL.num_heads, "gate": SMALL.width, "down": SMALL.ffn_width}
    assert {name: (kept(name) - kept()) / (4 * 2 * 256) for name in numbers} == numbers


def test_attention_by_xla_keeps_its_scores_where_nothing_is_computed_again():
    """Squares of queries and keys, of every layer: of 8B at 4,096 positions 4.5 GiB each."""
    assert foretold(plan := Plan("dp=1", attention_kernel="xla")) == pytest.approx(compiled(plan), rel=0.2)
    llama = preset("llama3-8b")
    xla, flash = (Plan("fsdp=8", dtype="bfloat16", attention_kernel=name) for name in ("xla", "flash"))
    kept = [memory.kept_bytes(one.resolve(llama, "gpu"), 8, 4096) for one in (xla, flash)]
    assert kept[0]["none"] - kept[1]["none"] == 32 * 4096**2 * 9 and kept[0]["ffn"] == kept[1]["ffn"]


@pytest.mark.long
def test_layers_that_cpus_write_out_recompute_nothing():
    """XLA finds what a loop would compute again: no policy holds less. (JAX 0.12's holds a quarter less.)"""
    error = 0.25 if jax.__version_info__ < (0, 12) else 0.4
    for plan in (Plan("dp=1", remat="block", unroll=0), Plan("dp=1", remat="ffn", unroll=2)):
        assert foretold(plan) == pytest.approx(compiled(plan), rel=error)
    once = dataclasses.replace(SMALL, num_layers=1)
    assert len({foretold(Plan("dp=1", remat=remat), once) for remat in ("selective", "ffn", "block")}) == 1


IN_SLOTS = TABLES["in_slots"]


@pytest.mark.parametrize("name", IN_SLOTS)
def test_what_a_slot_holds_is_what_is_traced(name, monkeypatch):
    """Bytes of what F keeps and of what W gets, by the types of the traced program; nothing is compiled."""
    model, layers, fields = IN_SLOTS[name]
    config = dataclasses.replace(preset(model), num_layers=layers)
    plan = Plan("pp=2 tp=2", microbatches=4, dtype="bfloat16", **{"stage_saves": "residuals"} | fields)
    step, traced = Step(config, plan, make_mesh(plan.mesh), optax.sgd(1.0)), {}

    def spied(*args):
        made = programs(*args)
        size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
        traced.update(saved=size(made[1]), left=size(made[2]))
        raise InterruptedError  # the loop over ticks tells no more

    programs = executor.programs
    monkeypatch.setattr(executor, "programs", spied)
    with pytest.raises(InterruptedError):
        jax.jit(step.gradients).trace(step.abstract_state.params, step.abstract_batch(4, 2048))
    parts = {what: size for what, _, size in memory.temp_parts(step.plan, 4, 2048)}
    near = lambda size: pytest.approx(size, rel=0.15, abs=1)
    assert parts["what a stage keeps of a microbatch on its way"] == near(traced["saved"])
    if "zb" in name and not config.experts:  # CPUs have another layout of experts' rows
        assert parts["what weights' gradients wait for"] == near(traced["left"])


def test_random_plans_that_the_formula_once_missed():
    """What XLA's compiler for an H100 said of plans by lot that were once off by more than 1.4 times."""
    rows = json.loads(compare_memory.RECORD.with_name("missed_memory.json").read_text())
    for row in rows:
        config = described_model("by lot", row["file"]) if "file" in row else from_dict(row["config"])
        plan = Plan(row["mesh"], **row["plan"]).resolve(config, "gpu 9.0")
        arguments = sum(memory.argument_bytes(plan, *row["batch"]).values())
        assert arguments == row["arguments"], row["seed"]
        needs = arguments + row["temporaries"]
        assert 1 / 1.4 < (arguments + memory.temp_bytes(plan, *row["batch"])) / needs < 1.4, row["seed"]
