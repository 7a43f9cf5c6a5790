"""Make tests/fixtures/hf_*.npz: tiny random models of Hugging Face transformers, with what they compute.

    python tests/make_hf_fixtures.py [NAME ...]

in an environment with torch and transformers (dependency group `parity`). Each file has ``config`` (the text
of its config.json), ``versions``, ``ids``, ``logits`` and ``weight:NAME`` for every tensor. Weights are
multiples of 1/64, so that they are the same in bfloat16 and float32 and the files compress well. Those of
`WITH_GRADIENTS` also have ``grad:NAME`` for every parameter: the gradient of the mean cross-entropy of
``ids[:, 1:]`` given what precedes.
"""

import pathlib
import sys
import tempfile

import numpy as np

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=256
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
"""Stretches within the 24 positions that are tested: the four wavelengths of head width 8 are 6 to 6283."""
MODELS = {
    "llama": dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_parameters=LLAMA3),
    "mistral": dict(num_attention_heads=4, num_key_value_heads=1, sliding_window=7, rms_norm_eps=1e-5),
    "qwen2": dict(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen3": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=16, rms_norm_eps=1e-6),
    "mixtral": dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=24, norm_topk_prob=True,
    ),
}  # fmt: skip
"""Qwen3 has as many KV heads as query heads, so that swapping q and k is not seen by their shapes."""

SMALL = dict(
    vocab_size=32, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
"""Without a padding token: `torch` keeps the gradient of its embedding at zero."""
NARROW = SMALL | dict(hidden_size=16, intermediate_size=24, head_dim=8)
WIDE = SMALL | dict(hidden_size=32, intermediate_size=16)
"""For families whose heads divide the hidden size."""
LATENT = SMALL | dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, first_k_dense_replace=1,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, kv_lora_rank=16, n_routed_experts=8,
    moe_intermediate_size=4, rms_norm_eps=1e-2,
)  # fmt: skip
"""The latent's norms have an epsilon of their own, 1e-6; another one of this size is seen."""


def yarn(original, factor, **more):
    """Spell YaRN's `rope_scaling` as published models do, with a short original context."""
    return dict(rope_type="yarn", original_max_position_embeddings=original, factor=factor) | more


MODELS |= {
    "gemma": NARROW | dict(head_dim=16, num_key_value_heads=1),
    "gemma2": NARROW | dict(
        num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3_text": NARROW | dict(
        num_hidden_layers=7, sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=24,
        rope_theta=1e5, rope_local_base_freq=1e3, rope_scaling=dict(rope_type="linear", factor=4.0),
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=8,
    ),
    "olmo2": WIDE | dict(rope_theta=5e5),
    "olmo3": WIDE | dict(
        num_hidden_layers=5, sliding_window=6, max_position_embeddings=64, rope_theta=5e5,
        rope_scaling=yarn(8, 8.0, beta_fast=32.0, beta_slow=1.0, attention_factor=1.2079441541679836),
    ),
    "gpt_oss": NARROW | dict(
        num_hidden_layers=3, intermediate_size=8, sliding_window=5, num_local_experts=4,
        num_experts_per_tok=2, swiglu_limit=1.5, max_position_embeddings=64, rope_theta=100.0,
        rope_scaling=yarn(16, 4.0, beta_fast=1.5, beta_slow=0.1, truncate=False),
    ),
    "glm4_moe": NARROW | dict(
        num_hidden_layers=3, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True,
        partial_rotary_factor=0.5, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.5,
    ),
    "deepseek_v3": LATENT | dict(
        q_lora_rank=12, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
        routed_scaling_factor=2.5, max_position_embeddings=64,
        rope_scaling=yarn(8, 8.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.707),
    ),
    "deepseek_v2": LATENT | dict(
        q_lora_rank=None, topk_method="group_limited_greedy", n_group=4, topk_group=2, num_experts_per_tok=3,
        n_shared_experts=2, norm_topk_prob=False, routed_scaling_factor=4.0, max_position_embeddings=64,
        rope_theta=100.0,
        rope_scaling=yarn(16, 4.0, beta_fast=1.5, beta_slow=0.1, mscale=0.707, mscale_all_dim=0.707),
    ),
    "smollm3": WIDE | dict(num_hidden_layers=5),
    "granite": WIDE | dict(
        embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.25, logits_scaling=0.5,
        tie_word_embeddings=True,
    ),
    "phi3": WIDE | dict(sliding_window=7),
    "phi3_long": WIDE | dict(
        max_position_embeddings=32, original_max_position_embeddings=8,
        rope_scaling=dict(
            rope_type="longrope", short_factor=[1.0, 1.25, 1.5, 2.0], long_factor=[1.5, 2.0, 4.0, 8.0]
        ),
    ),
    "cohere": WIDE | dict(use_qk_norm=True, logit_scale=0.25),
    "cohere2": WIDE | dict(num_hidden_layers=5, sliding_window=6, logit_scale=0.25),
    "llama4_text": NARROW | dict(
        num_hidden_layers=5, intermediate_size=16, intermediate_size_mlp=24, interleave_moe_layer_step=2,
        num_local_experts=4, num_experts_per_tok=1, attention_chunk_size=7, use_qk_norm=True, floor_scale=4,
        attn_temperature_tuning=True,
    ),
}  # fmt: skip
"""Periods of layers are repeated or begun again; what scales, caps or cuts is seen within 24 positions."""
RUNNING = tuple(name for name in MODELS if name != "phi3_long")
"""What the package runs. The other is recorded for the time when it does."""
WITH_GRADIENTS = ("gemma3_text", "olmo2", "gpt_oss", "glm4_moe", "deepseek_v3")


def distribution(name, path):
    """Choose the mean and the standard deviation of a tensor's entries."""
    if "norm" in path:
        return (0.0 if name.startswith("gemma") else 1.0), 0.3
    return 0.0, {"sinks": 1.0, "e_score_correction_bias": 0.125}.get(path.rpartition(".")[2], 0.25)


def make(name, seed=0):
    """A random model: `transformers`' own module, whose norms and biases are far from one and zero."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(name.removesuffix("_long"), **SIZES | MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    draw = np.random.default_rng(seed)
    stored = [(path, b) for path, b in model.named_buffers() if path in model.state_dict()]
    with torch.no_grad():
        for path, weight in [*model.named_parameters(), *stored]:
            mean, deviation = distribution(name, path)
            value = np.round(64 * (mean + deviation * draw.standard_normal(weight.shape))) / 64
            weight.copy_(torch.tensor(value))
    return model.eval()


def saved(model):
    """Read a model's config.json and tensors back as a user would get them.

    In memory `transformers` lays experts out otherwise.
    """
    import safetensors.numpy

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        text = pathlib.Path(folder, "config.json").read_text()
        return text, safetensors.numpy.load_file(pathlib.Path(folder, "model.safetensors"))


def gradients(model, ids):
    """Compute the gradients of the mean cross-entropy, by the names that parameters have in a file.

    The gradients take the parameters' places, so that they are laid out and named as weights are.
    """
    import torch

    model.train()
    logits = model(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    buffers = {path for path, _ in model.named_buffers()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    return {path: gradient for path, gradient in saved(model)[1].items() if path not in buffers}


def example(name, seed=0, batch_size=2, seq_len=24):
    """What a fixture holds, by name."""
    import torch
    import transformers

    model = make(name, seed)
    ids = np.random.default_rng(seed + 1).integers(
        0, model.config.vocab_size, (batch_size, seq_len), dtype=np.int32
    )
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    text, tensors = saved(model)
    arrays = {f"weight:{path}": tensors[path] for path in sorted(tensors)}
    if name in WITH_GRADIENTS:
        slopes = gradients(model, torch.tensor(ids, dtype=torch.long))
        arrays |= {f"grad:{path}": slopes[path] for path in sorted(slopes)}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return dict(config=text, versions=versions, ids=ids, logits=logits) | arrays


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        data = example(name)
        file = FIXTURES / f"hf_{name}.npz"
        np.savez_compressed(file, **data)
        print(
            f"{file.name}: {file.stat().st_size / 1000:.0f} kB, logits up to"
            f" {np.abs(data['logits']).max():.1f}"
        )
