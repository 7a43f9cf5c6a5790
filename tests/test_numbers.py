"""Published numbers by formulas: a row's inputs go in, never its answer; and identities."""

import functools
import inspect
import math
import re
from dataclasses import replace

import pytest
from shared import CASES
from shared import NUMBERS as ROWS

from llmpar.plan.presets import preset
from llmpar.predict import formulas, serving
from llmpar.predict.hardware import GIB, chip

TESTED_ELSEWHERE = {case for cases in CASES["numbers_elsewhere"].values() for case in cases.split()}
V5E = chip("v5e")

PRINTED = {  # symbolic answers, read once by a person
    "2*Psi": lambda Psi: 2 * Psi,
    "3*Psi": lambda Psi: 3 * Psi,
    "R(g-1)/g": lambda R, g: R * (g - 1) / g,
    "R(g-1)": lambda R, g: R * (g - 1),
    "2R(g-1)/g": lambda R, g: 2 * R * (g - 1) / g,
    "R": lambda R, g: R,
}


def symbolic(expected, formula, points):
    """The texts themselves, if at every point the formula of each key equals what the text says."""
    for key, text in expected.items():
        for point in points:
            assert formula(key, *point) == pytest.approx(PRINTED[text](*point), rel=1e-12), (key, text, point)
    return expected


def zero_table(params, dp, param_bytes, grad_bytes, optim_bytes):
    each = (param_bytes, grad_bytes, optim_bytes)
    return {f"stage{z}": formulas.zero_bytes(params, dp, z, *each) / 1e9 for z in (1, 2, 3)}


def zero_comm(params, expected):
    stage = {"dp": 0, "stage1": 1, "stage2": 2, "stage3": 3}
    points = [(1,), (7.5e9,), (123456789,)]
    return symbolic(expected, lambda key, psi: formulas.zero_elements(psi, stage[key]), points)


def zero_largest(mp, gpus, hbm_bytes):
    stage = {"baseline": 0, "stage1": 1, "stage2": 2, "stage3": 3}
    return {k: mp * hbm_bytes / formulas.zero_bytes(1, gpus // mp, z) for k, z in stage.items()}


def korth_layer(heads, h, tp, micro, seq, **_):
    layer = (micro, seq, h, heads)
    selective = functools.partial(formulas.gpt_activation_bytes, *layer, tp=tp, recompute="selective")
    return {
        "none": formulas.gpt_activation_bytes(*layer),
        "tp": formulas.gpt_activation_bytes(*layer, tp=tp),
        "tp_sp": formulas.gpt_activation_bytes(*layer, tp=tp, sequence_parallel=True),
        "tp_sel": selective(),
        "tp_sp_sel": selective(sequence_parallel=True),
        "full": formulas.gpt_activation_bytes(*layer, tp=tp, recompute="full"),
        "five_as_over_h": formulas.gpt_activation_bytes(1, seq, h, heads) / (seq * h) - 34,
    }


def korth_percent(**inputs):
    layer = korth_layer(**inputs)
    names = {"sp": "tp_sp", "sel": "tp_sel", "both": "tp_sp_sel", "full": "full"}
    return {key: 100 * layer[name] / layer["tp"] for key, name in names.items()}


def playbook_states(params):
    gb = [formulas.zero_bytes(params, 1, 0, grad_bytes=grad) / 1e9 for grad in (2, 6)]
    return {"gb": gb[0], "gb_fp32grad": gb[1]}


def argument_gib(params, n=None, devices=None, bytes_per_param=12):
    return {"gib": formulas.zero_bytes(params, n or devices, 3, bytes_per_param, 0, 0) / GIB}


def ptdp_days(tokens, params, gpus, flops):
    return {"days": formulas.train_seconds(params, tokens, gpus, flops, flops_per_param_token=8) / 86400}


def book_days_70b(chips, mfu, params=70e9, tokens=15e12):
    return {"days": formulas.train_seconds(params, tokens, chips, mfu * chip("v5p").flops_per_s) / 86400}


def ring_collectives(expected):
    def formula(key, result, group):
        kind = "permute" if key == "collective_permute" else key.replace("_", "-")
        return formulas.sent_bytes_of_result(kind, result, group)

    return symbolic(expected, formula, [(4096, 2), (999, 8), (1e9, 512)])


def book_gather_quiz(bytes, W, size=4):
    us = [1e6 * formulas.torus_seconds("all-gather", bytes, (size,), W / 2, wrap) for wrap in (True, False)]
    return {"us": us[0], "nowrap_us": us[1]}


def book_gather_v4p(W, shape=(1024, 4096), mesh=(4, 4, 4)):
    local = 2 * math.prod(shape) / mesh[1]  # Y cuts the other dim and stays
    return {"us": 1e6 * formulas.torus_seconds("all-gather", local, mesh[:1], W / 2)}


def book_all_to_all(array=1e9, group=16):
    local = formulas.torus_seconds("all-to-all", array / group, (group,), 45e9)
    return {"ratio": local / formulas.torus_seconds("all-gather", array, (group,), 45e9)}


def book_gpu_gather(bytes, N, W):
    return {"us": 1e6 * formulas.switch_seconds("all-gather", bytes, N, W), "approx_us": 1e6 * bytes / W}


def book_two_nodes():
    h100 = chip("h100")
    levels = [(h100.node_size, h100.link_bytes_per_s), (2, h100.node_size * h100.dcn_bytes_per_s)]
    rate = dict(zip(("node", "leaf"), formulas.level_bytes_per_s(levels), strict=True))
    return {"bound": min(rate, key=rate.get), "gbps": min(rate.values()) / 1e9}


def ring_table_2(tflops, gbps):
    block = formulas.ring_min_block(tflops * 1e12, gbps * 1e9)
    return {"c_k": block / 1e3, "s_k": 6 * block / 1e3}


def book_critical_int8(C=V5E.flops_per_s, W=820e9):
    return {"B": formulas.critical_batch(C, W, weight_bytes=1)}


def book_gpu_dp(C):
    h100 = chip("h100")
    rates = {"node": h100.link_bytes_per_s, "cross": h100.node_size * h100.dcn_bytes_per_s}
    return {name: formulas.dp_min_tokens(C, rate) for name, rate in rates.items()}


def book_kv_70b(layers=80, kv_heads=8, head_dim=128):
    sizes = dict(num_layers=layers, num_kv_heads=kv_heads, head_width=head_dim)
    return {"bytes": serving.cache_bytes(replace(preset("llama3-70b"), **sizes), bits=8)}


tp_elements = lambda b, s, h, t: {"elements": formulas.tp_elements(b, s, h, t)}
book_copies = lambda mesh=(4, 8, 2): {"ratio": formulas.copies(dict(zip("XYZ", mesh, strict=True)), "X")}
capacity = lambda tokens, experts, cf, topk: {"capacity": formulas.expert_capacity(tokens, experts, cf, topk)}
moe_batch = lambda E, k, C, W: {"tokens": formulas.dp_min_tokens(C, W, experts=E, topk=k)}
book_critical = lambda C=V5E.flops_per_s, W=820e9: {"B": formulas.critical_batch(C, W)}
book_dp = lambda C, W: {"one": formulas.dp_min_tokens(C, W), "three": formulas.dp_min_tokens(C, 3 * W)}
book_tp = lambda F, C=459e12, W=180e9: {"Y": math.floor(formulas.tp_max_degree(F, C, W))}
book_dcn = lambda Cpod, W: {"tokens": formulas.dp_min_tokens(Cpod, W)}
usable = lambda chip_name: {"gib": chip(chip_name.split()[0]).usable_hbm_gib}


def chip_row(chip_name, expected):
    row = chip(chip_name)
    said = [  # pattern, and what the row makes of each number in it
        (r"ICI (\d+) GB/s bidir", [2 * row.num_axes * 2 * row.link_bytes_per_s / 1e9]),
        (r"(\d+) ports", [2 * row.num_axes]),
        (r"DCN (\d+) Gb/s", [row.dcn_bytes_per_s * 8 / 1e9]),
        (r"(\d+) devices per chip", [row.devices_per_chip]),
        (r"NVLink (\d+) GB/s per direction", [row.link_bytes_per_s / 1e9]),
        (r"(\d+) Gb/s NIC/GPU", [row.dcn_bytes_per_s * 8 / 1e9]),
        (r"node egress (\d+) GB/s", [row.node_size * row.dcn_bytes_per_s / 1e9]),
        (r"(\d+)-GPU domain", [row.node_size]),
        (r"(\d+)x(\d+) Gb/s per node", [row.node_size, row.dcn_bytes_per_s * 8 / 1e9]),
        (r"per direction = (\d+)", [row.link_bytes_per_s / 1e9]),
    ]
    text = expected["interconnect"]
    found = [(m, ours) for pattern, ours in said if (m := re.search(pattern, text))]
    assert found, text
    for m, ours in found:
        assert ours == pytest.approx([float(x) for x in m.groups()]), m[0]
    rates = {"bf16": row.flops_per_s, "hbm": row.hbm_bytes, "hbm_bw": row.hbm_bytes_per_s}
    return rates | {"interconnect": text}


FAMILIES = {pattern: globals()[name] for pattern, name in CASES["families_of_numbers"].items()}


def families_of(case):
    return [family for pattern, family in FAMILIES.items() if re.fullmatch(pattern, case)]


def compute(row):
    (family,) = families_of(row["id"])
    inputs = {"chip_name" if key == "chip" else key: value for key, value in row["inputs"].items()}
    if "expected" in inspect.signature(family).parameters:
        inputs["expected"] = row["expected"]
    return family(**inputs)


def disagreements(row, computed):
    """One sentence for every expected figure that is not met within the row's own tolerance."""
    wrong = []
    for key, expected in row["expected"].items():
        tolerance = row["tolerance"]
        if isinstance(tolerance.get(key), dict):
            tolerance = tolerance[key]
        got = computed[key]
        if isinstance(expected, (str, bool)) or "note" in tolerance:
            close = got == expected
        elif "abs" in tolerance:
            close = abs(got - expected) <= tolerance["abs"]
        else:  # exact, up to the last digits of a float
            close = abs(got - expected) <= tolerance.get("rel", 1e-12) * abs(expected)
        if not close:
            wrong.append(f"{row['id']} {key}: expected {expected}, computed {got}, tolerance {tolerance}")
    return wrong


MINE = [case for case in ROWS if case not in TESTED_ELSEWHERE]


@pytest.mark.parametrize("case", MINE)
def test_formula_gives_the_published_number(case):
    assert not disagreements(ROWS[case], compute(ROWS[case]))


def test_every_case_is_tested_by_exactly_one():
    assert set(ROWS) >= TESTED_ELSEWHERE, "named but not in the file"
    for case in ROWS:
        assert len(families_of(case)) == (case not in TESTED_ELSEWHERE), case
    for pattern in FAMILIES:
        assert any(re.fullmatch(pattern, case) for case in ROWS), f"{pattern} has no case"


def test_a_kind_that_is_none_is_refused():
    for f, group in ((formulas.sent_bytes, 2), (formulas.tree_level_seconds, [(2, 1)])):
        with pytest.raises(AssertionError, match="allgather"):
            f("allgather", 1, group)
