import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest
from shared import TABLES

from llmpar.cli import doctor
from llmpar.cli.train import say_memory
from llmpar.predict import hardware
from llmpar.predict.hardware import CHIPS, GIB, Chip, chip

WORDS = ("name", "aliases", "link", "date", "device", "sources", "base", "reached")
SHARED = TABLES["devices_that_share"]
"""What `jax.devices()` counts; of every other chip it is the chip."""
FIGURES = [f.name for f in dataclasses.fields(Chip) if f.name not in WORDS]


@pytest.mark.parametrize("row", CHIPS, ids=lambda row: row.name)
def test_the_figures_of_a_row_have_sources_and_are_of_one_world(row, tmp_path):
    """Units that were mixed up (GB and GiB, bits and bytes, link and chip) would break one of these."""
    assert set(row.sources) == set(FIGURES) and re.fullmatch(r"20\d\d(-\d\d)?", row.date)
    assert all(len(source) > 2 for source in row.sources.values())
    said = f"{row.device_words}, {row.usable_hbm_gib:.4g} GiB"
    assert said == f"1 device = {SHARED.get(row.name, f'1 chip, {row.usable_hbm_gib:.4g} GiB')}"
    (tmp_path / "own.toml").write_text(f'base = "{row.name}"\ndevices_per_chip = 4\n')
    assert chip(tmp_path / "own.toml").device_words == "1 device = 1/4 chip", "not what the base's is"
    assert row.link in hardware.LINKS
    assert 0 < row.link_efficiency <= 1
    usable = row.usable_hbm_gib * GIB * row.devices_per_chip
    assert 0.9 < usable / row.hbm_bytes < 1.08  # 16 GB printed for 16 GiB is a ratio of 1.074
    if not row.simulated:
        least = 30 if row.name == "h20" else 100  # of an H100 with a seventh of its FLOP/s
        assert least < row.flops_per_s / row.hbm_bytes_per_s < 600, "FLOPs per byte of memory traffic"
        assert row.dcn_bytes_per_s < row.link_bytes_per_s < row.hbm_bytes_per_s
        assert 2000 < row.flops_per_s / row.dcn_bytes_per_s < 2e5
    assert row.num_axes == 1 if row.link == "switch" else row.num_axes in (2, 3)


def test_an_unknown_chip_is_refused_with_all_that_are_known():
    with pytest.raises(ValueError, match="chip 'h800' is not known") as refusal:
        chip("h800")
    assert all(word in str(refusal.value) for word in (*(row.name for row in CHIPS), ".toml"))


def test_a_file_with_a_base_changes_only_what_it_says(tmp_path):
    path = tmp_path / "four-per-node.toml"
    path.write_text(
        'base = "a100-40"\nnode_size = 4\ndcn_bytes_per_s = 3.125e9\n[sources]\nnode_size = "the site"\n'
    )
    row, base = chip(path), chip("a100-40")
    assert (row.name, row.node_size, row.dcn_bytes_per_s) == ("four-per-node", 4, 3.125e9)
    same = set(FIGURES) - {"node_size", "dcn_bytes_per_s"}
    assert {f: getattr(row, f) for f in same} == {f: getattr(base, f) for f in same}
    assert row.sources["node_size"] == "the site"
    assert "dcn_bytes_per_s" not in row.sources, "the base's source does not vouch for another figure"
    assert row.sources["flops_per_s"] == base.sources["flops_per_s"]
    assert row.aliases == () and chip("a100-40") == base
    assert chip(str(path)) == row


def test_a_file_may_describe_a_whole_chip_and_integers_will_do(tmp_path):
    values = dict(flops_per_s=10**15, hbm_bytes=10**11, usable_hbm_gib=90, hbm_bytes_per_s=3.0e12)
    values |= dict(link_bytes_per_s=5 * 10**11, link_efficiency=1, num_axes=1, node_size=8)
    values |= dict(dcn_bytes_per_s=5.0e10)
    path = tmp_path / "mine.toml"
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    path.write_text(f'link = "switch"\ndate = "2026"\n{text}')
    row = chip(path)
    assert {key: getattr(row, key) for key in values} == values
    assert isinstance(row.flops_per_s, float) and isinstance(row.node_size, int)
    path.write_text(f'date = "2026"\n{text}')
    with pytest.raises(ValueError, match=r"lacks link; add them, or base = 'h100'"):
        chip(path)


def test_a_gpus_usable_memory_is_the_share_that_jax_takes(monkeypatch, tmp_path):
    """Three quarters unless JAX is told another share. The platform's allocator and TPUs have no share."""
    for name in hardware.MEMORY_SHARES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    h100, v5p = chip("h100"), chip("v5p")
    assert h100.usable_bytes == int(0.75 * 84942979072) and v5p.usable_bytes == int(95.74 * GIB)
    assert all((row.memory_share == 0.75) == (row.link == "switch" and not row.simulated) for row in CHIPS)
    (tmp_path / "ours.toml").write_text('base = "h100"\nmemory_share = 0.9\n')
    assert chip(tmp_path / "ours.toml").usable_bytes == int(0.9 * 84942979072)
    (tmp_path / "ours.toml").write_text('base = "h100"\nmemory_share = 90\n')
    with pytest.raises(ValueError, match="memory_share is 90; use a number from 0.001 to 1"):
        chip(tmp_path / "ours.toml")
    for name in hardware.MEMORY_SHARES:
        monkeypatch.setenv(name, ".95")
        assert (h100.usable_bytes, v5p.usable_bytes) == (int(0.95 * 84942979072), int(95.74 * GIB))
        monkeypatch.setenv(name, "lots")
        with pytest.raises(ValueError, match=f"{name}=lots is no share of a GPU's memory; use one above"):
            _ = h100.usable_bytes
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert h100.usable_bytes == 84942979072


def devices(monkeypatch, platform, kind, num=8):
    """As many devices as JAX would find on hosts of four."""
    same = dict(platform=platform, device_kind=kind, slice_index=0, core_on_chip=0, memory_stats=lambda: None)
    place = lambda i: dict(id=i, process_index=i // 4, coords=(i % 2, i // 2, 0))
    found = [SimpleNamespace(**same, **place(i)) for i in range(num)]
    monkeypatch.setattr("llmpar.parallel.mesh.use_devices", lambda simulate, at_least: found)
    return found


@pytest.mark.parametrize("share", [None, ".9"])
def test_doctor_and_train_say_when_nobody_told_jax_how_much_of_a_gpu_to_take(monkeypatch, capsys, share):
    for name in hardware.MEMORY_SHARES:
        monkeypatch.delenv(name, raising=False)
    if share:
        monkeypatch.setenv(hardware.MEMORY_SHARES[1], share)
    (gpu,) = devices(monkeypatch, "gpu", "NVIDIA H100 80GB HBM3", 1)
    said = [line for line in doctor.examine()["lines"] if line.startswith("JAX takes 75% of a GPU's memory")]
    sentence = "JAX takes 75% of a GPU's memory, 59.3 of 79.1 GiB; alone on it, set "
    sentence += "XLA_CLIENT_MEM_FRACTION=.95"
    assert said == ([] if share else [sentence])
    say_memory(SimpleNamespace(devices=np.array([gpu])))
    assert capsys.readouterr().err == ("" if share else sentence + "\n"), "train says it, too"


@pytest.mark.parametrize("platform, kind, variables", TABLES["flags_of_devices"])
def test_doctor_names_flags_and_links_of_what_is_here(monkeypatch, platform, kind, variables):
    for name in (*hardware.MEMORY_SHARES, "XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.delenv(name, raising=False)
    devices(monkeypatch, platform, kind)
    found = doctor.examine()
    assert [(flag["variable"], flag["is_set"]) for flag in found["flags"]] == [(v, False) for v in variables]
    said = [line for line in found["lines"] if "set " in line]
    assert [any(f"set {v}=" in line for line in said) for v in variables] == [True] * len(variables)
    domains = 1 if platform == "tpu" else 2
    assert (found["domains"], found["hosts"]) == (domains, 2)
    assert list(found["links"]) == ["fsdp=-1", "fsdp=-1 tp=4"]
    assert found["links"]["fsdp=-1"]["fsdp"]["hosts"] == 2
    for flag in found["flags"]:
        monkeypatch.setenv(flag["variable"], ".9" if "FRACTION" in flag["variable"] else flag["value"])
    assert all(flag["is_set"] for flag in doctor.examine()["flags"])


def test_doctor_speaks_of_the_lessons_where_there_is_one_gpu(monkeypatch):
    devices(monkeypatch, "gpu", "NVIDIA L4", 1)
    found = doctor.examine()
    assert [line for line in found["lines"] if "JAX_PLATFORMS=cpu" in line] and found["links"] == {
        "fsdp=-1": {}
    }


KIN = {"b200": "gb200", "b300": "gb200", "gb300": "gb200", "rtx-pro-6000": "h100"}
EXPONENTIALS = {"gb200": 5e12, "b300": 10.7e12, "gb300": 10.7e12}
EXPONENTIALS |= {"l40s": 5.73e12, "rtx-4090": 5.16e12, "rtx-6000-ada": 5.69e12, "rtx-pro-6000": 7.87e12}
"""Of a GPU in a second: of cards 16 for each core and clock (NVIDIA, CUDA programming guide)."""
LARGEST = {"a100-80": 267.9e12, "h100": 792.1e12}
LARGEST |= {"l40s": 252.0e12, "rtx-4090": 178.5e12, "rtx-6000-ada": 278.5e12}
"""FLOP/s of the fastest matmul that a search found on each card (github.com/mag-/gpu_benchmark)."""


@pytest.mark.parametrize("name", KIN | EXPONENTIALS)
def test_rates_of_a_chip_that_no_fit_saw_follow_from_data_sheets(name):
    """Matmuls by the watts for each FLOP/s beside a chip of the same process; attention of heads of 128 by
    two exponentials of a score beside 1,792 FLOPs, at the share of these that GB200 reaches."""
    chip, kin, other = hardware.chip(name), hardware.chip("gb200"), hardware.chip(KIN.get(name, name))
    watts = lambda c: hardware.POWER_W[c.name] / c.flops_per_s
    law = other.rates.matmuls * (watts(chip) / watts(other)) ** hardware.CLOCK_BY_POWER
    assert name not in KIN or chip.rates.matmuls == pytest.approx(min(0.95, law), abs=0.006)
    if name in EXPONENTIALS:
        matmuls_s = 1792 / (kin.rates.attention * kin.flops_per_s) - 2 / EXPONENTIALS["gb200"]
        score_s = matmuls_s * kin.flops_per_s / chip.flops_per_s + 2 / EXPONENTIALS[name]
        assert chip.rates.attention == pytest.approx(1792 / score_s / chip.flops_per_s, abs=0.003)
        assert chip.rates.softmax == pytest.approx(2 / EXPONENTIALS[name] * chip.flops_per_s / 1792, rel=0.12)


@pytest.mark.parametrize("name", ["l40s", "rtx-4090", "rtx-6000-ada"])
def test_a_card_reaches_in_training_what_others_do_of_their_largest_matmul(name):
    """But where that is above its data sheet's peak: no power holds its clock back, so it reaches 0.95."""
    reached = lambda x: hardware.chip(x).rates.matmuls * hardware.chip(x).flops_per_s / LARGEST[x]
    free = LARGEST[name] > hardware.chip(name).flops_per_s
    others = 0.95 if free else (reached("a100-80") + reached("h100")) / 2
    assert reached(name) == pytest.approx(others, abs=0.008)
    assert hardware.chip(name).rates.eight_bit == (1.9 if free else hardware.Rates.eight_bit)
