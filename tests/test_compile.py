"""Clusters that are not here: targets, the walk along a schedule, programs of their own compilers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from shared import program_text

from llmpar import draw
from llmpar.inspect import roofline
from llmpar.plan.mesh_shape import AXES, parse_mesh
from llmpar.plan.plan import Plan
from llmpar.plan.presets import preset
from llmpar.planner import aot
from llmpar.planner.planner import FREE_SHARE, Question
from llmpar.planner.targets import COMPILER_ENVIRONMENT, parse_target
from llmpar.predict.hardware import chip

COMPILERS = Path(sys.prefix) / "aot"
ROOT = Path(__file__).resolve().parent.parent
HLO = ROOT / "tests" / "fixtures" / "hlo"
H100 = chip("h100")
PEAK, RATE = H100.flops_per_s, H100.hbm_bytes_per_s * roofline.MEMORY_SHARE


def has(package: str) -> bool:
    return (COMPILERS / package).is_dir()


no_compiler = "no compiler for {} beside the environment".format
gpu_compiler = pytest.mark.skipif(not has("jax_plugins"), reason=no_compiler("GPUs"))
tpu_compiler = pytest.mark.skipif(not has("libtpu"), reason=no_compiler("TPUs"))


class Devices:
    """A mesh of 16 GPUs on two hosts, as the walk sees it."""

    def __init__(self, text: str):
        sizes = parse_mesh(text).sizes
        self.axis_names, self.shape = tuple(AXES), sizes
        self.devices = np.empty(tuple(sizes.values()), object)


GROUPS = "replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}"
PRODUCTS = (HLO / "products.hlo").read_text()
TRIPS = ', metadata={op_name="jvp()/while"}, backend_config={"known_trip_count":{"n":"5"}}'
SCOPE = 'metadata={op_name="jvp()/while/body/arrow[ffn d m]/all_gather"}'
PRODUCTS = PRODUCTS.replace("GROUPS", GROUPS).replace("TRIPS", TRIPS).replace("SCOPE", SCOPE)
DOT = "%y = bf16[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_the_walk_counts_turns_and_tells_hidden_from_exposed():
    """Five turns of a gather over the eight GPUs of a host, with a product beside it or with none."""
    one = 2 * 8192**3
    product_s = one / (roofline.shares(H100)["products"] * PEAK)
    gather_s = 8192 * 8192 * 2 * 7 / 8 / H100.reached_link_bytes_per_s + roofline.START_S
    assert gather_s < product_s, "else nothing could hide it"
    mesh = Devices("dp=2 fsdp=8")
    hidden = roofline.roofline(PRODUCTS.replace("BETWEEN", DOT), mesh, H100)
    (row,) = hidden.sent.values()
    assert (row.arrow, row.axis, row.kind, row.direction) == ("ffn d m", "fsdp", "all-gather", "forward")
    assert (row.count, row.asynchronous, row.hidden_flops) == (5, 5, 5 * one)
    assert row.exposed_s == 0 and row.busy_s == pytest.approx(5 * gather_s)
    assert hidden.flops == 10 * one and hidden.step_s == pytest.approx(10 * product_s)
    open_ = roofline.roofline(PRODUCTS.replace("BETWEEN", ""), mesh, H100)
    (row,) = open_.sent.values()
    assert row.hidden_flops == 0 and row.exposed_s == pytest.approx(5 * gather_s)
    assert open_.step_s == pytest.approx(5 * (product_s + gather_s))
    assert open_.terms["exposed communication"] == pytest.approx(open_.exposed_s)
    assert sum(open_.terms.values()) == pytest.approx(open_.step_s), "terms add up to the step"
    more = re.search(r"  %start = .*", PRODUCTS)[0].replace("%start", "%second").strip()
    more += "\n  %also = bf16[8192,8192]{1,0} all-gather-done(%second)"
    (row,) = roofline.roofline(PRODUCTS.replace("BETWEEN", more), mesh, H100).sent.values()
    assert row.count == 10 and row.exposed_s == pytest.approx(row.busy_s), "XLA for GPUs runs one at a time"
    step, turn = open_.loops
    assert turn.count == 5 and turn.seconds == pytest.approx(product_s + gather_s)
    events = [vars(event) for event in turn.events]
    picture = draw.two_lanes([{"name": turn.name, "count": turn.count, "events": events}], "turn")
    assert "forward loop, 5 × " in picture.text and "exposed" in picture.text


def test_what_a_device_reached_takes_the_place_of_what_is_assumed(monkeypatch, tmp_path):
    step_s = lambda: roofline.roofline(PRODUCTS.replace("BETWEEN", DOT), Devices("dp=2 fsdp=8"), H100).terms
    assert roofline.measured(H100), "make device-test ran on one"
    monkeypatch.setattr(roofline, "MEASURED", tmp_path / "reached.json")
    before, assumed = step_s()["products"], roofline.shares(H100)
    assert assumed["attention"] == 0.4 and not roofline.measured(H100), "the file may be missing"
    reached = {"products": 0.8, "attention": 0.5}
    (tmp_path / "reached.json").write_text(json.dumps({"h100": reached}))
    assert roofline.shares(H100) == assumed | reached and roofline.shares(chip("h200")) == assumed
    assert step_s()["products"] == pytest.approx(before * 0.7 / 0.8)
    low = dict(products=0.8, attention=0.2, cudnn=0.2)
    assert roofline.shares(H100, 0.2) == low, "a band is of kernels, not of plain products"


def test_links_carry_collectives_one_after_the_other_or_at_even_shares():
    """A long one, and behind it a short one, which is awaited first: alone 8 and 2 seconds."""
    row = lambda: roofline.CollectiveTime("", "", "", "")
    for shared, ends in ((False, (10, 8)), (True, (4, 10))):
        link, long, short = roofline._Link(shared), *(roofline._Transfer(row(), "", s) for s in (8.0, 2.0))
        link.start(long, 0.0)
        link.start(short, 0.0)
        assert link.end(short, 1.0) == ends[0] and link.end(long, 12.0) == ends[1]
        assert (long.begin, short.begin) == (0, 0 if shared else 8)
    link, idle = roofline._Link(True), roofline._Transfer(row(), "", 0.0)
    link.start(idle, 3.0)
    assert link.end(idle, 3.0) == 3, "nothing to carry is done at once"


def test_links_beyond_a_host_are_slower():
    text = PRODUCTS.replace("BETWEEN", "").replace("1024,8192", "4096,8192")
    starts = {1: range(0, 16, 2), 8: range(8)}
    pairs = lambda step: "replica_groups={" + ",".join(f"{{{i},{i + step}}}" for i in starts[step]) + "}"
    near = roofline.roofline(text.replace(GROUPS, pairs(1)), Devices("dp=8 fsdp=2"), H100)
    far = roofline.roofline(text.replace(GROUPS, pairs(8)), Devices("fsdp=2 tp=8"), H100)
    # 450 GB/s of NVLink, of which 370 are reached, against one port of 50 GB/s
    assert far.exposed_s / near.exposed_s == pytest.approx(370 / 50, rel=0.1)


def test_what_does_not_fit_has_a_plan_near_it_that_does():
    where, plan = parse_target("a100-40:1x8"), Plan("dp=8", zero=0, dtype="bfloat16")
    near = "--mesh 'fsdp=8' --zero '3' --remat 'block' --loss-chunks '8'"
    sizes = where.num_devices, where.num_devices, 8192
    said = aot._too_large("more", Question(preset("llama3-8b"), where.chip, *sizes), plan, where)
    assert f"; {near} would need " in said
    total = float(re.search(r"need ([\d.]+) GiB$", said)[1])
    assert total <= (1 - FREE_SHARE) * where.chip.usable_bytes / 2**30
    said = aot._too_large("more", Question(preset("llama3.1-405b"), where.chip, *sizes), plan, where)
    assert "no plan near this one fits" in said


ESTIMATED = jax.__version_info__ < (0, 11)
OPTIONS = {
    "in flight": "xla_gpu_experimental_parallel_collective_overlap_limit",
    "early": "xla_gpu_enable_latency_hiding_scheduler",
    "estimated": "xla_gpu_enable_analytical_latency_estimator",
}


def python(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")} | variables
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(COMPILERS)])}
    how = dict(capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    return subprocess.run([sys.executable, *words], **how)


def compiled(*flags: str, status: int = 0) -> tuple[dict, str]:
    done = python("-m", "llmpar", "compile", "--json", *flags)
    assert done.returncode == status, done.stderr[-2000:]
    return json.loads(done.stdout), done.stderr


def aside(program: str, *words: str) -> str:
    done = python("-c", program, *words, **COMPILER_ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def as_predicted(document: dict) -> bool:
    rows = document["collectives"]
    assert rows and all(row["predicted_bytes"] for row in rows)
    return all(row["predicted_bytes"] == row["compiled_bytes"] for row in rows) and all(
        row["as_predicted"] for row in document["arrows"]
    )


SMALL = "--model", "tiny", "--seq-len", "256"
PLANS = {
    "all but stages": ("--mesh", "fsdp=2 ep=2 sp=2 tp=2", "--model", "tiny-moe", "--tp-sequence"),
    "pipeline": ("--mesh", "pp=2 fsdp=8", "--microbatches", "4", "--batch-size", "32"),
    "experts": ("--mesh", "fsdp=2 ep=8", "--model", "tiny-moe"),
}
at_night = lambda name: [pytest.mark.nightly] * (name != "all but stages")
GATE_AND_NIGHT = [pytest.param(flags, marks=at_night(name)) for name, flags in PLANS.items()]
"""One program for GPUs, with every kind of collective and our kernels, on every change; others at night."""


@pytest.mark.compilers
@gpu_compiler
@pytest.mark.parametrize("flags", GATE_AND_NIGHT, ids=PLANS)
def test_gpus_compile_what_was_predicted(flags):
    document, _ = compiled("--target", "h100:2x8", *SMALL, *flags)
    memory = document["memory_bytes"]
    assert document["fits"] and as_predicted(document)
    assert memory["predicted_arguments"] == memory["compiled_arguments"]
    assert memory["compiled_temp"] > 0 and memory["capacity"] == H100.usable_bytes
    flops, found = document["flops"], document["roofline"]
    useful = flops["useful_per_device"] / (4 if "pp=2" in flags[1] else 1)
    assert flops["executed_per_device"] >= 0.99 * useful
    assert 0 < found["mfu"] < 1 and found["step_s"] > 0 and "causal attention" in found["mfu_is"]
    assert found["if_kernels_reach"] == {}
    assert sum(found["terms"].values()) == pytest.approx(found["step_s"], rel=1e-6)
    final = sum(row["bytes"] for row in document["final"])
    predicted = sum(row["predicted_bytes"] for row in document["collectives"])
    assert final == pytest.approx(predicted, rel=0.02), "bf16 stays bf16; nothing is added"
    assert sum(row["asynchronous"] for row in document["overlap"]) > 0, "GPUs start them apart"
    rows = [row for row in document["overlap"] if row["kind"] != "ragged-all-to-all"]  # XLA drops its name
    named = sum(row["busy_s"] for row in rows if row["arrow"])
    assert named > 0.7 * sum(row["busy_s"] for row in rows), "but for merged ones, each says whose"


CHIPS = {"gpu": ["l4:1x2", "a100-80:1x2", "h100:1x2", "b200:1x2"], "tpu": ["v5e:2x2", "v5p:2x2x1"]}
LARGEST = "256 bfloat16,128 float32"


@pytest.mark.nightly
@pytest.mark.compilers
@pytest.mark.parametrize(
    "platform", [pytest.param("gpu", marks=gpu_compiler), pytest.param("tpu", marks=tpu_compiler)]
)
def test_the_kernel_of_attention_is_compiled_for_the_widest_heads_on_every_chip(platform):
    """Shared memory, registers and vector memory have room for its tiles; nothing aborts."""
    out = aside(program_text("heads"), LARGEST, *CHIPS[platform])
    rows = [line.rsplit(" ", 2)[1:] for line in out.splitlines()]
    assert rows == [["flash", "True"]] * 2 * len(CHIPS[platform]), out


EXPERTS = "--model", "qwen3-30b-a3b", "--mesh", "fsdp=8 ep=8", "--remat", "selective", "--loss-chunks", "8"
PROMISED = {
    "the default": (("--model", "llama3-8b"), 0.45, 1.15),
    # an eighth of the slots is empty
    "experts": ((*EXPERTS, "--batch-size", "256", "--seq-len", "4096"), 0.25 if ESTIMATED else 0.21, 1.21),
}


@pytest.mark.nightly
@pytest.mark.compilers
@gpu_compiler
@pytest.mark.parametrize("flags, mfu, executed", PROMISED.values(), ids=PROMISED)
def test_a_schedule_reaches_the_mfu_that_was_promised(flags, mfu, executed):
    document, _ = compiled("--target", "h100:8x8", *flags)
    assert document["fits"] and as_predicted(document)
    assert document["roofline"]["mfu"] >= mfu
    assert document["flops"]["executed_per_device"] <= executed * document["flops"]["useful_per_device"]


@pytest.mark.compilers
@tpu_compiler
def test_a_tpu_compiles_what_was_predicted():
    document, _ = compiled("--target", "v5e:2x2", *SMALL, "--mesh", "fsdp=4", "--batch-size", "4")
    assert as_predicted(document) and document["fits"] and document["attention_kernel"] == "flash"
    held = document["memory_bytes"]
    assert held["compiled_arguments"] >= held["predicted_arguments"], "small arrays fill tiles of 8 x 128"


@pytest.mark.nightly
@pytest.mark.compilers
@tpu_compiler
def test_a_tpus_temporaries_are_what_its_heap_holds(tmp_path):
    """Not what it reports as temporaries, half as much again. (128 MiB of it may lie on the chip.)"""
    heap, held = map(int, aside(program_text("heap"), str(tmp_path)).split()[-2:])
    assert 0.95 * heap <= held <= heap + 2**27


def test_a_missing_compiler_is_one_sentence():
    words = [sys.executable, "-m", "llmpar", "compile", "--target", "h100:1x8"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)
    if "aot-gpu" not in done.stderr:
        pytest.skip("the compiler is in this environment")
    assert done.returncode == 1
    assert "\nllmpar: XLA's compiler for NVIDIA GPUs is not installed" in "\n" + done.stderr
