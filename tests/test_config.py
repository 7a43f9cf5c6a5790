"""Model sizes: exact numbers of parameters, the real model's shapes, and Hugging Face configurations."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import LLAMA, MOE, QWEN, family
from shared import HERE, TABLES

from llmpar.model.llama import Llama
from llmpar.model.rope import rope_table
from llmpar.plan.model_config import ExpertConfig, LoraConfig
from llmpar.plan.presets import PRESETS, from_hugging_face, preset  # fmt: skip

# Published ones, and ours by hand: v·d (twice if untied) + layers·(2d² + 2·d·k·h + 3·d·m + 2d) + d.
PUBLISHED = TABLES["params"] | {
    "tiny": 264 * 64 * 2 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64,
    "tiny-tied": 264 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64,
    "small": 4096 * 256 * 2 + 8 * (4 * 256 * 256 + 3 * 256 * 768 + 2 * 256) + 256,
    "gpt2-scale": 50_304 * 768 + 12 * (4 * 768 * 768 + 3 * 768 * 2048 + 2 * 768) + 768,
    "tiny-moe": 264 * 64 * 2 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 8 * 3 * 64 * 64 + 8 * 64 + 2 * 64) + 64,
}
ACTIVE = TABLES["active_params"] | {"tiny-moe": PUBLISHED["tiny-moe"] - 4 * 6 * 3 * 64 * 64}


def test_every_preset_has_a_published_count():
    # in test_families and test_gated_delta
    elsewhere = "glm-4.5", "gpt-oss", "kimi-k2", "llama-4", "minimax", "qwen3-next", "qwen3.5"
    assert PUBLISHED.keys() >= {x for x in PRESETS if PRESETS[x].runs and not x.startswith(elsewhere)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_exact(name):
    config = preset(name)
    assert config.num_params == PUBLISHED[name]
    assert config.name == name and config.active_params == ACTIVE.get(name, PUBLISHED[name])


ADAPTED = dataclasses.replace(preset("tiny"), name="tiny-lora", lora=LoraConfig(2, 4.0, ("q", "o", "down")))
# Where the experts are as wide as the model, shared ones are wider in one dim of two.
SHARED = dataclasses.replace(
    MOE, name="tiny-shared", ffn_width=MOE.width, experts=ExpertConfig(8, 2, num_shared=2)
)
REAL = [LLAMA, QWEN, MOE, SHARED, ADAPTED]
REAL += map(preset, ("mixtral-8x22b", "llama3.1-405b", "qwen2.5-72b", "qwen3-0.6b"))


@pytest.mark.parametrize("config", REAL, ids=lambda c: c.name)
def test_shapes_and_dims_are_those_of_the_real_model(config):
    """Nothing is allocated: the modules' own parameters as abstract values, with their dims."""
    model = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    real = {}
    for path, p in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        dims = p.dims
        if path[0] == "blocks":  # the modules of one block, stacked
            region, _, letters = dims.partition(" ")
            dims = f"{region} l {letters}"
        real[".".join(map(str, path))] = (dims, p.shape)
    assert real == {path: (w.dims, w.shape) for path, w in config.weights().items()}
    assert {len(shape) for dims, shape in real.values() if len(dims.split()) - 1 != len(shape)} == set()
    frozen = {path for path, weight in config.weights().items() if weight.frozen}
    assert frozen == {path for path in real if config.lora and ".lora." not in path}


CARDS = json.loads((HERE / "fixtures" / "cards.json").read_text())
LLAMA31, MISTRAL, QWEN2 = (CARDS[name] for name in ("llama3.1-8b", "mistral-7b", "qwen2.5-0.5b"))


def written(folder, card) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(card))
    return str(path)


@pytest.mark.parametrize("name", CARDS)
def test_a_published_configuration_is_its_preset(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    assert preset(written(folder, CARDS[name])) == preset(name)


def test_what_a_configuration_leaves_out_has_the_meaning_that_transformers_gives_it(tmp_path):
    left_out = "num_key_value_heads", "rope_scaling", "rms_norm_eps", "rope_theta"
    short = {k: v for k, v in LLAMA31.items() if k not in left_out}
    config = from_hugging_face(written(tmp_path, short))
    assert config.num_kv_heads == config.num_heads == 32 and config.head_width == 128
    found = config.norm_eps, config.rope_theta, config.rope_scaling, config.tied
    assert found == (1e-6, 10_000.0, None, False)


def test_a_window_in_every_layer_is_one(tmp_path):
    everywhere = QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}
    assert from_hugging_face(written(tmp_path, everywhere)).window == 32_768
    assert from_hugging_face(written(tmp_path, everywhere | {"max_window_layers": 24})).window is None
    assert from_hugging_face(written(tmp_path, MISTRAL | {"sliding_window": None})).window is None


def test_the_last_position_of_a_row_decides_between_the_factors_of_longrope():
    """Not that of a batch, nor of the part of a row that a device has; in a cache no position does."""
    config = family("phi3_long")
    rows, scaling = jnp.stack([jnp.arange(24), jnp.arange(24) % 12]), config.rope_scaling
    size = math.sqrt(1 + math.log(64 / 23) / math.log(23))
    for part, of_rows, factors in (
        (rows[:, :8], rows, [scaling.long_factors, scaling.short_factors]),
        (rows[:, 16:], None, [scaling.short_factors] * 2),
    ):
        frequencies = 10_000 ** -(np.arange(0, 8, 2) / 8) / np.array(factors)[:, None]
        cos, _ = rope_table(config, part, of_rows)
        angles = np.asarray(part)[..., None] * frequencies
        np.testing.assert_allclose(cos[:, :, 0], size * np.cos(angles), atol=1e-5)


def test_fresh_weights_have_the_shapes_and_the_scale_that_were_asked():
    model = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Llama(LLAMA, nnx.Rngs(0)), nnx.Param)))()
    q, o = np.asarray(model["blocks"]["attention"]["q"]), np.asarray(model["blocks"]["attention"]["o"])
    assert abs(q.std() / LLAMA.init_scale - 1) < 0.05
    assert abs(o.std() * (2 * LLAMA.num_layers) ** 0.5 / LLAMA.init_scale - 1) < 0.05
    assert np.abs(q[0] - q[1]).max() > 0, "every layer has its own weights"
    assert np.all(np.asarray(model["norm"]["scale"]) == 1)
