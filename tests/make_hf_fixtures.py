"""Make tests/fixtures/hf_*.npz: tiny random models of Hugging Face transformers, with what they compute.

    python tests/make_hf_fixtures.py [NAME ...]

in an environment with torch and transformers (dependency group `parity`). Each file has ``config`` (the text
of its config.json), ``versions``, ``ids``, ``logits`` and ``weight:NAME`` for every tensor. Weights are
multiples of 1/64, so that they are the same in bfloat16 and float32 and the files compress well.
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


def make(name, seed=0):
    """A random model: `transformers`' own module, whose norms and biases are far from one and zero."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    draw = np.random.default_rng(seed)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            mean, deviation = (1.0, 0.3) if "norm" in path else (0.0, 0.25)
            value = np.round(64 * (mean + deviation * draw.standard_normal(weight.shape))) / 64
            weight.copy_(torch.tensor(value))
    return model.eval()


def example(name, seed=0, batch_size=2, seq_len=24):
    """What a fixture holds, by name."""
    import safetensors.numpy
    import torch
    import transformers

    model = make(name, seed)
    ids = np.random.default_rng(seed + 1).integers(
        0, SIZES["vocab_size"], (batch_size, seq_len), dtype=np.int32
    )
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # as a user would get it: in memory transformers lays experts out otherwise
        model.save_pretrained(folder)
        text = pathlib.Path(folder, "config.json").read_text()
        tensors = safetensors.numpy.load_file(pathlib.Path(folder, "model.safetensors"))
    weights = {f"weight:{path}": tensors[path] for path in sorted(tensors)}
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return dict(config=text, versions=versions, ids=ids, logits=logits) | weights


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
