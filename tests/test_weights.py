"""A model comes from Hugging Face's folder by the command line, lies on a mesh, and goes back into one."""

import dataclasses
import json
import os

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from shared import TABLES
from test_hf import OURS, random_params, same, state_dict, stored

from llmpar import Plan, Step, make_mesh, preset
from llmpar.cli.weights import ModelOptions, open_weights
from llmpar.training import hugging_face as hf
from llmpar.training.checkpoint import Checkpoints

BESIDE = TABLES["beside_a_tokenizer"]


def put_tokenizer(folder):
    """A tokenizer of words, and what lies beside one."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["x", "<s>", "</s>", "to", "be", "or", "not"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="x"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, entries in BESIDE.items():
        (folder / name).write_text(json.dumps(entries))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def put_fixture(folder, kind):
    """A model as `transformers` wrote it, with a tokenizer."""
    folder.mkdir()
    arrays = stored(kind)
    tensors = {name.removeprefix("weight:"): arrays[name] for name in arrays if name.startswith("weight:")}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(str(arrays["config"]))
    put_tokenizer(folder)
    return tensors


STAGES = Plan("pp=2 tp=2", schedule="gpipe", microbatches=4)


@pytest.mark.parametrize("kind, plan", [("qwen3_moe", Plan("ep=2 tp=2")), ("llama", STAGES)])
def test_a_model_goes_through_a_mesh_and_back_bit_by_bit(tmp_path, document, kind, plan):
    source, kept, out = (tmp_path / name for name in ("source", "kept", "out"))
    tensors = put_fixture(source, kind)
    config, tokenizer, load, said = open_weights(None, str(source), None, None)
    assert not said and tokenizer.vocab_size == 7
    step = Step(config, plan, make_mesh(plan.mesh), optax.sgd(0.1))
    shardings = jax.tree.map(lambda x: x.sharding, step.abstract_in_model_order.params)
    state = step.to_model_order(step.init(params=load(shardings)))
    assert same(state_dict(state.params, config), tensors), "from the mesh itself"
    Checkpoints(str(kept)).save(1, state, config, {"tokenizer": tokenizer.identity})
    files = document("export", str(kept), str(out))["files"]
    assert same(load_file(out / "model.safetensors"), tensors)
    for name in ("tokenizer.json", "chat_template.jinja", *BESIDE):
        assert (out / name).read_bytes() == (source / name).read_bytes() and name in files
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    alike = ("model_type", "max_position_embeddings", "vocab_size", "tie_word_embeddings")
    assert {k: after[k] for k in alike} == {k: before[k] for k in alike}
    assert after["eos_token_id"] == [2, 0]
    assert open_weights(None, str(out), None, None)[0] == dataclasses.replace(config, name="out")


@pytest.mark.long
def test_training_begins_with_a_folders_weights_and_the_same_command_goes_on(tmp_path, call, document):
    source, kept, text = (tmp_path / name for name in ("tiny", "kept", "text"))
    config = OURS["qwen3"]
    hf.save(source, random_params(config), config)
    put_tokenizer(source)
    text.write_text("to be or not to be " * 400)
    ask = ["train", "--from", str(source), "--data", str(text), "--checkpoints", str(kept), "--held-out", "0"]
    ask += "--mesh fsdp=2 --batch-size 4 --seq-len 16 --learning-rate 1e-9 --every 1".split()
    losses = document(*ask, "--steps", "1")["losses"]
    found = hf.load(source, config)
    assert abs(losses[0] - np.log(config.vocab_size)) > 1, "no fresh weights"
    status, _, err = call(*ask, "--steps", "2")
    assert status == 0 and "goes on from the checkpoint of step 1" in err and "begins with" not in err
    about = Checkpoints(str(kept)).about()
    assert about["made"]["from"] == str(source) and about["config"].name == "tiny" != preset("tiny")
    assert about["made"]["tokenizer"]["name"] == str(source / "tokenizer.json")
    here = jax.tree.map(lambda x: x.sharding, found)
    trained = open_weights(str(kept), None, None, None)[2](here)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), trained, found)
    ask = ["generate", "to be", "--tokens", "4", "--mesh", "dp=1"]
    said = document(*ask, "--from", str(source))["tokens"]
    assert said == document(*ask, "--checkpoints", str(kept))["tokens"]
    source.rename(tmp_path / "moved")
    status, _, err = call("export", str(kept), str(tmp_path / "out"))
    assert status == 1 and "cannot read the tokenizer" in err
    moved = str(tmp_path / "moved" / "tokenizer.json")
    out = document("export", str(kept), str(tmp_path / "out"), "--tokenizer", moved)
    assert "chat_template.jinja" in out["files"]


def test_a_downloaded_model_is_found_by_its_name(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "models--us--little" / "snapshots" / "0a1b"
    hf.save(snapshot, random_params(OURS["llama"]), OURS["llama"])
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    config, tokenizer, _, said = open_weights(None, "us/little", None, None)
    assert config == preset("us/little") and config.name == "little" and tokenizer.name == "bytes"
    assert said == ["us/little has no tokenizer.json: using the tokenizer 'bytes'"]


def test_an_engine_holds_weights_and_cache_in_the_dtype_that_was_asked_for(tmp_path):
    """On a mesh with two copies of each KV head."""
    config, folder = dataclasses.replace(OURS["llama"], num_kv_heads=2), str(tmp_path / "kept")
    hf.save(folder, random_params(config), config)
    for source in ("from_", "model"):
        options = ModelOptions(mesh="tp=4", dtype="bfloat16", **{source: folder})
        engine = options.engine(options.plan(), *options.opened()[::2], [], 1, 8)
        held = jax.tree.leaves((engine.decoder.params, engine.decoder.cache))
        assert {str(x.dtype) for x in held} == {"bfloat16"}


def test_what_cannot_be_is_refused_before_a_weight_is_read(tmp_path, call, monkeypatch):
    folder, empty = tmp_path / "model", tmp_path / "empty"
    hf.save(folder, random_params(OURS["llama"]), OURS["llama"])
    empty.mkdir()
    (empty / "config.json").write_text((folder / "config.json").read_text())
    monkeypatch.setattr(hf._Weight, "read", None)
    asked = {
        "is no folder; give": ["generate", "--from", str(tmp_path / "none")],
        "has neither model.safetensors nor": ["generate", "--from", str(empty)],
        "leave --model out": ["train", "--from", str(folder), "--model", "llama3-8b"],
        "leave --checkpoints out": ["generate", "--from", str(folder), "--checkpoints", "kept"],
        "not one of checkpoints": ["train", "--from", str(folder), "--checkpoints", str(folder)],
        "of 32,769 tokens does not fit into the 32,768 positions": ["generate", "a" * 32_768],
        "has 300 tokens": ["generate", "--from", str(folder), "--tokenizer", str(tmp_path)],
    }
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"{i}": i for i in range(299)} | {"<s>": 299}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for says, words in asked.items():
        status, out, err = call(*words)
        assert (status, out) == (1, "") and says in err and err.count("llmpar: ") == 1, (words, err)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"more": tensors["model.norm.weight"]}, folder / "model.safetensors")
    status, _, err = call("train", "--from", str(folder), "--mesh", "dp=1")
    assert status == 1 and "'more' has no place in it" in err
    assert not os.path.exists(tmp_path / "out")
