"""Make tests/fixtures/hf_*.npz: tiny random models of Hugging Face transformers, with what they compute.

    python tests/make_hf_fixtures.py [NAME ...]     with torch and transformers (dependency group `parity`)

A file has ``config``, ``ids``, ``logits``, ``weight:NAME`` of every tensor in multiples of 1/64, for
`WITH_GRADIENTS` ``grad:NAME``: of the mean cross-entropy of ``ids[:, 1:]``, and with a recurrent state
``greedy``: behind the first five of each row the likeliest token, twelve times.
"""

import pathlib
import sys
import tempfile
import tomllib

import numpy as np

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
TABLE = tomllib.loads(pathlib.Path(__file__).with_name("hf_models.toml").read_text())


def arguments(row):
    """What a row of the table makes a configuration with."""
    base = arguments(TABLE[row["like"]]) if "like" in row else {}
    own = {key: value for key, value in row.items() if key not in ("like", "none")}
    return base | dict.fromkeys(row.get("none", ())) | own


MODELS = {name: arguments(row) for name, row in TABLE["model"].items()}
WITH_GRADIENTS = ("gemma3_text", "olmo2", "gpt_oss", "glm4_moe", "deepseek_v3", "llama4_text", "qwen3_next")
WITH_STATES = "qwen3_next", "qwen3_5"
LENGTHS = {"qwen3_next": 72}
"""Positions where 24 would not do: two chunks of a gated delta net."""


def distribution(name, path):
    """Choose the mean and the standard deviation of a tensor's entries."""
    if "norm" in path:
        return (0.0 if name.startswith("gemma") else 1.0), 0.3
    if path.endswith("A_log"):
        return -3.0, 1.0  # so that a head forgets within some and within hundreds of positions
    return 0.0, {"sinks": 1.0, "e_score_correction_bias": 0.125}.get(path.rpartition(".")[2], 0.25)


def make(name, seed=0):
    """A random model: `transformers`' own module, whose norms and biases are far from one and zero."""
    import torch
    import transformers

    model_type = name.removesuffix("_long").removesuffix("_short")
    config = transformers.AutoConfig.for_model(model_type, **MODELS[name])
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
    """A model's config.json and tensors as files have them: in memory experts are laid out otherwise."""
    import safetensors.numpy

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        text = pathlib.Path(folder, "config.json").read_text()
        return text, safetensors.numpy.load_file(pathlib.Path(folder, "model.safetensors"))


def gradients(model, ids):
    """Gradients of the mean cross-entropy, in the parameters' places: laid out and named as weights are."""
    import torch

    model.train()
    logits = model(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    buffers = {path for path, _ in model.named_buffers()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    return {path: gradient for path, gradient in saved(model)[1].items() if path not in buffers}


def example(name, seed=0, batch_size=2):
    """What a fixture holds, by name."""
    import torch
    import transformers

    seq_len = LENGTHS.get(name, 24)
    model = make(name, seed)
    draw, size = np.random.default_rng(seed + 1), (batch_size, seq_len)
    ids = draw.integers(0, model.config.vocab_size, size, dtype=np.int32)
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    text, tensors = saved(model)
    arrays = {f"weight:{path}": tensors[path] for path in sorted(tensors)}
    if name.startswith(WITH_STATES):
        prompt = torch.tensor(ids[:, :5], dtype=torch.long)
        made = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
        arrays["greedy"] = made[:, 5:].numpy()
    if name in WITH_GRADIENTS:  # which take the weights' places
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
        largest = np.abs(data["logits"]).max()
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB, logits up to {largest:.1f}")
