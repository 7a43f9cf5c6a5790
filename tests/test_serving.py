"""What serving costs: published numbers, and laws that must hold for every model."""

import dataclasses
import json
import math
import random
import re
import statistics

import pytest
from shared import HERE, TABLES
from shared import NUMBERS as ROWS

from llmpar.plan.presets import preset
from llmpar.planner import service
from llmpar.predict import serving
from llmpar.predict.hardware import Rates, chip

IDEAL = Rates(1, 1, 1, 1e-9, 1, 1, 1, 1e-15, 1e-15, 1e-15, 1e-9, 1)
"""A chip that reaches its data sheet, and starts at once."""
H100 = chip("h100")


def ideal(row):
    return dataclasses.replace(chip(row), reached=IDEAL, link_bytes_per_s=1e18, hop_s=1e-15)


def seconds(terms):
    return sum(terms.values())


ENGINE_RUNS = (HERE / "engine_runs.txt").read_text().splitlines()[2:]


def served(gpu, bits, model, batch, tp, prompt, answer):
    s = service.Service(preset(model), chip(gpu), tp, prompt, answer, bits, cache_bits=bits)
    return service.price(s, tp, 1, batch)


def test_half_of_what_engines_published_is_within_what_is_said():
    errors = []
    for line in ENGINE_RUNS:
        gpu, bits, model, *numbers, measured = line.split()
        row = served(gpu, int(bits), model, *map(int, numbers))
        errors.append(abs(row["tokens_per_s_device"] / float(measured) - 1))
    assert statistics.median(errors) == pytest.approx(service.HALF_WITHIN, abs=0.01)
    assert max(errors) < 1.4, "long answers of Llama 2 70B, of whose heads that version did not share keys"


@pytest.mark.parametrize("batch", TABLES["nim_runs"])
def test_a_token_takes_its_own_step_and_its_share_of_others_prompts(batch):
    between, rate = TABLES["nim_runs"][batch]
    row = served("h100", 8, "llama3-70b", int(batch), 2, 5000, 500)
    assert 1e3 / row["tokens_per_s_user"] == pytest.approx(between, rel=0.1)
    assert 2 * row["tokens_per_s_device"] == pytest.approx(rate, rel=0.1)


def test_what_is_offered_to_serve_fits_and_nothing_beats_it(document, call, tmp_path):
    words = "plan --serve 4096+1024 --keep 8 --model deepseek-v3 --devices 32 --bits 8 --cache-bits 8"
    plans = document(*words.split())["plans"]
    assert len(plans) == 8 and plans[-1]["tp"] == 1
    users, devices = ([row[f"tokens_per_s_{x}"] for row in plans] for x in ("user", "device"))
    assert users == sorted(users, reverse=True) and devices == sorted(devices)
    for row in plans:
        weights = serving.weights_of_a_rank(V3, row["tp"], row["ep"])
        kept = row["batch"] * serving.cache_of_a_rank(V3, row["tp"], 5120)
        assert weights + kept <= serving.ENGINE_SHARE * H100.usable_hbm_gib * 2**30
        assert row["tp"] * row["ep"] * row["copies"] == 32
    model = json.loads((HERE / "families.json").read_text())["families"]["qwen3"]["config"]
    model |= {"max_position_embeddings": 4096, "zebra_width": 7}
    (tmp_path / "config.json").write_text(json.dumps(model))
    said = call("plan", "--serve", "4096+1", "--model", str(tmp_path / "config.json"))[2]
    assert "made for 4,096 tokens, and these are 4,097" in said and "zebra_width" in said


def test_a_request_keeps_what_windows_leave_and_the_states_of_recurrent_layers():
    request = lambda name: service.Service(preset(name), H100, 8, 200_000, 1000)
    windows = preset("gemma-3-27b")
    sent = service.price(request("gemma-3-27b"), 8, 1, 1)["cache_sent_bytes"]
    whole, local = (sum(n * b.cache_width for n, b in windows.blocks if bool(b.window) == x) for x in (0, 1))
    assert sent == 2 * (200_000 * whole + 1024 * local)
    mamba, held = preset("nemotron-h-56b"), service.request_bytes(request("nemotron-h-56b"), 8, 1000)
    states = 4 * sum(count * block.state_size for count, block in mamba.blocks) / 8
    assert held == 2 * serving.cache_of_a_rank(mamba, 8, 1000) + states > states > 0


@pytest.mark.parametrize("batch", [4, 256])
def test_the_books_30b_in_8_bits_on_16_v5e(batch):
    """A dense model of 30e9 parameters whose token keeps 100 kB, on an ideal chip."""
    config = dataclasses.replace(
        preset("llama2-13b"), name="30b", vocab_size=32_000, width=7168, num_layers=49, num_heads=64,
        num_kv_heads=16, head_width=64, ffn_width=24_576,
    )  # fmt: skip
    assert config.num_params == pytest.approx(30e9, rel=0.02)
    assert serving.cache_bytes(config, 1, 8) == pytest.approx(100e3, rel=0.01)
    took = seconds(serving.decode_seconds(config, ideal("v5e"), batch, 8192, 16, weight_bits=8, cache_bits=8))
    assert 1e3 * took == pytest.approx(ROWS["sb.quiz30b"]["expected"][f"bs{batch}_ms"], rel=0.05)


def held(config, tp, pp, tokens, bits):
    """Bytes on the fullest GPU, counted weight by weight; norms and copies of small ones count as cut."""
    layers = -(-config.num_layers // pp)
    sizes = {path: math.prod(weight.shape) for path, weight in config.weights().items()}
    ends = sum(n for path, n in sizes.items() if not path.startswith("blocks."))
    ends = ends if pp == 1 else sizes["embedding"]
    blocks = sum(n for path, n in sizes.items() if path.startswith("blocks.")) / config.num_layers * layers
    heads = max(1, config.num_kv_heads // tp)
    return ((blocks + ends) / tp + tokens * layers * 2 * heads * config.head_width) * bits / 8


@pytest.mark.parametrize("model", ["llama3.1-70b", "qwen3-4b", "qwen3-30b-a3b", "qwen2.5-32b", "llama2-13b"])
def test_a_cut_fits_and_no_smaller_one_would(model):
    config, rng, refused = preset(model), random.Random(model), 0
    for _ in range(60):
        gpu, gpus = rng.choice(("a100-40", "h100", "b200")), rng.choice((1, 2, 4, 6, 8))
        nodes = rng.randint(1, 4)
        bits, tokens = rng.choice((16, 32)), int(10 ** rng.uniform(3, 6.5))
        room = serving.ENGINE_SHARE * chip(gpu).usable_hbm_gib * 2**30
        try:
            tp, pp, most = serving.cut(config, chip(gpu), nodes, gpus, tokens, bits)
        except ValueError as error:
            refused += 1
            if more := re.search(r"use (\d+) nodes", str(error)):
                stages = serving.cut(config, chip(gpu), int(more[1]), gpus, tokens, bits)[1]
                assert stages == int(more[1]) > nodes
            if fewer := re.search(r"at most ([\d,]+) tokens", str(error)):
                most = int(fewer[1].replace(",", ""))
                assert serving.cut(config, chip(gpu), nodes, gpus, most, bits)[2] == most < tokens
            continue
        assert tp <= gpus and pp <= nodes and config.num_heads % tp == 0 and most >= tokens
        assert held(config, tp, pp, most, bits) == pytest.approx(room, rel=1e-3)
        if pp > 1:
            assert held(config, tp, pp - 1, tokens, bits) > 0.999 * room
        elif tp > 1 and config.num_heads % (tp // 2) == 0 and tp % 2 == 0:
            assert held(config, tp // 2, 1, tokens, bits) > 0.999 * room
    assert 0 < refused < 60


V3 = preset("deepseek-v3")
