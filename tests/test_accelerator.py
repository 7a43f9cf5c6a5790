"""What must hold on whatever devices JAX finds: by default 8 simulated ones, on accelerators
`LLMPAR_TEST_PLATFORM` names them.

LLMPAR_TEST_PLATFORM=cuda python -m pytest -m accelerator        (or tpu, or rocm)
"""

from pathlib import Path
from types import SimpleNamespace

import conftest
import jax
import pytest
from parity import LLAMA, assert_same, solo

from llmpar.cli import demo, inspect, train
from llmpar.plan import Plan

TOLERANCES = {"highest": 1e-5, "default": 2**-9 * 16} if jax.default_backend() != "cpu" else {None: 1e-5}
"""Of the loss, and of a gradient by its largest element. float32: sums in another order
(`parity.assert_same`). By default a GPU rounds what it multiplies to TF32 (2^-11) and a TPU to bfloat16
(2^-9); 16 such errors are room for two layers. The first is measured on CPUs, which know no other; the second
is what the format allows, not yet what an accelerator was seen to do."""


@pytest.mark.accelerator
@pytest.mark.parametrize("precision", TOLERANCES)
def test_loss_and_gradients_on_all_devices_are_those_of_one_in_float32(precision):
    with jax.default_matmul_precision(precision and "highest"):
        solo(LLAMA)  # remembered
    with jax.default_matmul_precision(precision):
        assert_same(LLAMA, Plan(f"fsdp={min(8, len(jax.devices()))}"), TOLERANCES[precision])


@pytest.mark.accelerator
def test_the_demonstration_compares_in_float32(monkeypatch, tmp_path):
    """Elsewhere than on CPUs a product is by default less than float32, and fifty steps would part by more
    than 1e-3."""
    seen = []

    def run(command):
        seen.append(jax.config.jax_default_matmul_precision)
        return {"losses": [5.0, 1.0], "collectives": []}

    for command in (train.Train, inspect.Inspect):
        monkeypatch.setattr(command, "run", run)
    before = jax.config.jax_default_matmul_precision
    demo.demonstrate(str(tmp_path), 2)
    assert seen == ["highest"] * 3 and jax.config.jax_default_matmul_precision == before


def test_on_an_accelerator_only_marked_tests_run(monkeypatch):
    """The others count on 8 simulated devices."""
    marked, other = (
        SimpleNamespace(get_closest_marker=lambda name, yes=yes: yes, path=Path("test_x.py"), skipped=[])
        for yes in (True, False)
    )
    for item in (marked, other):
        item.add_marker = lambda mark, item=item: item.skipped.append(mark.name == "skip")
    conftest.pytest_collection_modifyitems([marked, other])
    assert not any(marked.skipped + other.skipped)
    monkeypatch.setattr(conftest, "PLATFORM", "cuda")
    conftest.pytest_collection_modifyitems([marked, other])
    assert not any(marked.skipped) and other.skipped.count(True) == 1
