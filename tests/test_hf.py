"""Weights in and out of Hugging Face's format; the logits of transformers (make_hf_fixtures.py)."""

import dataclasses
import functools
import json
import math
import pathlib
import sys
import tempfile
import weakref
from unittest import mock

import jax
import make_hf_fixtures
import numpy as np
import oracle
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from parity import full_rows, logits_of
from plans import by_mark

from llmpar.model.weights import weights_tree
from llmpar.parallel.mesh import make_mesh, sharding
from llmpar.plan.model_config import ExpertConfig, RopeScaling
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS, from_hugging_face, preset, to_hugging_face
from llmpar.plan.serving import with_experts
from llmpar.training import hugging_face as hf
from llmpar.training.tokenizers import open_tokenizer


def state_dict(params, config):
    flat = flatten_dict(params, sep=".")
    return dict(hf.tensors_of(hf._weights(config), flat.__getitem__, "float32"))


KINDS = tuple(make_hf_fixtures.MODELS)
ROWS = "ernie4_5 seed_oss glm glm4 dots1 minimax_m2 olmoe qwen2_moe glm4_moe_lite granitemoe exaone4".split()
ROWS += "olmo3 smollm3 gemma2 qwen3_5_text deepseek_v2".split()
"""Families whose rows others have, in another mix."""
by_cost = lambda kinds: [pytest.param(kind, marks=[pytest.mark.long] * (kind in ROWS)) for kind in kinds]
TOLERANCE = 1e-4
"""Absolute, on float32 logits of up to 7. Found: 1.2e-5 at most; faults of names and layouts give 1."""


def read_config(folder, text):
    """The configuration that a folder with this config.json has."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    return from_hugging_face(str(folder / "config.json"))


@functools.cache
def stored(kind):
    with np.load(make_hf_fixtures.FIXTURES / f"hf_{kind}.npz") as file:
        return {name: file[name] for name in file}


@functools.cache
def fixture(kind):
    data = stored(kind)
    tensors = {name.removeprefix("weight:"): data[name] for name in data if name.startswith("weight:")}
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(pathlib.Path(folder, kind), str(data["config"]))
    return config, tensors, data["ids"], data["logits"]


def on_host(weight, tensors, sharding, dtype):
    """`hf._Weight.place` without a program for each shape: the stack of all that is read."""
    ends = [(0, n) for n in weight.shape[len(weight.stacked) :]]
    parts = [weight.read(tensors[name], dtype, *ends) for name in weight.names]
    return np.stack(parts).reshape(weight.shape)


def from_tensors(tensors, config):
    with mock.patch.object(hf._Weight, "place", on_host):
        return hf.from_state_dict(tensors, config)


def logits(params, config, ids):
    """What our model computes for these tokens, one document a row."""
    return np.asarray(logits_of(config)(params, full_rows(np.int32(ids))))


def same(a, b):
    """Whether two dicts or trees have the same leaves, bit by bit."""
    alike = lambda x, y: x.dtype == y.dtype and np.array_equal(x, y)
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(alike, a, b))


def in_float64(config, tensors, run, *batch):
    """What `oracle` computes of these tensors."""
    params = flatten_dict(from_tensors(tensors, config), sep=".")
    with oracle.in_float64():
        weights = {path: np.asarray(w, np.float64) for path, w in params.items()}
        return jax.tree.map(np.asarray, jax.jit(run)(weights, *batch))


@pytest.mark.parametrize("kind", by_cost(KINDS))
def test_tensors_survive_the_round_trip_and_give_the_logits_of_transformers(kind):
    config, tensors, ids, theirs = fixture(kind)
    params = from_tensors(tensors, config)
    shapes = {path: x.shape for path, x in flatten_dict(params, sep=".").items()}
    assert shapes == {path: weight.shape for path, weight in config.weights().items()}
    assert same(state_dict(params, config), tensors)
    assert np.abs(theirs).max() > 1
    assert np.abs(logits(params, config, ids) - theirs).max() < TOLERANCE


GRADIENTS = "gpt_oss", "deepseek_v3"


@pytest.mark.parametrize("kind", by_cost(sorted(set(KINDS) - set(GRADIENTS))))
def test_the_oracle_computes_the_logits_of_transformers(kind):
    """The others' gradients, which depend on the logits, are below."""
    config, tensors, ids, theirs = fixture(kind)
    run = lambda weights, batch: oracle.logits_of(weights, batch, config, None)[0]
    assert np.abs(in_float64(config, tensors, run, full_rows(ids, ids)) - theirs).max() < TOLERANCE


OTHERS = sorted({*make_hf_fixtures.WITH_GRADIENTS} - {*GRADIENTS})


@pytest.mark.parametrize("kind", by_mark({"gate": GRADIENTS[1:], "long": GRADIENTS[:1], "nightly": OTHERS}))
def test_the_oracle_computes_the_gradients_of_transformers(kind):
    """Of the cross-entropy alone: what balances experts is left out."""
    config, tensors, ids, _ = fixture(kind)
    config = with_experts(config, aux_loss=0.0)
    run = jax.grad(lambda weights, batch: oracle.loss(weights, batch, config, None)[0])
    grads = in_float64(config, tensors, run, full_rows(ids[:, :-1], ids[:, 1:]))
    theirs = {name.removeprefix("grad:"): x for name, x in stored(kind).items() if name.startswith("grad:")}
    ours = dict(hf.tensors_of(hf._weights(config), grads.__getitem__, "float64"))
    assert theirs.keys() <= ours.keys() and not any(ours[name].any() for name in ours.keys() - theirs.keys())
    for name, x in theirs.items():
        assert np.abs(ours[name] - x).max() <= TOLERANCE * np.abs(x).max(), name


LESSON = dataclasses.replace(preset("tiny"), num_layers=2)
MIXTRAL = ExpertConfig(4, 2, aux_loss=0.1, z_loss=0.2, capacity_factor=4.0)
OURS = {
    "llama": LESSON,
    "llama3.2": dataclasses.replace(LESSON, tied=True, rope_scaling=RopeScaling(32.0, original_context=32)),
    "mistral": dataclasses.replace(LESSON, window=5),
    "qwen2": dataclasses.replace(LESSON, qkv_bias=True, tied=True, rope_theta=1e6),
    "qwen2 with a window": dataclasses.replace(LESSON, qkv_bias=True, window=5),
    "qwen3": dataclasses.replace(LESSON, qk_norm=True, head_width=8),
    "mixtral": dataclasses.replace(LESSON, experts=MIXTRAL),
    "qwen3_moe": dataclasses.replace(LESSON, qk_norm=True, experts=ExpertConfig(8, 3, renormalise=False)),
}


@functools.cache
def random_params(config):
    """Weights of a size that makes logits differ."""
    draw = np.random.default_rng(3)
    number = lambda path, w: np.float32(path[-1].key == "scale") + 0.2 * draw.standard_normal(w.shape, "f4")
    return jax.tree.map_with_path(number, unflatten_dict(config.weights(), sep="."))


@pytest.mark.parametrize("kind", OURS)
def test_files_survive_the_round_trip(tmp_path, kind):
    config, params = OURS[kind], random_params(OURS[kind])
    hf.save(tmp_path / kind, params, config, "bfloat16")
    assert sorted(path.name for path in (tmp_path / kind).iterdir()) == ["config.json", "model.safetensors"]
    assert from_hugging_face(str(tmp_path / kind / "config.json")) == dataclasses.replace(config, name=kind)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    with mock.patch.object(hf._Weight, "place", on_host):
        assert same(hf.load(tmp_path / kind, config, dtype="bfloat16"), rounded)
        wide = jax.tree.map(lambda x: x.astype("float32"), rounded)
        assert same(hf.load(tmp_path / kind, config), wide)


@pytest.mark.parametrize("name", [name for name in PRESETS if not PRESETS[name].described])
def test_every_preset_survives_as_config_json(tmp_path, name):
    text = json.dumps(to_hugging_face(PRESETS[name]))
    assert read_config(tmp_path / name, text) == PRESETS[name]


def test_what_is_exported_says_how_long_a_text_may_be_and_where_it_begins_and_ends(tmp_path):
    """What other programs take from the folder: without a length, `transformers` assumes 2,048."""
    published = ("llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama3.2-1b", "llama3.2-3b")
    assert {to_hugging_face(PRESETS[name])["max_position_embeddings"] for name in published} == {131_072}
    assert to_hugging_face(PRESETS["llama3-8b"])["max_position_embeddings"] == 8192
    tokenizers = pytest.importorskip("tokenizers")
    source, out, params = tmp_path / "source", tmp_path / "out", random_params(LESSON)
    source.mkdir()
    words = tokenizers.models.WordLevel({"x": 0, "<s>": 1, "</s>": 2}, unk_token="x")
    tokenizers.Tokenizer(words).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (source / "config.json").write_text('{"eos_token_id": 0, "bos_token_id": 7}')
    hf.save(out, params, LESSON, tokenizer=open_tokenizer(str(source)))
    said = json.loads((out / "config.json").read_text())
    assert (said["bos_token_id"], said["eos_token_id"]) == (1, 0)
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert open_tokenizer(str(out)).start_id == 1
    (source / "generation_config.json").write_text('{"eos_token_id": [0, 2], "temperature": 0.6}')
    hf.save(out, params, LESSON, tokenizer=open_tokenizer(str(source)))
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [0, 2]
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6
    hf.save(tmp_path / "bytes", params, LESSON, tokenizer=open_tokenizer("bytes"))
    assert json.loads((tmp_path / "bytes" / "generation_config.json").read_text()) == {"bos_token_id": 256}


def write_shards(folder, tensors, num_shards=3):
    """A folder as large models come: shards and an index."""
    from safetensors.numpy import save_file

    shards = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    places = {name: shards[i % num_shards] for i, name in enumerate(tensors)}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return [folder / shard for shard in shards]


def test_shards_are_read_by_their_index_and_what_is_redundant_is_left_out(tmp_path):
    """Where a head lies in a file beside the embedding that it is; another one has no place."""
    config, tensors, _, _ = fixture("qwen2")
    table = tensors["model.embed_tokens.weight"]
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32), "lm_head.weight": table}
    write_shards(tmp_path, tensors | more)
    with mock.patch.object(hf._Weight, "place", on_host):
        assert same(hf.load(tmp_path, config), hf.from_state_dict(tensors, config))
    with pytest.raises(ValueError, match="'lm_head.weight' has no place"):
        hf.from_state_dict(tensors | {"lm_head.weight": table + 1}, config)


def test_published_files_beside_a_part_that_sees_are_read_and_their_text_is_written(tmp_path):
    """As Qwen3.5's: the text's names have another beginning, and a layer's experts are one tensor."""
    config, tensors, _, _ = fixture("qwen3_5_moe_text")
    raw = {"model_type": "qwen3_5_moe", "text_config": json.loads(config.described.file)}
    seeing = read_config(tmp_path, json.dumps(raw | {"vision_config": {"hidden_size": 8}}))
    theirs, stacks = {"model.visual.merger.norm.weight": tensors["lm_head.weight"]}, {}
    for name, x in tensors.items():
        first, _, last = name.replace("model.", "model.language_model.").partition(".experts.")
        if last:
            stacks.setdefault(first, {}).setdefault(last.split(".")[1], []).append(x)
        else:
            theirs[first] = x
    for first, own in stacks.items():
        gate_up = [np.concatenate(pair) for pair in zip(own["gate_proj"], own["up_proj"], strict=True)]
        theirs |= {f"{first}.experts.gate_up_proj": np.stack(gate_up)}
        theirs |= {f"{first}.experts.down_proj": np.stack(own["down_proj"])}
    params = from_tensors(theirs, seeing)
    assert same(params, from_tensors(tensors, config))
    assert same(state_dict(params, seeing), tensors) and "vision_config" not in to_hugging_face(seeing)


def test_a_large_model_is_written_in_shards_and_a_folder_of_another_is_refused(tmp_path, monkeypatch):
    config, params = OURS["mixtral"], random_params(OURS["mixtral"])
    monkeypatch.setattr(hf, "SHARD_BYTES", 50_000)
    hf.save(tmp_path, params, config, "bfloat16")
    files = sorted(tmp_path.glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(files) > 10 and max(sizes) < 66_000, "more than 50,000 bytes only where one tensor has them"
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(hf._Weight, "place", on_host)
        found = hf.load(tmp_path, config, dtype="bfloat16")
    assert same(found, jax.tree.map(lambda x: x.astype("bfloat16"), params))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds other weights already.*; give another folder"):
        hf.save(tmp_path, params, LESSON)
    with pytest.raises(ValueError, match=r"not written as int8; use float32 or bfloat16"):
        hf.save(tmp_path, params, config, "int8")
    (tmp_path / "new").mkdir()
    longer = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), params["blocks"])
    with pytest.raises(ValueError, match=r"made of \[2, .*not of \[3, .*in the model's order"):
        hf.save(tmp_path / "new", params | {"blocks": longer}, config)
    assert not [*(tmp_path / "new").glob("*.safetensors")] and not (tmp_path / "new" / "config.json").exists()


class Spy:
    """A tensor that remembers how much of it was read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __getitem__(self, index):
        self.reads.append(self.array[index].size)
        return self.array[index]


def test_each_device_reads_its_own_shard_once():
    config, plan = OURS["qwen2"], Plan("dp=2 fsdp=2")
    whole = random_params(config)
    tensors = {name: Spy(x) for name, x in state_dict(whole, config).items()}
    mesh = make_mesh(plan.mesh)
    shardings = weights_tree(config, lambda w: sharding(mesh, plan.resolve().stored(w.dims)))
    params = hf.from_state_dict(tensors, config, shardings)
    assert same(params, whole)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    for name, spy in tensors.items():
        if "bias" not in name:  # cut along the width of a head, so read with whole heads
            assert sum(spy.reads) == spy.array.size and len(set(spy.reads)) == 1, name
    assert tensors["model.layers.0.mlp.up_proj.weight"].reads == [64 * 128 // 2] * 2


def test_no_more_than_one_tensor_of_a_file_is_in_host_memory(tmp_path, monkeypatch):
    """What is read and still alive, whenever something is read: of stacks of 2 layers and 8 experts."""
    config, alive, most, read = OURS["qwen3_moe"], [], [], hf._Weight.read
    params, plan, mesh = random_params(config), Plan("ep=2 tp=2"), make_mesh("ep=2 tp=2")
    hf.save(tmp_path, params, config)

    def watched(weight, tensor, *args):
        held = sum(x.nbytes for ref in alive if (x := ref()) is not None)
        most.append(held - 4 * math.prod(tensor.get_shape()))
        alive.append(weakref.ref(block := read(weight, tensor, *args)))
        return block

    monkeypatch.setattr(hf._Weight, "read", watched)
    shardings = weights_tree(config, lambda w: sharding(mesh, plan.resolve().stored(w.dims)))
    found = hf.load(tmp_path, config, shardings)
    assert same(found, params) and jax.tree.map(lambda x: x.sharding, found) == shardings
    assert len(most) >= len(state_dict(params, config)) and max(most) <= 0


def write_quantized(folder, tensors, config, how):
    """A folder with float8 and packed tensors, which no other package writes as numpy has them."""
    kinds = {"float8_e4m3fn": "F8_E4M3", "uint8": "U8", "float32": "F32"}
    header, end = {}, 0
    for name, x in tensors.items():
        at, end = end, end + x.nbytes
        header[name] = {"dtype": kinds[str(x.dtype)], "shape": x.shape, "data_offsets": (at, end)}
    hf._write(folder / "model.safetensors", header, iter(tensors.values()))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return from_hugging_face(str(folder / "config.json"))


def check_expanded(folder, config, stands):
    """A folder's weights are these tensors, in any region that a device may have of one."""
    with mock.patch.object(hf._Weight, "place", on_host):
        assert same(hf.load(folder, config), from_tensors(stands, config))
    for name, tensor in hf.open_folder(folder).items():
        part = tuple(slice(n // 4, n - n // 3) for n in tensor.get_shape())
        assert np.array_equal(tensor[part], stands[name][part]), name


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [5, 3]}


def test_float8_weights_are_multiplied_out(tmp_path):
    """As DeepSeek-V3's files have them, with blocks that divide no size."""
    _, tensors, _, _ = fixture("deepseek_v3")
    draw, files, stands = np.random.default_rng(0), dict(tensors), dict(tensors)
    for name, x in tensors.items():
        if "_proj" in name:
            scales = draw.uniform(0.01, 0.02, [-(-x.shape[0] // 5), -(-x.shape[1] // 3)]).astype(np.float32)
            files[name] = np.asarray(jax.numpy.asarray(50 * x, "float8_e4m3fn"))
            files[name + "_scale_inv"] = scales
            own = files[name].astype(np.float32)
            each = [[n * scales[i // 5, j // 3] for j, n in enumerate(row)] for i, row in enumerate(own)]
            stands[name] = np.array(each)
    raw = json.loads(str(stored("deepseek_v3")["config"]))
    config = write_quantized(tmp_path, files, raw, FP8)
    check_expanded(tmp_path, config, stands)
    assert "quantization_config" not in to_hugging_face(config)
    write_quantized(tmp_path, files, raw, FP8 | {"weight_block_size": [4, 3]})
    with pytest.raises(ValueError, match=r"the scales of .* have shape .*, and blocks of \[4, 3\] need"):
        hf.load(tmp_path, config)


def test_mxfp4_weights_are_multiplied_out(tmp_path):
    """As gpt-oss' files have them: two numbers in a byte, a power of two for 32 of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": None}
    raw = json.loads(str(stored("gpt_oss")["config"])) | sizes
    config = write_quantized(tmp_path, {}, raw, {"quant_method": "mxfp4"})
    stands, draw = state_dict(random_params(config), config), np.random.default_rng(0)
    files, values = dict(stands), [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for name in [name for name in stands if name.endswith("_proj") and "experts" in name]:
        experts, width, rows = stands[name].shape
        blocks = draw.integers(0, 256, (experts, rows, width // 32, 16), np.uint8)
        powers = draw.integers(120, 130, blocks.shape[:3], np.uint8)
        files |= {f"{name}_blocks": blocks, f"{name}_scales": powers}
        del files[name]
        for e, i, j in np.ndindex(experts, width, rows):
            byte = int(blocks[e, j, i // 32, i % 32 // 2])
            code = byte >> 4 if i % 2 else byte & 15
            power = 2.0 ** (int(powers[e, j, i // 32]) - 127)
            stands[name][e, i, j] = values[code % 8] * (-1) ** (code // 8) * power
    write_quantized(tmp_path, files, raw, {"quant_method": "mxfp4"})
    check_expanded(tmp_path, config, stands)


def without(tensors, name):
    return {k: x for k, x in tensors.items() if k != name}


Q, LAST_NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
BIAS = Q.replace("1", "0").replace("weight", "bias")
REFUSED = {
    "missing": (lambda t: without(t, Q), rf"'{Q}' is missing; use"),
    "unexpected": (lambda t: t | {BIAS: t[LAST_NORM]}, r"q_proj.bias' has no place"),
    "a layer too many": (lambda t: t | {Q.replace("1", "2"): t[Q]}, r"layers.2.self_attn.q_proj.weight' has"),
    "misshapen": (lambda t: t | {Q: t[Q][:16]}, r"q_proj.weight' has shape \[16, 32\], not \[32, 32\]"),
    "quantized": (lambda t: t | {Q: t[Q].astype(np.int8)}, r"q_proj.weight' holds int8, but only float64, "),
    "many": (lambda t: {}, r"'lm_head.weight' is missing; .*; and 18 more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tensors_are_refused_by_name(name):
    config, tensors, _, _ = fixture("llama")
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        hf.from_state_dict(make(tensors), config)


def test_unreadable_files_are_refused(tmp_path):
    config, tensors, _, _ = fixture("llama")
    with pytest.raises(ValueError, match="neither model.safetensors nor model.safetensors.index.json"):
        hf.load(tmp_path, config)
    files = write_shards(tmp_path, tensors)
    whole = files[1].read_bytes()
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(ValueError, match=r"tensor '.*' is in .* and in a file before it"):
        hf.load(tmp_path, config)
    files[1].write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=f"cannot read weights from '.*{files[1].name}'"):
        hf.load(tmp_path, config)
    files[1].unlink()
    with pytest.raises(ValueError, match=f"cannot read the file of weights '.*{files[1].name}'"):
        hf.load(tmp_path, config)
    for text, said in (("[]", "not an object"), ('{"weight_map": [1]}', "names no files")):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            hf.load(tmp_path, config)


@pytest.mark.parametrize(
    "name", ["../secret/model.safetensors", "/etc/model.safetensors", "in/model.safetensors", "."]
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match="it names '.*', which is no file of that folder"):
        hf.load(tmp_path, LESSON)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ValueError, match=r"package safetensors; install the extra llmpar\[hf\]"):
        hf.load(tmp_path, LESSON)


def test_a_full_disk_is_told_and_what_was_begun_is_taken_away(tmp_path, monkeypatch):
    config = dataclasses.replace(preset("tiny"), num_layers=1)
    params = random_params(config)
    full = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    monkeypatch.setattr(hf.os, "replace", full)
    with pytest.raises(ValueError, match="No space left on device; free some room, or give another folder"):
        hf.save(tmp_path / "full", params, config)
    assert list((tmp_path / "full").iterdir()) == []
