"""The plan: where each dim is cut in each region, what ZeRO cuts, and what is refused at once."""

import collections
import dataclasses
import json
import re
import shlex
from typing import get_args, get_type_hints

import plans
import pytest
from parity import LLAMA
from shared import CASES, HERE, TABLES

from llmpar import Plan, preset
from llmpar.cli import main
from llmpar.cli.commands import parse
from llmpar.cli.options import notes_of
from llmpar.plan.layout import Arrow
from llmpar.plan.mesh_shape import MeshShape
from llmpar.plan.plan import Resolved, WeightLayouts
from llmpar.planner import planner
from llmpar.predict import memory
from llmpar.predict.traffic import step_traffic

MIXED = "dp=2 fsdp=2 tp=2"


def arrows(arrow: Arrow) -> list[str]:
    return [str(move) for move in arrow.moves]


def test_the_table_of_regions_is_what_a_plan_gives():
    """Its cells are axes, and dims that tp cuts; ``[,tp]`` with tp_sequence."""
    plans = [Plan("dp=2 fsdp=2 ep=2 sp=2 tp=2", tp_sequence=cut).resolve() for cut in (False, True)]
    lines = [line[8:] for line in Resolved.regions.__doc__.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line.startswith("    region "))
    (_, b, s, other), *rows = [
        [line[i:j].strip(" ()") for i, j in ((4, 16), (16, 30), (30, 40), (40, 52))]
        for line in lines[begin : lines.index("", begin)]
    ]
    assert (b, s, other) == ("b", "s", "by tp")
    for region, b, s, other in rows:
        for plan in plans:
            positions = s.replace("[,tp]", ",tp" if plan.tp_sequence else "")
            want = {"b": b, "s": positions} | dict.fromkeys(other.split(), "tp")
            if region in ("experts", "slots", "nodes"):
                want["e"] = "ep"  # in words: the table has no column for e
            table = plan.regions[region].items()
            found = {dim: ",".join(axes) for dim, axes in table if axes}
            assert found == {dim: axes for dim, axes in want.items() if axes}
    assert {region for region, *_ in rows} == plans[0].regions.keys()


DIMS = "ffn l d m"


def test_the_table_of_a_weights_layouts_is_what_a_plan_gives():
    """Per stage of ZeRO: stored, used, unreduced, accumulated, reduced of `ffn d m` on dp, fsdp and tp."""
    rows = [re.split("  +", line.strip()) for line in WeightLayouts.__doc__.splitlines()]
    table = {cells[0]: cells[1:] for cells in rows if cells[0] in ("0", "1", "2", "3")}
    for zero in range(4):
        layouts = Plan(MIXED, zero=zero).resolve().layouts_of("ffn d m")
        layouts = layouts.stored, layouts.used, layouts.unreduced, layouts.accumulated, layouts.reduced
        assert table[str(zero)] == list(map(str, layouts))


REFUSED = (HERE / "refused.txt").read_text().splitlines()
"""What is asked as `plans.parse` reads it (with fields of the model, batch and seq), and what is said."""


def refusal(plan: Plan, config=LLAMA, batch=16, seq=16) -> str:
    with pytest.raises(ValueError) as caught:
        plan.resolve(config, None, batch, seq)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_compiled(line):
    words, said = line.split(" | ")
    asked = plans.parse(words)
    take = lambda names: {name: asked.pop(name) for name in names if name in asked}
    config = plans.MODELS.get(name := asked.pop("model")) or plans.family(name)
    config = dataclasses.replace(config, **take([field.name for field in dataclasses.fields(config)]))
    sizes, mesh = take(["batch", "seq"]), MeshShape(**take(plans.AXES))
    assert said in refusal(Plan(mesh, **asked), config, **sizes)


OTHER = TABLES["plan_refuses"]


def test_every_field_refuses_what_its_type_does_not_have():
    """A misspelt choice was silently another strategy: every branch of the package reads `else` for it."""
    assert set(OTHER) == {f.name for f in dataclasses.fields(Plan)} - {"mesh"}
    for field, value in OTHER.items():
        plan = Plan()
        object.__setattr__(plan, field, value)  # past the checked signature, which the tests alone have
        with pytest.raises(ValueError, match=re.escape(f"{field} is {json.dumps(value)}; use ")):
            plan.__post_init__()


IDLE = TABLES["plan_idle"]


@pytest.mark.parametrize("field", IDLE)
def test_an_option_that_changes_nothing_is_said_with_the_reason_and_left_out(field):
    plan = Plan(**IDLE[field])
    without = dataclasses.replace(plan, **{field: getattr(Plan(), field)})
    decided = plan.resolve(LLAMA)
    (said,) = [line for line in decided.notes if line.startswith(f"{field}=")]
    assert said.startswith(f"{field}={IDLE[field][field]!r} changes nothing: ")
    assert dataclasses.replace(decided, requested=without) == without.resolve(LLAMA)
    assert not any(line.startswith(f"{field}=") for line in without.resolve(LLAMA).notes)
    if "schedule" not in IDLE[field] or field == "schedule":  # else the schedule itself may be wrong
        assert plan.resolve(LLAMA, None).effective == without


SWEPT = {  # of every field each other choice
    field.name: tuple(one for one in get_args(get_type_hints(Plan)[field.name]) if isinstance(one, str | int))
    for field in dataclasses.fields(Plan)
    if field.name != "mesh"
}
SWEPT |= dict(tp_sequence=(True,), tp_comm_overlap=(True,), reshard_after_forward=(False,), bucket_bytes=(1,))
SWEPT |= dict(tp_dispatch=(True,), expert_copies=(1,), ep_node=(2,))
SWEPT |= dict(microbatches=(2, 4), loss_chunks=(2,), ffn_chunks=(2,), virtual_stages=(2,), unroll=(0,))
SWEPT |= dict(schedule=("gpipe", "interleaved", "zb-h1"), attention_block=(4,))
UNSEEN = {"mode", "attention_kernel", "attention_block", "dispatch", "hop", "sequence_order", "matmul_dtype"}
"""What changes the program, but nothing of it that a formula counts."""


def counted(plan: Plan, config) -> list:
    """What formulas know of a plan's program: what lies where, what moves, what is held."""
    runs = plan.resolve(config, "gpu")
    sent = {str(key): str(row) for key, row in step_traffic(runs, 16, 128, 0).items()}
    lives = {path: layouts for path, (_, layouts) in runs.layouts_by_path.items()}
    at_once = runs.microbatches, runs.loss_chunks, runs.gather_per
    return [at_once, runs.regions, lives, runs.pipeline, sent, memory.parts_bytes(runs, 16, 128)]


@pytest.mark.parametrize("mesh", ["dp=1", "dp=4", "fsdp=4", "tp=2", "sp=2", "pp=2", "ep=2"])
def test_a_field_that_changes_nothing_of_the_program_is_named_and_no_other_is(mesh):
    config = preset("tiny-moe" if mesh == "ep=2" else "tiny")
    base = Plan(mesh, dtype="bfloat16", microbatches=2 if mesh == "pp=2" else 1)
    before = counted(base, config)
    for field, value in ((name, value) for name, values in SWEPT.items() for value in values):
        plan = dataclasses.replace(base, **{field: value})
        try:
            plain = plan.resolve(config, None, 16, 128)
            decided = plan.resolve(config, "gpu")
        except ValueError:
            continue
        named = any(line.startswith(f"{field}={value!r} changes nothing: ") for line in decided.notes)
        same = plan != base and counted(plan, config) == before
        if field not in UNSEEN and (field, value) != ("zero", 0):  # 0 asks that nothing be cut
            assert named == same, (field, value, decided.notes)
        before_devices = notes_of(plain, [field])
        assert any(line.startswith(f"{field}=") for line in before_devices) >= named, field


GIVEN = CASES["flags_given"]


@pytest.mark.parametrize("line", GIVEN)
def test_a_flag_that_decides_nothing_is_said_also_where_it_is_the_default(line, capsys):
    parse(line.split()).step.settle(8)
    said = capsys.readouterr().err
    assert said.startswith(GIVEN[line]) and said.count("\n") == bool(GIVEN[line])


CUDNN = TABLES["auto_attention"]


@pytest.mark.parametrize("words", CUDNN)
def test_auto_is_cudnn_on_gpus_where_it_needs_no_mask(words):
    """Who asks for a kernel that a GPU before Ampere, or of AMD, lacks, is told."""
    given = dict(documents="whole", dtype="bfloat16", devices="gpu 9.0", head_width="128", mesh="fsdp=2")
    given |= {name: value for name, _, value in (word.partition("=") for word in words.split())}
    config = dataclasses.replace(preset("tiny"), head_width=int(given.pop("head_width")))
    devices = given.pop("devices").replace("_", " ")
    found = Plan(**given).resolve(config, devices)
    assert found.attention_kernel == CUDNN[words]
    reads = CUDNN[words] == "cudnn" or given["documents"] == "packed"
    assert reads != any(line.startswith("documents=") for line in found.notes)
    lacks = {"gpu 7.5": ("flash", "cudnn", "xla"), "gpu gfx942": ("flash", "cudnn")}
    for kernel in lacks.get(devices, ()):
        said = rf"8.0 \(Ampere\) or newer, and here is {devices[4:]}; use .*='por"
        with pytest.raises(ValueError, match=said):
            Plan(**given | {"attention_kernel": kernel}).resolve(config, devices)


LEAST = "--model 'tiny num_layers=1' --mesh fsdp=2 --batch-size 2 --seq-len 8"
COMMANDS = {
    f"train {LEAST} --steps 1 --data text": 1,
    f"inspect {LEAST} --tolerance --json": 1,
    "plan --model tiny --devices 8 --chip h100 --batch-size 8 --seq-len 128 --json --fix zero=2": None,
}


@pytest.mark.parametrize("command, num_plans", COMMANDS.items(), ids=("train", "inspect", "plan"))
def test_a_command_decides_a_plan_once(command, num_plans, tmp_path, monkeypatch, capsys):
    """Counts `Plan.resolve`; what is resolved passes through `Resolved.resolve`."""
    (tmp_path / "text").write_text("to be decided once, " * 200)
    counts, resolve = collections.Counter(), Plan.resolve

    def counted(self, config=None, devices="cpu", *sizes):
        if config is not None:
            counts[self, config, devices] += 1
        return resolve(self, config, devices, *sizes)

    planner._resolved.cache_clear()
    monkeypatch.setattr(Plan, "resolve", counted)
    monkeypatch.chdir(tmp_path)
    main(shlex.split(command))
    assert set(counts.values()) == {1}, [key for key, n in counts.items() if n > 1]
    assert num_plans in (None, len(counts))
