"""Adapters: losses and weights of `peft` (make_lora_fixture.py); merged or not, a model says the same."""

import dataclasses
import math
import shlex
import statistics

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from make_hf_fixtures import FIXTURES
from parity import LLAMA, dealt, family, full_rows, logits_of, put, weights
from parity import batch as some_batch
from shared import TABLES
from test_planner import question

from llmpar import Plan, make_mesh
from llmpar.cli.commands import parse
from llmpar.cli.export import Export
from llmpar.model.weights import joined, trainable_params, weights_tree
from llmpar.plan.mesh_shape import MeshShape
from llmpar.plan.model_config import ADAPTABLE, LoraConfig, matrix_dims
from llmpar.plan.presets import from_hugging_face, preset
from llmpar.planner import planner
from llmpar.planner.planner import memory_verdict
from llmpar.predict import hardware, memory, workload
from llmpar.predict.hardware import chip
from llmpar.predict.parameters import trained_params
from llmpar.predict.time import step_time
from llmpar.training import hugging_face as hf
from llmpar.training.checkpoint import Checkpoints
from llmpar.training.hugging_face import merged
from llmpar.training.step import State, Step

ADAPTED = dataclasses.replace(LLAMA, lora=LoraConfig(3, 6.0, ADAPTABLE))
MODULES = {"attention": "self_attn.{}_proj", "ffn": "mlp.{}_proj"}


def tuned(folder):
    """The fixture: its model with adapters, the weights at the start, and all arrays by name."""
    files = (np.load(FIXTURES / f"{name}.npz") for name in ("hf_llama", "lora_llama"))
    base, ours = ({name: file[name] for name in file} for file in files)
    (folder / "config.json").write_text(str(base["config"]))
    config = dataclasses.replace(from_hugging_face(str(folder / "config.json")), lora=ADAPTED.lora)
    tensors = {name.removeprefix("weight:"): base[name] for name in base if name.startswith("weight:")}
    params = flatten_dict(jax.tree.map(np.asarray, hf.from_state_dict(tensors, config)), sep=".")

    def adapter(path, shape):
        _, part, _, name = path.split(".")
        module = f"weight:model.layers.{{}}.{MODULES[part].format(name[:-2])}.lora_{name[-1].upper()}"
        theirs = [ours[f"{module.format(i)}.default.weight"].T for i in range(config.num_layers)]
        return np.stack(theirs).reshape(shape)

    params |= {path: adapter(path, w.shape) for path, w in config.weights().items() if not w.frozen}
    return config, unflatten_dict(params, sep="."), ours


@pytest.mark.long
def test_three_steps_and_the_merged_model_are_pefts(tmp_path):
    """Losses within 1e-5 (found: 1e-6), logits of up to 5.5 within 1e-4 (found: 1.3e-5)."""
    plan = Plan("fsdp=2 sp=2 tp=2", tp_sequence=True, remat="selective")
    config, params, theirs = tuned(tmp_path)
    rule = optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    step, ids = Step(config, plan, make_mesh(plan.mesh), rule, clip=None), theirs["ids"]
    batch, state, losses = full_rows(ids[:, :-1], ids[:, 1:]), step.init(params=params), []
    for _ in range(4):
        before = jax.tree.map(np.asarray, state.params)
        state, metrics = step.run(state, put(dealt(batch, plan), step.batch_sharding))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, theirs["losses"], rtol=0, atol=1e-5)
    logits = logits_of(dataclasses.replace(config, lora=None))(merged(before, config), batch)
    np.testing.assert_allclose(logits, theirs["logits"], rtol=0, atol=1e-4)


@pytest.mark.long
def test_adapters_start_without_effect_and_the_base_never_moves():
    """Frozen weights keep their bits, A and B move; and the first loss is the one without adapters."""
    plan, losses = Plan("dp=2 fsdp=2 tp=2", zero=2, dtype="bfloat16"), []
    make = lambda config: Step(config, plan, make_mesh(plan.mesh), optax.adamw(1e-2))
    base, step, config = make(LLAMA), make(ADAPTED), ADAPTED
    data = put(dealt(some_batch(), plan), step.batch_sharding)
    state = step.init(params=weights(LLAMA))
    begin = jax.tree.map(np.asarray, state.params)
    for _ in range(2):
        state, metrics = step.run(state, data)
        losses.append(float(metrics["loss"]))
    alone, tokens, *_ = base.evaluate(put(weights(LLAMA), base.shardings.params), data)
    assert alone / tokens == pytest.approx(losses[0], rel=1e-3) and losses[0] > losses[1]
    kinds = weights_tree(config, lambda w: "bfloat16" if w.frozen else "float32")
    assert jax.tree.map(lambda w: str(w.dtype), state.params) == kinds
    same = jax.tree.map(lambda a, b: np.array_equal(a, np.asarray(b)), begin, state.params)
    assert same == weights_tree(config, lambda w: w.frozen)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(trainable_params(begin, config)))


def test_merged_or_beside_their_weights_adapters_give_the_same_logits():
    """On a mesh that cuts them. Exactly, but for the order of float32 sums."""
    config = ADAPTED
    params, base = weights(config), dataclasses.replace(config, lora=None)
    plan = Plan("fsdp=2 sp=2 tp=2")
    step = Step(config, plan, make_mesh(plan.mesh), optax.sgd(0.1))
    one = merged(jax.device_put(params, step.shardings.params), config)
    assert jax.tree.structure(one) == jax.tree.structure(weights_tree(base))
    assert one["blocks"]["attention"]["q"].sharding == step.shardings.params["blocks"]["attention"]["q"]
    want, got = logits_of(config)(params, some_batch()), logits_of(base)(one, some_batch())
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    without = {path: w for path, w in params["blocks"]["attention"].items() if path != "lora"}
    bare = joined(merged(params, config), {"blocks": {"attention": without}})
    assert np.abs(logits_of(base)(bare, some_batch()) - want).max() > 1e-3


def test_a_checkpoint_keeps_frozen_weights_in_their_dtype_and_gives_them_in_any(tmp_path):
    narrow, wide = (Plan("fsdp=2 tp=2", dtype=dtype) for dtype in ("bfloat16", "float32"))
    make = lambda plan: Step(ADAPTED, plan, make_mesh(plan.mesh), optax.sgd(0.1, momentum=0.9))
    step, keep = make(narrow), Checkpoints(str(tmp_path))
    state = step.init(3)
    with keep.writing():
        keep.save(1, state, ADAPTED)
    other = keep.restore(make(wide).abstract_in_model_order, ADAPTED)
    assert {x.dtype for x in jax.tree.leaves(other.params)} == {np.dtype("float32")}
    again = keep.restore(step.abstract_in_model_order, ADAPTED)
    alone = Checkpoints(str(tmp_path)).params(step.shardings.params, ADAPTED)
    for found in (other.params, again.params, alone):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, found, state.params)))
    assert isinstance(again, State) and set(keep.about()["narrow"].values()) == {"bfloat16"}


def test_a_command_exports_adapters_in_their_weights(tmp_path):
    """What the folder holds gives the logits of the checkpoint, whose base is bfloat16."""
    config = dataclasses.replace(LLAMA, lora=LoraConfig(2, 4.0, ("q", "down")))
    plan, keep = Plan("fsdp=2", dtype="bfloat16"), Checkpoints(str(tmp_path / "kept"))
    state = Step(config, plan, make_mesh(plan.mesh), optax.sgd(0.1)).init(params=weights(config))
    with keep.writing():
        keep.save(1, state, config)
    Export(str(tmp_path / "kept"), str(tmp_path / "out"), json=True).run()
    read = from_hugging_face(str(tmp_path / "out" / "config.json"))
    got = logits_of(read)(hf.load(tmp_path / "out", read), some_batch())
    want = logits_of(config)(jax.tree.map(lambda w: np.asarray(w, "float32"), state.params), some_batch())
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_the_gate_of_a_feed_forward_is_not_attentions():
    config = dataclasses.replace(family("qwen3_5_text"), lora=LoraConfig(2, targets=("gate",)))
    assert any("attention.gate" in path for path in config.weights())
    assert {path.split(".")[2] for path in config.weights() if ".lora." in path} == {"ffn"}


def test_muon_reads_an_adapter_from_its_inputs_to_its_outputs():
    read = {p.split(".")[-1]: matrix_dims(w.dims) for p, w in ADAPTED.weights().items() if not w.frozen}
    down = {"down_a": ("m", "z"), "down_b": ("z", "d"), "o_a": ("nh", "z"), "o_b": ("z", "d")}
    ups = {f"{name}_{x}": ("d", "z") if x == "a" else ("z", "m") for name in ("gate", "up") for x in "ab"}
    heads = {"q_a": ("d", "z"), "q_b": ("z", "nh")}
    heads |= {f"{name}_{x}": ("d", "z") if x == "a" else ("z", "kh") for name in "kv" for x in "ab"}
    assert read == down | ups | heads


ALL = "lora_targets=" + ",".join(ADAPTABLE)


@pytest.mark.parametrize("name", ["llama3-8b", "gemma-3-1b"])
def test_adapters_are_priced_by_what_is_computed(name):
    """At a device's peak: four FLOPs of a frozen matrix, six of an adapter, of all tokens; by either text."""
    ideal = dataclasses.replace(hardware.Rates(), matmuls=1.0, kernel_s=1e-15, memory=1.0)
    model, plain = f"{name} lora_rank=8 {ALL}", preset(name)
    row = dataclasses.replace(chip("h100"), hbm_bytes_per_s=1e30, cores=0)  # no tile is padded
    seconds = {}
    for config in (plain, preset(model)):
        run = workload.of_plan(config, Plan("tp=2", dtype="bfloat16"), row, 2, 4096)
        seconds[config] = step_time(run, ideal).terms["matmuls"] * row.flops_per_s * 2
    full, lora = seconds.values()
    copies = 2 if name == "gemma-3-1b" else 1  # of its one KV head: B of k and v too
    doubled = sum(math.prod(w.shape) for p, w in preset(model).weights().items() if p[-3:] in ("k_b", "v_b"))
    # A of what tp cuts behind it is whole on both ranks
    whole = sum(math.prod(w.shape) for p, w in preset(model).weights().items() if ".lora." in p)
    assert 6 * 8192 * whole < lora - full * 4 / 6 < 6 * 8192 * (2 * whole + (copies - 1) * doubled)
    run = workload.of_plan(preset(model), Plan("dp=1"), row, 2, 4096)
    useful = memory.flops(preset(model), 2, 4096)
    less = workload.of_plan(plain, Plan("dp=1"), row, 2, 4096).flops() - run.flops()
    assert less == pytest.approx(memory.flops(plain, 2, 4096)["weights"] - useful["weights"], rel=1e-3)


def test_a_model_with_adapters_is_planned(call, document):
    """Frozen weights in 16 bits, moments of adapters alone; the lines train what was priced."""
    flags = ["plan", "--devices", "8", "--seq-len", "4096", "--lora-rank", "16", "--lora-targets", "q", "v"]
    found = document(*flags, "--mesh", "fsdp=8", "--fix", "zero=3 loss_chunks=8")
    (row,) = found["plans"]
    model = "llama3-8b lora_rank=16 lora_targets=q,v"
    adapters, config = trained_params(preset(model)), preset(model)
    assert found["model"] == model and "4 for each frozen one" in found["mfu_is"]
    held = row["memory_bytes"]
    assert held["params"] == (2 * (config.num_params - adapters) + 4 * adapters) / 8
    assert held["optimizer"] == 8 * adapters / 8 and held["grads"] + held["unreduced"] <= 4 * adapters
    for name in ("train", "compile"):
        step = parse(shlex.split(row[name].partition("llmpar ")[2])).step
        assert step.settle(8).config.lora == config.lora, row[name]
    assert preset("tiny lora_rank=4 lora_alpha=0.5").lora == LoraConfig(4, 0.5)
    twice, alone = ("--model", model, "--lora-rank", "8"), ("--lora-alpha", "8")
    for words, says in ((twice, "'lora_rank' is given twice"), (alone, "give lora_rank too")):
        status, _, err = call("plan", *words, "--devices", "8")
        assert status == 1 and says in err


def test_adapters_fit_where_all_weights_do_not():
    one = planner.decide(question("llama3-70b lora_rank=16", seq=4096)).plans[0]
    assert memory_verdict(question("llama3-70b", seq=4096), one).words == "fits"


def test_published_steps_of_adapters_that_no_constant_was_fitted_to():
    """Within 22 %, half of them within 10: eager adapters on A100s are predicted too fast."""
    errors, soft = [], workload.SOFTWARE["automodel"]
    for name, seconds in TABLES["adapters_nemo"].items():
        config = preset(f"{name} lora_rank=16 {ALL}")
        run = workload.Run(config, chip("h100"), MeshShape(), 4096, 2, 16, soft)
        errors.append(step_time(run).step_s / seconds - 1)
    for name, (gpus, *measured) in TABLES["adapters_qwen"].items():
        config = preset(f"{name} vocab_size=151936 lora_rank=64 {ALL}")
        for seq, seconds in zip((2048, 4096, 8192), measured, strict=True):
            mesh = MeshShape(fsdp=gpus)
            soft = workload.SOFTWARE["hugging-face"]
            run = workload.Run(config, chip("a100-80"), mesh, seq, 1, 8, soft, recompute="block")
            errors.append(step_time(run).step_s / seconds - 1)
    assert max(map(abs, errors)) < 0.22 and statistics.median(map(abs, errors)) < 0.1, errors
