"""What serving costs: published numbers, laws that must hold for every mesh, and refusals."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmpar.cli.commands import parse
from llmpar.config import preset
from llmpar.notation import MeshShape, parse_mesh
from llmpar.predict import formulas, serving
from llmpar.predict.hardware import chip
from llmpar.predict.rates import Rates
from llmpar.predict.serving import Demand

ROWS = {
    row["id"]: row for row in json.loads((Path(__file__).parent / "numbers.json").read_text(encoding="utf-8"))
}
IDEAL = Rates(1, 1e-9, 1, 1, 1, 1, 1, 1e-15, 1e-15, 1e-15, 1e-9, 1)
"""A chip that reaches its data sheet, and starts at once."""


def demand(name="llama3-8b", row="h100", devices=8, prompt=1024, output=256, **more):
    return Demand(preset(name), chip(row), devices, prompt, output, model=name, **more)


def ideal(row):
    return dataclasses.replace(chip(row), reached=IDEAL, link_bytes_per_s=1e18, hop_s=1e-15)


def test_the_books_llama_13b_on_eight_v5e():
    """26 GB of weights and 107 GB of keys and values on 6.56e12 bytes a second: the book leaves out
    activations, norms and logits, which add 2 %."""
    row = ROWS["sb.l13b.decode.bs16"]
    q = Demand(preset("llama2-13b"), ideal("v5e"), 8, 8191, 1)
    batch = row["inputs"]["batch"]
    assert batch * 8192 * q.cache_token_bytes / 1e9 == pytest.approx(row["expected"]["kv_gb"], rel=0.01)
    step = serving.decode(q, parse_mesh("tp=8"), batch, 8192)
    assert step.seconds * 1e3 == pytest.approx(row["expected"]["ms"], rel=0.03)
    book = formulas.decode_seconds(batch, 13e9, 8192 * q.cache_token_bytes, 8, 1.97e14, 8.2e11)
    assert step.terms["products"] + step.terms["keys and values read"] == pytest.approx(book, rel=0.02)


def test_the_books_cache_of_llama_70b_in_8_bits():
    q = demand("llama3-70b", cache_bits=8)
    assert q.cache_token_bytes == ROWS["sb.kv70"]["expected"]["bytes"]


@pytest.mark.parametrize("batch", [4, 256])
def test_the_books_30b_in_8_bits_on_16_v5e(batch):
    """A dense model of 30e9 parameters whose token keeps 100 kB, on an ideal chip. The book leaves
    out elementwise work, and what products read and write besides weights."""
    row = ROWS["sb.quiz30b"]["expected"]
    config = dataclasses.replace(
        preset("llama2-13b"), name="30b", vocab_size=32_000, width=7168, num_layers=49, num_heads=64,
        num_kv_heads=16, head_width=64, ffn_width=24_576,
    )  # fmt: skip
    q = Demand(config, ideal("v5e"), 16, 8191, 1, weight_bits=8, cache_bits=8)
    params, token = config.num_params, q.cache_token_bytes
    assert params == pytest.approx(30e9, rel=0.02) and token == pytest.approx(100e3, rel=0.01)
    terms = serving.decode(q, parse_mesh("tp=16"), batch, 8192).terms
    counted = sum(terms[name] for name in ("products", "keys and values read", "head"))
    assert 1e3 * counted == pytest.approx(row[f"bs{batch}_ms"], rel=0.05)


def test_the_critical_batch_is_the_books():
    q = demand(row="v5e", weight_bits=8)
    assert serving.critical_batches(q)["data_sheet"] == pytest.approx(120, rel=0.01)
    experts = demand("qwen3-30b-a3b", row="v5e")
    assert serving.critical_batches(experts)["data_sheet"] == pytest.approx(240 * 128 / 8, rel=0.01)


def test_the_ratio_of_instances_is_the_books():
    """Llama 70B on slices of 16 v5e: prompts of 8,192 tokens at 40 % of peak, batches of 32 that take 19 ms
    a step, 512 tokens out: three prompt instances for each that decodes (Book, applied inference)."""
    prefill = 2 * 70e9 * 8192 / (16 * 1.97e14 * 0.4)
    assert prefill == pytest.approx(0.91, rel=0.01)
    q = demand()
    one = serving.instance(q, parse_mesh("tp=8"), False)
    slow = dataclasses.replace(one, requests_per_s=1 / prefill)
    busy = dataclasses.replace(one, requests_per_s=32 / (0.019 * 512))
    best = serving._apart(dataclasses.replace(q, num_devices=32), [slow], [busy])
    assert busy.requests_per_s / slow.requests_per_s == pytest.approx(3.0, rel=0.01)
    assert (best.num_prefill, best.num_decode) == (3, 1)


QUESTIONS = [
    demand(),
    demand("llama3-70b", devices=16, prompt=8192, output=512, per_token_s=0.03, first_token_s=2),
    demand("llama3-70b", "v5e", 16, 8192, 512, weight_bits=8, cache_bits=8),
    demand("qwen3-30b-a3b"),
    demand("mistral-7b", "a100-80", 4, 16_384, 16),
]


@pytest.mark.parametrize("q", QUESTIONS, ids=lambda q: q.config.name + q.chip.name)
def test_every_answer_keeps_its_bounds_and_adds_up(q):
    found = serving.document(serving.answer(q), price=2.0)
    assert found["plans"]
    rates = [row["requests_per_s"] for row in found["plans"]]
    assert rates == sorted(rates, reverse=True)
    for row in found["plans"]:
        mesh = parse_mesh(row["mesh"])
        assert mesh.size == q.num_devices and row["instances"] == mesh.dp
        assert row["memory_bytes"]["total"] <= found["room_bytes"]
        assert row["first_token_s"] <= q.first_token_s and row["per_token_s"] <= q.per_token_s
        assert sum(row["decode_terms"].values()) == pytest.approx(row["decode_s"])
        assert sum(row["prefill_terms"].values()) == pytest.approx(row["prefill_s"])
        # Little's law: sequences alive are requests per second times seconds alive.
        alive = row["requests_per_s"] / mesh.dp * row["per_token_s"] * q.output
        assert alive == pytest.approx(row["batch"])
        # An instance's time is all spent: on prompts, and on steps.
        busy = serving.request_s(q, mesh) + row["decode_s"] * q.output / row["batch"]
        assert row["requests_per_s"] / mesh.dp * busy == pytest.approx(1)
        more = row["batch"] + mesh.ep * mesh.pp
        assert not serving._fits(q, mesh, more) or serving.per_token(q, mesh, more, True) > q.per_token_s, (
            "a larger batch would do"
        )
        assert row["cost_per_million_tokens"] == pytest.approx(
            2.0 * q.num_devices / 3600 / row["tokens_per_s"] * 1e6
        )
    if pair := found["apart"]:
        assert pair["devices_used"] <= q.num_devices and pair["first_token_s"] <= q.first_token_s
        assert pair["per_token_s"] <= q.per_token_s
    steps = [row["decode_s"] for row in found["curve"]]
    flow = [row["tokens_per_s"] for row in found["curve"]]
    assert steps == sorted(steps) and flow == sorted(flow)


def test_weights_are_held_once_and_the_cache_is_cut():
    q = demand("llama3-70b", devices=64, prompt=8192)
    whole = serving.held_bytes(q, MeshShape(), 8)
    params = q.config.num_params
    assert whole["weights"] == pytest.approx(2 * params, rel=1e-3)
    assert whole["cache"] == 8 * (8192 + 256) * q.cache_token_bytes
    for axis, parts in (("tp", ("weights", "cache")), ("sp", ("cache",)), ("pp", ("cache",))):
        cut = serving.held_bytes(q, MeshShape(**{axis: 8}), 8)
        for part in parts:
            assert cut[part] == pytest.approx(whole[part] / 8, rel=1e-3), (axis, part)
    experts = demand("qwen3-30b-a3b", devices=8)
    one, eight = (serving.held_bytes(experts, MeshShape(ep=n), 8) for n in (1, 8))
    assert eight["cache"] == one["cache"] / 8 and eight["weights"] < one["weights"] / 4


def test_more_ranks_of_tp_than_kv_heads_hold_copies():
    """As `Decoder` lays the cache out: from 8 KV heads on, more tensor parallelism cuts weights alone."""
    q = demand("llama3-70b", devices=16)
    eight, sixteen = (serving.held_bytes(q, MeshShape(tp=n), 8) for n in (8, 16))
    assert sixteen["cache"] == eight["cache"] and 0.5 < sixteen["weights"] / eight["weights"] < 0.55
    reads = [serving.decode(q, MeshShape(tp=n), 8, 4096).terms["keys and values read"] for n in (8, 16)]
    assert reads[0] == reads[1]


def test_a_few_tokens_read_few_experts():
    q = demand("qwen3-30b-a3b")
    mesh = MeshShape()
    reads = [serving.decode(q, mesh, batch, 1).terms["products"] for batch in (1, 4, 16, 64, 256)]
    assert all(b > a for a, b in itertools.pairwise(reads))
    assert reads[-1] < 16 * reads[0], "all 128 experts are 16 times the 8 of one token, and attention's"
    clock = serving.Server(q, mesh, 1)
    (some, *_) = [clock.touched(p) for p in clock.run.expert_products()]
    assert some.times == pytest.approx(8) and some.rows == pytest.approx(1)


def test_more_of_everything_is_never_slower():
    q, mesh = demand("llama3-70b", devices=8), parse_mesh("tp=8")
    base = serving.decode(q, mesh, 32, 4096).seconds
    for name in ("flops_per_s", "hbm_bytes_per_s", "link_bytes_per_s"):
        better = dataclasses.replace(q.chip, **{name: 2 * getattr(q.chip, name)})
        other = dataclasses.replace(q, chip=better)
        assert serving.decode(other, mesh, 32, 4096).seconds <= base
        assert serving.prefill(other, mesh).seconds <= serving.prefill(q, mesh).seconds
    assert serving.decode(q, mesh, 32, 8192).seconds > base


def test_a_window_is_read_no_further():
    q = demand("mistral-7b", devices=1)
    near, far = (serving.decode(q, MeshShape(), 8, context).terms for context in (4096, 65_536))
    assert near == far


@pytest.mark.parametrize(
    "more, sentence",
    [
        (dict(fixed={"fsdp": 8}), "no fsdp; use pp, dp, ep, sp, tp"),
        (dict(fixed={"tp": 3}), "no instance on 8 h100 with tp=3 suits 'llama3-8b'"),
        (dict(weight_bits=5), "weight_bits is 5; use one of 4, 8, 16"),
        (dict(cache_bits=1), "cache_bits is 1; use one of 4, 8, 16"),
        (dict(prompt=0), "prompt is 0 tokens; use 1 to"),
        (dict(per_token_s=0.0), "per_token_s is 0.0; a bound is positive"),
        (dict(batch=0), "batch is 0 sequences"),
        (dict(per_token_s=1e-4), "no mesh of 8 h100 meets the bounds; the quickest first token"),
        (dict(name="llama3.1-405b"), "fits on no mesh of 8 h100.*; 16 of them are enough"),
        (dict(name="deepseek-v3"), "cannot run here"),
        (dict(batch=10**6), "fits on no mesh"),
    ],
)
def test_what_nothing_serves_is_refused(more, sentence):
    with pytest.raises(ValueError, match=sentence):
        serving.answer(demand(**more))


def test_the_smallest_machine_that_is_named_is_enough():
    with pytest.raises(ValueError) as refusal:
        serving.answer(demand("llama3.1-405b"))
    many = int(str(refusal.value).rsplit("; ", 1)[1].split()[0])
    assert serving.answer(demand("llama3.1-405b", devices=many)).together


def test_the_command(capsys):
    parse("plan --serve --devices 8 --per-token-ms 20 --mesh tp=8 --batch-size 4 --json".split()).run()
    found = json.loads(capsys.readouterr().out)
    (row,) = found["plans"]
    assert row["mesh"] == "tp=8" and row["batch"] == 4 and found["bounds"] == {"per_token_s": 0.02}
    command = parse(row["generate"].replace('"', "").split()[1:])
    assert command.mesh == "tp=8" and command.tokens == 256
    parse("plan --serve --model qwen3-30b-a3b --devices 8 --price 2".split()).run()
    printed = capsys.readouterr().out
    assert "cache handed over" in printed and "a million tokens" in printed


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--serve --seq-len 4096", "--serve answers requests, and --seq-len decides nothing"),
        ("--serve --tokens 1T --fix zero=1", "--fix, --tokens decides nothing"),
        ("--prompt 4 --weight-bits 8", "without --serve a step is trained, and --prompt, --weight-bits"),
        ("--serve --price -1", "price is -1.0; give a positive cost"),
    ],
)
def test_options_of_the_other_question_are_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(["plan", *words.split()]).run()


def test_a_large_machine_is_answered_in_seconds_and_without_jax():
    code = """
import sys, time
from llmpar.config import preset
from llmpar.predict import hardware, serving
begin = time.process_time()
serving.answer(serving.Demand(preset("mixtral-8x22b"), hardware.chip("h200"), 4096, 4096, 1024))
print(time.process_time() - begin, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took, jax = done.stdout.split()
    assert float(took) < 10 and jax == "False"
