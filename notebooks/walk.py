"""Walk the core path of the lessons as a newcomer does, in a real browser, and write down what it took.

    python notebooks/walk.py [NN…]      all lessons, or those named; writes notebooks/_walk/

It starts `llmpar lab` on fresh copies, opens each lesson by its address in headless Chromium, and runs the
core path cell by cell with the keyboard. At an exercise it runs the blank, asks for a hint, types a wrong
answer, then the right one, and reads each verdict from the page; in the end it types the answers of `MORE`.
For each lesson it takes pictures 1200 px wide. `walk.json` has the seconds of each cell and the verdicts;
`walk.md` beside this file tells what was found. Needs Chromium and playwright (extra `dev`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmpar.launch.joined import free_port

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "notebooks" / "_walk"
PATIENCE_MS = 240_000  # for one cell, on a busy machine

SCHEDULE = "F0 F1 F2 B0 F3 B1 B2 B3\nF0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3"
GAME = """F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3
F0 F1 F2 B0 F3 B1 W0 B2 W1 B3 W2 W3
F0 F1 B0 F2 B1 F3 B2 W0 B3 W1 W2 W3
F0 B0 F1 B1 F2 B2 F3 B3 W0 W1 W2 W3"""
ANSWERS = {
    "00.row": [("[..., ...]", "[6, 7]", "[4, 5]")],
    "00.held": [("bytes_held = ...", "bytes_held = 256", "bytes_held = 512")],
    "00.layout_of": [("layout_seen = ...", 'layout_seen = "b/dp d/tp"', 'layout_seen = "b/tp d/dp"')],
    "00.fits": [('{"dp=16": ..., "dp=2 fsdp=4 tp=2": ...}', '{"dp=16": 7.48, "dp=2 fsdp=4 tp=2": 7.48}',
                 '{"dp=16": 119.7, "dp=2 fsdp=4 tp=2": 14.96}')],
    "00b.collectives": [("= ...", "= 0", "= 1")],
    "00b.ratio": [("= ...", "= 1", "= 8")],
    "00b.fsdp": [('"all-gather": ..., "reduce-scatter": ..., "all-reduce": ...',
                  '"all-gather": 1, "reduce-scatter": 0, "all-reduce": 1',
                  '"all-gather": 1, "reduce-scatter": 1, "all-reduce": 0')],
    "01.state_gb": [("gigabytes = ...", "gigabytes = 2 * 8.03", "gigabytes = 16 * 8.03")],
    "01.policies": [
        ('{"none": ..., "selective": ..., "block": ...}',
         '{"none": "fits", "selective": "fits", "block": "fits"}',
         '{"none": "too large", "selective": "fits", "block": "fits"}'),
    ],
    "01.again": [("= ...", "= 2", "= 8 / 6")],
    "01.fits": [("..., ...", "3, 40 - 128.5 / 8", "4, 40 - 128.5 / 8")],
    "01.days": [("= ...", "= 2 * 8e9 * 15e12 / (1024 * 989.4e12 * 0.4) / 86400",
                 "= 6 * 8e9 * 15e12 / (1024 * 989.4e12 * 0.4) / 86400")],
    "01.crossover": [("length = ...", "length = 8.03e9 / (2 * 32 * 4096)",
                      "length = 6 * (8.03e9 - 128256 * 4096) / (12 * 32 * 32 * 128)")],
    "02.scattered": [("= ...", "= 2 * 2**20 * (N - 1) / N", "= 2**20 * (N - 1) / N")],
    "02.sent": [("..., ..., ..., ...", "6, 6, 6, 6", "6, 6, 12, 6")],
    "02.small": [("= ...", "= 3300", "= 33")],
    "03.exchanged": [("= ...", '= "weights"', '= "gradients"')],
    "03.three_sums": [
        ('{"mean_then_sum": ..., "mean_then_mean": ..., "clip_then_sum": ...}',
         '{"mean_then_sum": "right", "mean_then_mean": "wrong", "clip_then_sum": "wrong"}',
         '{"mean_then_sum": "wrong", "mean_then_mean": "wrong", "clip_then_sum": "wrong"}'),
    ],
    "03.sent": [("= ...", "= 2 * 4 * LLAMA.num_params", "= 2 * 4 * LLAMA.num_params * (N - 1) / N")],
    "03.hide": [("= ...", "= 512", "= 2000")],
    "03.repair": [
        ("def gradient(grad_sum, count): ...",
         "def gradient(grad_sum, count):\n    return lax.pmean(grad_sum / count, \"dp\")",
         "def gradient(grad_sum, count):\n    return lax.psum(grad_sum, \"dp\") / lax.psum(count, \"dp\")"),
        ("def clipped(grad_sum, count): ...",
         "def clipped(grad_sum, count):\n    g = gradient(grad_sum, count)\n"
         "    return g / jnp.sqrt((g * g).sum())",
         "def clipped(grad_sum, count):\n    g = gradient(grad_sum, count)\n"
         "    return g * jnp.minimum(1.0, 1.0 / jnp.sqrt((g * g).sum()))"),
    ],
    "04.sent": [("{0: 2, 1: ..., 2: ..., 3: ...}", "{0: 2, 1: 3, 2: 3, 3: 3}", "{0: 2, 1: 2, 2: 2, 3: 3}")],
    "04.scatters": [("= ...", "= 0", "= 4")],
    "04.accumulated": [
        ("{0: ..., 1: ..., 2: ..., 3: ...}", '{0: "same", 1: "same", 2: "same", 3: "more"}',
         '{0: "same", 1: "same", 2: "more", 3: "more"}'),
    ],
    "04.memory_table": [("{0: ..., 1: ..., 2: ..., 3: ...}", "{0: 112, 1: 38.5, 2: 49, 3: 28}",
                         "{0: 112, 1: 49, 2: 38.5, 3: 28}")],
    "04.stage2_accumulated": [
        ("def stage2_accumulated(gradient, parts): ...",
         "def stage2_accumulated(gradient, parts):\n    return stage1_accumulated(gradient, parts)",
         "def stage2_accumulated(gradient, parts):\n    return sum(\n        lax.psum_scatter(\n"
         "            gradient(part), \"fsdp\", scatter_dimension=0, tiled=True\n        )\n"
         "        for part in parts\n    )"),
    ],
    "05.cut": [
        ('{"W1": ..., "W2": ...}', '{"W1": "rows", "W2": "columns"}', '{"W1": "columns", "W2": "rows"}'),
    ],
    "05.worst": [("= ...", "= 4", "= 4.5")],
    "05.sequence_bytes": [("= ...", '= "fewer"', '= "as many"')],
    "05.beyond_node": [("= ...", "= 1", "= 2")],
    "05.stack_all_reduces": [("= ...", "= 8", "= 7")],
    "05.attention_layouts": [
        ('{"q": ..., "k": ..., "v": ..., "o": ...}',
         '{"q": "d n/tp h", "k": "d k/tp h", "v": "d k/tp h", "o": "n h d/tp"}',
         '{"q": "d n/tp h", "k": "d k/tp h", "v": "d k/tp h", "o": "n/tp h d"}'),
    ],
    "05.gated_pair": [
        ("def gated_pair(x, gate, up, down): ...",
         "def gated_pair(x, gate, up, down):\n    return (jax.nn.silu(x @ gate) * (x @ up)) @ down",
         "def gated_pair(x, gate, up, down):\n"
         '    return lax.psum((jax.nn.silu(x @ gate) * (x @ up)) @ down, "tp")'),
    ],
    "06.ring_bytes": [("= ...", "= 2 * OWN * 2 * 16 * 4 * N", "= 2 * OWN * 2 * 16 * 4 * (N - 1)")],
    "06.ring_waits": [('{"rank": ..., "times": ...}', '{"rank": 3, "times": 1.75}',
                       '{"rank": 0, "times": 1.75}')],
    "06.deal": [("{0: ..., 1: ..., 2: ..., 3: ...}", "{0: 4, 1: 5, 2: 6, 3: 7}", "{0: 7, 1: 6, 2: 5, 3: 4}")],
    "06.factors": [
        ("def factors(top_a, top_b): ...", "def factors(top_a, top_b):\n    return 1.0, 1.0",
         "def factors(top_a, top_b):\n    top = max(top_a, top_b)\n"
         "    return np.exp(top_a - top), np.exp(top_b - top)"),
    ],
    "06.to_heads": [
        ("def to_heads(x): ...", "def to_heads(x):\n    return x",
         'def to_heads(x):\n    return lax.all_to_all(x, "sp", split_axis=1, concat_axis=0, tiled=True)'),
    ],
    "07.idle_share": [("= ...", "= 27.3", "= 0.27")],
    "07.microbatches": [("= ...", "= 64", "= 63")],
    "07.masked": [("= ...", "= 1", "= 11 / 8")],
    "07.row": [("= ...", '= "F0 F1 F2 · · B0 B1 B2"', '= "· F0 F1 F2 B0 B1 B2 ·"')],
    "08.bets": [
        ('{"first": ..., "holds least": ...}', '{"first": "ZB-H1", "holds least": "1F1B"}',
         '{"first": "ZB-V", "holds least": "1F1B"}'),
    ],
    "08.held": [("= ...", "= 16", "= 13")],
    "08.one_f_one_b": [("= ...", '= """' + SCHEDULE.replace("B3", "") + '"""', '= """' + SCHEDULE + '"""')],
    "08.game": [("= ...", '= """' + SCHEDULE + '"""', '= """' + GAME + '"""')],
    "09.dispatch_bytes": [("= ...", "= 4096", "= 3584")],
    "09.buffer": [("times = ...", "times = 8", "times = 4")],
    "09.dropped": [('{"dropped": ..., "empty": ...}', '{"dropped": 0, "empty": 128}',
                    '{"dropped": 60, "empty": 188}')],
    "09.capacity": [("= ...", "= 253", "= 250")],
    "10.share": [("= ...", "= 1 / 16", "= 1 / 8")],
    "10.dp_bytes": [("= ...", "= 421", "= 421 / 2")],
    "10.pipeline": [("= ...", '= "less"', '= "more"')],
    "10.off": [("relative = ...", "relative = 1e-3", "relative = 1e-6")],
    "10.links": [('{"pp": ..., "dp": ..., "tp": ...}', '{"pp": "network", "dp": "NVLink", "tp": "NVLink"}',
                  '{"pp": "network", "dp": "network", "tp": "NVLink"}')],
    "11.replicas": [("..., ...", "12.3, 12.3", "788.5, 12.32")],
    "11.bet": [("bet = ...", 'bet = "pp=8 tp=8"', 'bet = "fsdp=16 tp=4"')],
    "11.thresholds": [("..., ..., ...", "12_480, 1_040, 27.6", "1_040, 12_480, 27.6")],
    "11.terms": [("..., ...", "11.1, 2.6", "14.8, 1.3")],
    "11.buy": [("= ...", "= 3.2", "= 2.3")],
    "11.rack": [('{"tokens": ..., "overlap": ...}', '{"tokens": 12_480, "overlap": "no"}',
                 '{"tokens": 2_664, "overlap": "yes"}')],
    "12.unfinished": [("= ...", '= "b/dp s d"', '= "b/dp s d +tp"')],
    "12.fates": [
        ('{"Manual": ..., "Manual, check off": ..., "Auto": ..., "Explicit": ...}',
         '{"Manual": "refused", "Manual, check off": "refused", "Auto": "right", "Explicit": "refused"}',
         '{"Manual": "refused", "Manual, check off": "wrong", "Auto": "right", "Explicit": "refused"}'),
    ],
    "12.wrong_cut": [
        ('{"Manual": ..., "Manual, check off": ..., "Auto": ..., "Explicit": ...}',
         '{"Manual": "wrong", "Manual, check off": "refused", "Auto": "right", "Explicit": "refused"}',
         '{"Manual": "refused", "Manual, check off": "refused", "Auto": "right", "Explicit": "refused"}'),
    ],
    "13.sent": [("= ...", "= 4 * 98304", "= 4 * 98304 * (N - 1) / N")],
    "13.lookup": [("= ...", '= "b/X s d"', '= "b s d/X"')],
    "13.cure": [
        ("def by_rows(x): ...",
         'def by_rows(x):\n    return jax.lax.with_sharding_constraint(x, P(None, None, "X"))',
         'def by_rows(x):\n    return jax.lax.with_sharding_constraint(x, P("X"))'),
    ],
    "13.missing": [("= ...", '= "all-gather"', '= "all-reduce"')],
    "16.flops_per_byte": [
        ('{"prompt of 64": ..., "1 request": ..., "16 requests": ...}',
         '{"prompt of 64": 64, "1 request": 1, "16 requests": 1}',
         '{"prompt of 64": 64, "1 request": 1, "16 requests": 16}'),
    ],
    "16.cache_bytes": [("= ...", "= 2 * 32 * 32 * 128 * 2", "= 2 * 32 * 8 * 128 * 2")],
    "16.shares": [('{"tp=4": ..., "sp=4": ...}', '{"tp=4": 1 / 4, "sp=4": 1 / 4}',
                   '{"tp=4": 1 / 2, "sp=4": 1 / 4}')],
    "16.passes": [("= ...", "= 10", "= 12")],
    "16.join": [
        ("def join(slots, waiting): ...",
         "def join(slots, waiting):\n    return slots if any(slots) else [waiting.pop(0) for _ in slots]",
         "def join(slots, waiting):\n"
         "    return [left or (waiting.pop(0) if waiting else 0) for left in slots]"),
    ],
    "17.rows": [
        ("def my_rows(batch, process, num): ...", "def my_rows(batch, process, num):\n    return batch",
         "def my_rows(batch, process, num):\n    each = len(batch) // num\n"
         "    return batch[process * each : (process + 1) * each]"),
    ],
    "17.leaves": [("..., ...", "1_482_057, 11_821_092", "2_964_114, 11_821_092")],
    "17.slowest": [("= ...", "= 6", "= 4")],
    "17.equal": [("= ...", "= 144", "= 4 * 144")],
    "17.goes_on": [("= ...", "= 7", "= 4")],
    "14.cache": [('{"128 heads": ..., "8 KV heads": ..., "latent": ...}',
                  '{"128 heads": 16384, "8 KV heads": 1024, "latent": 576}',
                  '{"128 heads": 32768, "8 KV heads": 2048, "latent": 576}')],
    "14.hops": [('{"full": ..., "window": ...}', '{"full": 8, "window": 8}', '{"full": 7, "window": 1}')],
    "14.state": [('{"state": ..., "keys and values": ...}', '{"state": 1024, "keys and values": 16384}',
                  '{"state": 7 * 1024, "keys and values": 7 * 16384}')],
    "14.exchanges": [('{"in all": ..., "shared": ...}', '{"in all": 12, "shared": 0}',
                      '{"in all": 8, "shared": 0}')],
    "14.fits": [('{"gpt-oss-120b": ..., "qwen3.5-397b": ..., "deepseek-v3": ...}',
                 '{"gpt-oss-120b": 20.4, "qwen3.5-397b": 69.2, "deepseek-v3": 117.2}',
                 '{"gpt-oss-120b": 27.2, "qwen3.5-397b": 92.3, "deepseek-v3": 156.2}')],
    "15.thresholds": [('{"H100": ..., "MI355X": ..., "GB200": ..., "TPU v5p": ...}',
                       '{"H100": 4397, "MI355X": 9362, "GB200": 5329, "TPU v5p": 1530}',
                       '{"H100": 2199, "MI355X": 4681, "GB200": 2664, "TPU v5p": 765}')],
    "15.tp": [('{"70B, H100": ..., "405B, H100": ..., "70B, GB200": ..., "405B, GB200": ...}',
               '{"70B, H100": 8, "405B, H100": 8, "70B, GB200": 64, "405B, GB200": 64}',
               '{"70B, H100": 8, "405B, H100": 8, "70B, GB200": 8, "405B, GB200": 16}')],
    "15.tp16": [("= ...", '= "faster"', '= "equal"')],
    "15.experts": [('{"rack": ..., "network": ..., "hides": ...}',
                    '{"rack": 2664, "network": 19788, "hides": "neither"}',
                    '{"rack": 1776, "network": 13192, "hides": "rack"}')],
    "15.pipeline": [("without_stages = ...", "without_stages = 2", "without_stages = 1.4")],
    "15.bits": [('"matmuls 8, gathers 16": ...', '"matmuls 8, gathers 16": 1332',
                 '"matmuls 8, gathers 16": 5329'),
                ('"matmuls 8, gathers 8": ...', '"matmuls 8, gathers 8": 1332',
                 '"matmuls 8, gathers 8": 2664'),
                ('"matmuls 4, gathers 8": ...', '"matmuls 4, gathers 8": 10658',
                 '"matmuls 4, gathers 8": 5329')],
    "18.bytes": [('{"apart": ..., "shared": ...}', '{"apart": 128, "shared": 64}',
                  '{"apart": 128, "shared": 96}')],
    "18.rounds": [('{"a": ..., "b": ..., "c": ...}', '{"a": 8, "b": 8, "c": 8}', '{"a": 4, "b": 4, "c": 2}')],
    "18.muon": [('{"gather": ..., "owner": ..., "layer": ...}', '{"gather": 8, "owner": 2, "layer": 0}',
                 '{"gather": 7, "owner": 1.75, "layer": 0}')],
    "18.plan": [('{"to 4": ..., "to 5": ..., "to 6": ..., "to 7": ...}',
                 '{"to 4": 0, "to 5": 0, "to 6": 1, "to 7": 3}',
                 '{"to 4": 2, "to 5": 0, "to 6": 1, "to 7": 3}')],
    "18.share": [('{"gather": ..., "owner": ...}', '{"gather": 2 / 3, "owner": 1 / 6}',
                  '{"gather": 1 / 6, "owner": 1 / 24}')],
    "18.flops": [("= ...", "= 4096 / 2**22", "= 5 * 4096 / 2**22")],
    "18.islands": [('{"every 10": ..., "SGD": ..., "Adam": ...}',
                    '{"every 10": 10, "SGD": "yes", "Adam": "yes"}',
                    '{"every 10": 15, "SGD": "yes", "Adam": "no"}')],
    "19.norm": [(', ...)', ', "E")', ', "C")')],
    "19.router": [(', ...)', ', "E")', ', "B")')],
    "19.memory": [(', ...)', ', "G")', ', "F")')],
}  # fmt: skip
"""Each exercise of the core paths: what stands there, what a learner types first, what at last."""

RING = """def ring_gather(block, n, axis):
    rank = lax.axis_index(axis)
    found = lax.pcast(jnp.zeros((n, *block.shape), block.dtype), axis, to="varying")
    for j in range(n):
        found = found.at[(rank - j) % n].set(block)
        {then}block = lax.ppermute(block, axis, [(i, (i + 1) % n) for i in range(n)])
    return found.reshape(n * block.shape[0])"""
PAIR = "def gated_pair(x, gate, up, down):\n    "
STAGE2 = "def stage2_accumulated(gradient, parts):\n    "
MORE = {
    "00.held": [("bytes_held = ...", 'bytes_held = "512"', ": correct")],
    "00.layout_of": [("layout_seen = ...", 'layout_seen = "b/tp d/dp +fsdp"', "two partial sums.*copies")],
    "01.fits": [("..., ...", "5, 13.9", ": not yet.*75 %")],
    "02.ring_gather": [
        ("def ring_gather(block, n, axis): ...", RING.format(then="if j < n - 1: "), ": correct.*DRAWN"),
        ("def ring_gather(block, n, axis): ...", RING.format(then=""), "one hop too many.*DRAWN"),
        ("def ring_gather(block, n, axis): ...",
         "def ring_gather(block, n, axis):\n    return lax.all_gather(block, axis, tiled=True)",
         "does it for you.*DRAWN"),
    ],
    "03.sent": [("= ...", "= 754_901", "the loss, the number of tokens"),
                ("= ...", '= "754,880"', ": correct")],
    "04.memory_table": [("{0: ..., 1: ..., 2: ..., 3: ...}",
                         '{"0": 112, "1": 49, "2": "38.5", "3": 28}', ": correct")],
    "04.stage2_accumulated": [
        ("def stage2_accumulated(gradient, parts): ...", STAGE2 + 'cut = lambda g: lax.psum_scatter(\n'
         '        lax.pcast(g, "fsdp", to="varying"), "fsdp", scatter_dimension=0, tiled=True\n    )\n'
         "    return sum(cut(gradient(part)) for part in parts)", ": correct.*DRAWN"),
        ("def stage2_accumulated(gradient, parts): ...",
         STAGE2 + "all = jnp.stack([gradient(part) for part in parts])\n"
         '    return lax.psum_scatter(all, "fsdp", scatter_dimension=1, tiled=True).sum(0)',
         "held until the last one.*DRAWN"),
    ],
    "05.attention_layouts": [
        ('{"q": ..., "k": ..., "v": ..., "o": ...}',
         '{"q": "d n/tp h", "k": "d n/tp h", "v": "d n/tp h", "o": "n/tp h d"}', "K and V have no n"),
    ],
    "05.gated_pair": [
        ("def gated_pair(x, gate, up, down): ...", PAIR + 'x = lax.pcast(x, "tp", to="varying")\n'
         '    return lax.psum(jax.nn.silu(x @ gate) * (x @ up) @ down, "tp")', ": correct.*DRAWN"),
        ("def gated_pair(x, gate, up, down): ...", PAIR + "mine = jax.nn.silu(x @ gate) * (x @ up) @ down\n"
         '    mine = lax.psum_scatter(mine, "tp", scatter_dimension=1, tiled=True)\n'
         '    return lax.all_gather(mine, "tp", axis=1, tiled=True, to="invarying")',
         ": correct. Right, in two calls.*DRAWN"),
        ("def gated_pair(x, gate, up, down): ...",
         PAIR + 'return lax.psum((x @ gate) * jax.nn.silu(x @ up) @ down, "tp")', "silu belongs to the gate"),
        ("def gated_pair(x, gate, up, down): ...",
         PAIR + 'gate, up = (lax.all_gather(w, "tp", axis=1, tiled=True) for w in (gate, up))\n'
         '    down = lax.all_gather(down, "tp", axis=0, tiled=True)\n'
         "    return jax.nn.silu(x @ gate) * (x @ up) @ down", "the weights travelled"),
    ],
    "06.to_heads": [
        ("def to_heads(x): ...", 'def to_heads(x):\n    return lax.all_to_all(x, "sp", 0, 1, tiled=True)',
         "dims are exchanged.*DRAWN"),
    ],
    "06.zigzag": [
        ("def zigzag(s, ranks): ...",
         "def zigzag(s, ranks):\n    cut = np.arange(s).reshape(2 * ranks, -1)\n"
         "    return np.stack([np.concatenate([cut[i], cut[-1 - i]]) for i in range(ranks)])",
         "numbers are right: reshape it"),
    ],
    "09.nodes": [("..., ...", "5.27, 3.62", ": correct"), ("..., ...", "5.25, 3.62", "expert twice")],
    "17.two_level": [
        ("def two_level(x): ...",
         'def two_level(x):\n    part = lax.psum(lax.psum_scatter(x, "tp", tiled=True), "dp")\n'
         '    return lax.all_gather(part, "tp", tiled=True, to="invarying")', ": correct.*DRAWN"),
    ],
}  # fmt: skip
"""Answers that were once judged wrongly, wherever they stand in a lesson: what lessons teach, and what is
wrong in a way of its own; and words that the verdict must have. DRAWN: a picture stands below it."""


@contextmanager
def lab(folder: Path) -> Iterator[str]:
    """Serve fresh copies as `llmpar lab` does; gives the address of the start page."""
    port = free_port()
    env = os.environ | {"JUPYTER_TOKEN": "t", "JAX_PLATFORMS": "cpu"}
    env |= {f"JUPYTER_{name.upper()}_DIR": str(folder / name) for name in ("config", "data", "runtime")} | {
        "IPYTHONDIR": str(folder / "ipython"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
    }
    (folder / "config").mkdir()  # the one setting that a newcomer has not: the page may be asked where it is
    (folder / "config" / "jupyter_lab_config.json").write_text(
        json.dumps({"LabApp": {"expose_app_in_browser": True}})
    )
    command = [sys.executable, "-m", "llmpar", "lab", "--no-browser", f"--port={port}"]
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [*command, f"--copies={folder / 'lessons'}"], cwd=ROOT, env=env, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        for _ in range(240):
            if server.poll() is not None:
                raise RuntimeError((folder / "lab.log").read_text()[-2000:])
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token=t", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab?token=t"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


ATTEMPT = re.compile(r'attempt\(\s*"(\d\d\w?\.\w+)"')
BOOK = "window.jupyterapp.shell.currentWidget"


class Walk:
    """One browser page on one lesson."""

    def __init__(self, page, out: Path) -> None:
        self.page, self.out = page, out

    def open(self, address: str, file: str) -> None:
        """Open a lesson and wait for its kernel."""
        self.page.goto(address.replace("/lab?", f"/lab/tree/{file}?") + "&reset")
        self.page.wait_for_function(f"window.jupyterapp && {BOOK}?.sessionContext", timeout=PATIENCE_MS)
        self.page.evaluate(f"async () => {{ await {BOOK}.sessionContext.ready; }}")
        self.idle()

    def idle(self) -> None:
        """Wait until the kernel has done everything."""
        self.page.wait_for_function(
            f"{BOOK}.sessionContext.session?.kernel?.status === 'idle'", timeout=PATIENCE_MS
        )

    def run(self, index: int, source: str | None = None) -> tuple[float, str]:
        """Put the cursor into a cell, type, run it; the seconds, and the text that stands below it."""
        page = self.page
        page.evaluate(
            f"async (i) => {{ const b = {BOOK}.content; b.activeCellIndex = i;"
            " await b.scrollToItem(i, 'smart'); }",
            index,
        )
        if source is not None:
            editor = page.locator(".jp-Cell.jp-mod-active .cm-content")
            editor.click()
            page.keyboard.press("Control+a")
            page.keyboard.insert_text(source)
        done = f"(i) => {BOOK}.content.widgets[i].model.executionCount"
        before, began = page.evaluate(done, index), time.monotonic()
        page.keyboard.press("Control+Enter") if source is not None else page.evaluate(
            "window.jupyterapp.commands.execute('notebook:run-cell')"
        )
        page.wait_for_function(
            f"([i, before]) => {{ const m = {BOOK}.content.widgets[i].model;"
            " return m.executionCount && m.executionCount !== before && m.executionState !== 'running'; }",
            arg=[index, before], timeout=PATIENCE_MS,
        )  # fmt: skip
        self.idle()
        seconds = time.monotonic() - began
        page.wait_for_timeout(200)  # a picture may come behind the kernel's word that it is idle
        told = page.evaluate(
            f"(i) => {BOOK}.content.widgets[i].model.outputs.toJSON().map(o => o.output_type === 'error'"
            " ? 'ERROR ' + o.ename + ': ' + o.evalue : [o.text || ''].flat().join('')"
            " + ('image/png' in (o.data || {}) ? 'DRAWN' : '')).join('')",
            index,
        )
        return seconds, told

    def lesson(self, file: str) -> dict:
        """Walk one core path."""
        notebook = json.loads((ROOT / "notebooks" / file).read_text(encoding="utf-8"))
        about, rows, verdicts, wide = notebook["metadata"]["llmpar"], [], {}, []
        words = 0
        for index, cell in enumerate(notebook["cells"]):
            source = "".join(cell["source"])
            if "core" not in cell["metadata"]["tags"]:
                break
            if cell["cell_type"] == "markdown":
                words += sum(any(c.isalnum() for c in word) for word in source.split())
                continue
            seconds, told = self.run(index)
            rows.append({"cell": index, "seconds": round(seconds, 2), "lines": told.count("\n")})
            if "ERROR" in told:
                verdicts[f"cell {index}"] = [told[:300]]
            if name := ATTEMPT.search(source):
                verdicts[name[1]] = [told, *self.exercise(index, source, name[1])]
        judged = []
        for index, cell in enumerate(notebook["cells"]):
            source = "".join(cell["source"])
            name = ATTEMPT.search(source)
            for blank, answer, must in MORE.get(name[1], ()) if name else ():
                told = self.run(index, source.replace(blank, answer))[1]
                judged.append([name[1], answer, " ".join(told.split()), must])
        self.page.wait_for_timeout(500)
        wide = self.page.evaluate(
            "() => [...document.querySelectorAll('.jp-Notebook .cm-scroller, .jp-Notebook"
            " .jp-RenderedMarkdown, .jp-Notebook .jp-OutputArea-output')].filter(e => e.scrollWidth >"
            " e.clientWidth + 2).map(e => e.innerText.slice(0, 60))"
        )
        self.pictures(file.partition("_")[0])
        machine = sum(row["seconds"] for row in rows)
        read = words / 200
        print(f"{file}: {machine:.0f} s of machine, {words} words", flush=True)
        return {"lesson": file.partition("_")[0], "machine_s": round(machine, 1), "words": words,
                "minutes": round(machine / 60 + read + about["exercises"] / 2, 1),
                "cells": rows, "verdicts": verdicts, "judged": judged, "wide": wide}  # fmt: skip

    def exercise(self, index: int, source: str, name: str) -> list[str]:
        """Ask for a hint, answer wrong, then right; what the page says each time."""
        told = [self.run(index, f'{source}\nhint("{name}")')[1]]
        for which in (1, 2):
            answer = source
            for blank in ANSWERS[name]:
                if blank[0] not in answer:
                    told.append(f"the walk does not find {blank[0]!r}")
                answer = answer.replace(blank[0], blank[which])
            told.append(self.run(index, answer)[1])
        return told

    def pictures(self, number: str) -> None:
        """Take a picture of each screen of the lesson."""
        page, scrolled = self.page, f"({BOOK}.content.outerNode || {BOOK}.content.node)"
        page.evaluate(f"() => {{ {scrolled}.scrollTop = 0; }}")
        for i in range(30):
            page.wait_for_timeout(250)
            page.screenshot(path=self.out / f"{number}-{i:02}.png")
            if page.evaluate(
                f"() => {{ const e = {scrolled}, at = e.scrollTop;"
                " e.scrollTop += 700; return e.scrollTop === at; }"
            ):
                break


def main(argv: list[str] | None = None) -> int:
    """Walk; 0 when every right answer was accepted, every wrong one was not, and no cell failed."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lessons", nargs="*", metavar="NN")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # server and browser end with it
    options.out.mkdir(parents=True, exist_ok=True)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    files = sorted(path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]*_*.ipynb"))
    chosen = [f for f in files if not options.lessons or f.startswith(tuple(options.lessons))]
    found = []
    with tempfile.TemporaryDirectory() as scratch, lab(Path(scratch)) as address, sync_playwright() as api:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = api.chromium.launch(executable_path=program, args=flags)
        for file in chosen:
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            walk = Walk(page, options.out)
            walk.open(address, file)
            found.append(walk.lesson(file))
            page.evaluate(f"async () => {{ await {BOOK}.sessionContext.shutdown(); }}")
            page.close()
            (options.out / "walk.json").write_text(json.dumps(found, indent=1, ensure_ascii=False))
        browser.close()
    wrong = [fault for lesson in found for fault in faults(lesson)]
    print("\n".join(wrong) or f"{len(found)} lessons walked")
    return bool(wrong)


def faults(lesson: dict) -> list[str]:
    """List what went wrong on the walk through a lesson."""
    out = []
    for name, told in lesson["verdicts"].items():
        if name.startswith("cell"):
            out.append(f"{lesson['lesson']}, {name}: {told[0]}")
        elif "replace the dots" not in told[0] or "hint 1" not in told[1]:
            out.append(f"{name}: the blank or the hint does not answer")
        elif "not yet" not in told[-2] or ": correct" not in told[-1]:
            out.append(f"{name}: wrong {told[-2]!r}, right {told[-1]!r}")
    out += [
        f"{name}: {answer!r} is told {told!r}, without {must!r}"
        for name, answer, told, must in lesson.get("judged", ())
        if not re.search(must, told)
    ]
    return out


if __name__ == "__main__":
    sys.exit(main())
