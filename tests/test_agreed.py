"""Processes that do not agree do not train: what differs is in the sentence, by name, with both values."""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from llmpar.cli.generate import Generate
from llmpar.cli.train import Train
from llmpar.launch import agreed, joined
from llmpar.launch.agreed import FOLDERS, OWN, differences, flat, surroundings
from llmpar.plan.model_config import ExpertConfig, LoraConfig, OptimizerConfig, RopeScaling
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS
from llmpar.training.checkpoint import kept_in
from llmpar.training.data import Batches, Corpus, DataConfig
from llmpar.training.loop import APART, Callbacks, Evaluation, settings_of, train
from llmpar.training.tokenizers import ByteTokenizer

MODEL = dataclasses.replace(
    PRESETS["tiny"], experts=ExpertConfig(4, 2), lora=LoraConfig(), rope_scaling=RopeScaling()
)
WHAT = {"train": Train(), "generate": Generate(), "plan": Plan("dp=2"), "model": MODEL}
WHAT |= {"optimizer": OptimizerConfig(), "data": DataConfig()}


def changed(value):
    """The value, once for each of its fields, with another one in that field alone."""
    for field in dataclasses.fields(value):
        before = getattr(value, field.name)
        parts = changed(before) if dataclasses.is_dataclass(before) else [(field.name, other(before))]
        for name, part in parts:
            copy = object.__new__(type(value))
            copy.__dict__.update(vars(value) | {field.name: part})
            yield name, copy


def other(value):
    if isinstance(value, str | bool):
        return value + "x" if isinstance(value, str) else not value
    return value + 1 if isinstance(value, int | float) else ("x",) if value is None else None


@pytest.mark.parametrize("what", WHAT.values(), ids=WHAT)
def test_every_field_is_compared_but_for_those_with_a_reason(what):
    same = flat(what)
    seen = 0
    for name, copy in changed(what):
        rows = differences([same, flat(copy), same])
        if name in OWN:
            assert not rows and OWN[name], name
            continue
        seen += 1
        (row,) = rows
        assert row.startswith(f"{name.strip('_')} is ") or f".{name} is " in f".{row}", (name, row)
        assert " on processes 0, 2 and " in row and row.endswith(" on process 1")
    assert seen and differences([same, same]) == [] and all(OWN.values())
    folders = flat(Train(checkpoints="a", from_="b"))
    assert {name: folders[name.strip("_")] for name in FOLDERS} == {"checkpoints": True, "from_": True}


def stream(text="abc" * 40, part="train", **config):
    tokens = np.concatenate([[256], np.frombuffer(text.encode(), np.uint8)]).astype(np.uint16)
    corpus = Corpus(tokens, np.array([0, len(tokens)]), ByteTokenizer(), "a text")
    return Batches(corpus, DataConfig(seq_len=4, batch_size=2, held_out=2, **config), part)


def arguments(folder: Path, **more):
    """What `train` is given."""
    given = {name: p.default for name, p in inspect.signature(train).parameters.items()}
    given |= {"config": MODEL, "plan": Plan("dp=2"), "mesh": None, "stream": stream(), "steps": 3}
    return given | {"checkpoints": SimpleNamespace(folder=folder, every=2)} | more


def test_whatever_train_is_given_is_compared(tmp_path, monkeypatch):
    """A new argument is, unless `APART` has it, by the plain barrier and before anything else happens."""
    sent = {}
    client = SimpleNamespace(key_value_set=sent.__setitem__, wait_at_barrier=lambda *_: 1 / 0)
    state = SimpleNamespace(client=client, num_processes=2, process_id=1)
    monkeypatch.setattr(joined, "_state", lambda: state)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def text_of(**more):
        with pytest.raises(ZeroDivisionError):
            train(**arguments(tmp_path, callbacks=Callbacks(barrier=joined.barrier), **more))
        return sent.popitem()[1]

    base = text_of()
    assert base == text_of() and " at 0x" not in base, "what is in an object, not the object"
    objects = "plan stream evaluation checkpoints origin callbacks".split()
    for name in arguments(tmp_path).keys() - {*objects}:
        assert (base == text_of(**{name: "another"})) == (name in APART), name
    for values in ({"text": "abd" * 40}, {"seed": 1}, {"limit_bytes": 9}):
        assert base != text_of(stream=stream(**values)), values
    for values in ({"held_out": stream(part="held_out")}, {"eval_every": 3}, {"eval_batches": 2}):
        assert base != text_of(evaluation=Evaluation(**values)), values
    assert base != text_of(checkpoints=None) and base != text_of(plan=Plan("dp=2", zero=1))


def test_checkpoints_are_compared_as_each_process_sees_them(tmp_path):
    sees = []
    for steps in ([], ["2"], ["2", "10"], ["2", "10.orbax-checkpoint-tmp-3"]):
        folder = tmp_path / "-".join(steps)
        for step in steps:
            (folder / step / "about").mkdir(parents=True)
            (folder / step / "about" / "metadata").write_text("{}")
        sees.append(kept_in(folder))
    assert [list(one) for one in sees] == [[], ["2"], ["10", "2"], ["2"]] and sees[1] == sees[3]
    (tmp_path / "2" / "2" / "about" / "metadata").write_text("{...}")
    assert differences([{"2": sees[1]}, {"2": kept_in(tmp_path / "2")}])
    one, other = (flat(settings_of(arguments(tmp_path / name))) for name in ("2", "none"))
    (row, _) = differences([one, other])
    assert row == "checkpoints.exists is true on process 0 and false on process 1"


def test_versions_code_and_compilers_flags_are_compared(tmp_path, monkeypatch):
    flags = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=2 --xla_b"}
    base = flat(surroundings(flags))
    assert {"llmpar", "Python", *agreed.PACKAGES, "jax_default_matmul_precision"} <= base.keys()
    alike = {"XLA_FLAGS": "--xla_b --xla_force_host_platform_device_count=4 --xla_a=1"}
    assert differences([base, flat(surroundings(alike))]) == []
    assert differences([base, flat(surroundings({"XLA_FLAGS": "--xla_a=2 --xla_b"}))]) == [
        'XLA_FLAGS.--xla_a is "1" on process 0 and "2" on process 1'
    ]
    before = jax.config.jax_default_prng_impl
    try:
        jax.config.update("jax_default_prng_impl", "rbg")
        assert differences([base, flat(surroundings(flags))]) == [
            f'jax_default_prng_impl is "{before}" on process 0 and "rbg" on process 1'
        ]
    finally:
        jax.config.update("jax_default_prng_impl", before)
    monkeypatch.setattr(agreed.platform, "python_version", lambda: "3.14.1")
    monkeypatch.setattr(agreed.importlib.metadata, "version", lambda name: f"{name}'s")
    names = [row.split(" is ")[0] for row in differences([base, flat(surroundings(flags))])]
    assert names == ["Python", *agreed.PACKAGES]
    (tmp_path / "other.py").write_text("x = 1")
    monkeypatch.setattr(agreed, "__file__", str(tmp_path / "launch" / "agreed.py"))
    names = [row.split(" is ")[0] for row in differences([base, flat(surroundings(flags))])]
    assert names == ["llmpar", "Python", *agreed.PACKAGES], "other code of the same version"
