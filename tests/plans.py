"""A 2-way covering array of plans: two choices of two fields that go together meet in one plan at least.

`python tests/plans.py` writes plans.txt anew, after a row of drawn.toml's ``array`` has come or gone."""

import ast
import collections
import dataclasses
import functools
import itertools
import math
import random
import tomllib
from pathlib import Path

import pytest
from parity import BATCH, LLAMA, MOE, SEQ, family

from llmpar.plan.model_config import ExpertConfig, LoraConfig
from llmpar.plan.plan import Plan

DEEPSEEK = ExpertConfig(
    8, 2, num_shared=1, score="sigmoid", scale=2.5, bias_rate=0.1, num_groups=4, top_groups=2, aux_loss=0.01
)
MODELS = {
    "llama": LLAMA,
    "copies": dataclasses.replace(  # ranks of tp hold copies of its two KV heads; a ring and heads share sp
        LLAMA, num_heads=8, num_kv_heads=2, tied=True, qkv_bias=True, qk_norm=True, head_width=8, window=11
    ),
    "experts": dataclasses.replace(MOE, experts=DEEPSEEK),
}
MODELS |= {"mixtral": MOE}
TABLE = tomllib.loads(Path(__file__).with_name("drawn.toml").read_text())
FIELDS = {name: [None if x == "null" else x for x in xs] for name, xs in TABLE["array"].items()}
AXES = {axis: FIELDS[axis] for axis in ("pp", "dp", "fsdp", "ep", "sp", "tp")}
DEAR = dict(model="experts", pp=2, layers=4, sp=(2, 4), attention_block=4, unroll=0)
DEAR |= {"schedule": ("interleaved", "zb-v", "dualpipe")}
"""Each of these takes three tenths more to compile, measured on 61 plans; others change little."""
ONCE = Path(__file__).with_name("plans_once.txt").read_text().splitlines()
"""What costs too much, or says too little, to meet everything: kernels interpreted, whole axes, adapters."""
AT_NIGHT = {ONCE[1], ONCE[3]}
"""A kernel and rounding once more, with stages and experts (tests/nightly.md)."""
FEW = "gemma2 fsdp", "gemma3_text pp", "glm4_moe ep", "deepseek_v3 pp", "deepseek_v3 fsdp"
FEW += "gemma2 dp", "gpt_oss sp", "llama4_text fsdp", "deepseek_v3 ep", "deepseek_v2 sp"
AT_NIGHT |= {line for line in ONCE if line.startswith(FEW)}
"""Families that differ little from another one on the same axes."""
AT_NIGHT |= {line for line in ONCE if "breadth-first" in line or line.startswith("experts pp")}
"""Orders whose executor other lines have."""

NOT_HERE = {name: {*values} for name, values in TABLE["not_in_array"].items()}


def by_mark(lists: dict[str, list[str]]) -> list:
    """Return lines as parameters of a test, each with the mark that its list is named by; ``gate``: none."""
    marks = {name: [] if name == "gate" else [getattr(pytest.mark, name)] for name in lists}
    return [pytest.param(line, marks=marks[name]) for name, lines in lists.items() for line in lines]


def parse(line: str) -> dict:
    """The choices of a line such as ``llama dp=2 zero=0``: what it leaves out has the table's first value."""
    model, *words = line.split()
    given = {name: value for name, _, value in (word.partition("=") for word in words)}
    return {"model": model} | {name: ast.literal_eval(value) for name, value in given.items()}


def write(asked: dict) -> str:
    other = [k for k in asked if k != "model" and (k not in FIELDS or asked[k] != FIELDS[k][0])]
    return " ".join([asked["model"], *(f"{k}={asked[k]!r}" for k in other)])


@functools.cache
def build(line: str):
    asked = parse(line)
    model = MODELS.get(name := asked.pop("model")) or family(name)
    config = dataclasses.replace(model, num_layers=asked.pop("layers", 2))
    if targets := asked.pop("lora", ""):  # rows of weights, and no field of a plan
        config = dataclasses.replace(config, lora=LoraConfig(2, 3.0, tuple(targets.split(","))))
    mesh = " ".join(f"{axis}={asked.pop(axis)}" for axis in AXES if axis in asked)
    return config, Plan(mesh, **asked)


def accepted(line: str) -> bool:
    """Whether the package takes it, each of its fields deciding something."""
    try:
        config, plan = build(line)
        notes = plan.resolve(config, None, BATCH, SEQ).notes  # of fields that decide nothing
        plan.resolve(config)
    except ValueError:
        return False
    deep = config.num_layers > 2
    idle = deep and plan.unroll == 0 or notes
    return 2 <= plan.mesh.size <= 8 and (plan.mesh.pp > 1) == deep and not idle


def pairs(asked: dict) -> set:
    whole = {name: asked.get(name, values[0]) for name, values in FIELDS.items()}
    return set(map(frozenset, itertools.combinations(whole.items(), 2)))


def cost(asked: dict) -> float:
    """About how long a plan compiles, in times of the cheapest."""
    dear = lambda name, values: asked.get(name) in (values if isinstance(values, tuple) else (values,))
    return 1.3 ** sum(dear(*row) for row in DEAR.items())


def drawn(rng, wanted=frozenset(), begin: dict | None = None) -> str:
    """A line that is accepted: field by field the choice with most wanted pairs, by lot where none has."""
    asked = {"model": rng.choice(FIELDS["model"])} | (begin or {})
    early = "model", *AXES, "layers", "microbatches"  # others depend on these
    for name in sorted(FIELDS, key=lambda name: (early.index(name) if name in early else 99, rng.random())):
        if name in asked:
            continue
        values = rng.sample(FIELDS[name], len(FIELDS[name]))
        new = lambda value: sum(frozenset([pair, (name, value)]) in wanted for pair in asked.items())  # noqa: B023
        for value in sorted(values, key=new, reverse=True) if wanted else values:
            more = asked | {name: value}
            if name in AXES and math.prod(more.get(axis, 1) for axis in AXES) <= 8 or accepted(write(more)):
                asked = more
                break
    return write(asked) if accepted(write(asked)) else ""


def cover(rng, num: int, tries: int) -> list[str]:
    """Lines in which the pairs meet that do in `RARE` of ``num`` random ones: the best for their cost."""
    pool = {line: pairs(parse(line)) for _ in range(num) if (line := drawn(rng))}
    met = collections.Counter(itertools.chain(*pool.values()))
    open_pairs, chosen = {pair for pair in met if met[pair] >= RARE * num}, []
    print(f"{len(pool)} random plans, {len(open_pairs)} pairs")
    few = LEFT * len(open_pairs)
    for line in set(ONCE) - AT_NIGHT:
        open_pairs -= pairs(parse(line))
    while len(open_pairs) > few:
        for pair in rng.sample(sorted(open_pairs, key=str), min(tries, len(open_pairs))):
            # a mesh on which it can be
            asked = parse(rng.choice([line for line in pool if pair in pool[line]]))
            names = "model", "layers", *AXES, *dict(pair)
            kept = {name: asked.get(name, FIELDS[name][0]) for name in names}
            if line := drawn(rng, open_pairs, kept):
                pool[line] = pairs(parse(line))
        chosen.append(max(pool, key=lambda line: len(pool[line] & open_pairs) / cost(parse(line))))
        open_pairs -= pool[chosen[-1]]
        print(len(chosen), len(open_pairs), chosen[-1], flush=True)
    return chosen


RARE = 1 / 100
"""Pairs that fewer random plans have are for tests/test_random_plans.py."""
LEFT = 1 / 100
"""And so are the last ones, for a few of which a fifth of all lines would be needed."""
PLANS = Path(__file__).with_suffix(".txt")


def lines() -> list[str]:
    return PLANS.read_text().split("\n")[:-1] + ONCE


def few() -> list[str]:
    """Lines in which each choice of the table is met: short ones go where others make up for them."""
    table = {name: values[0] for name, values in FIELDS.items()}
    met = {line: {*(table | parse(line)).items()} for line in lines() if line not in AT_NIGHT}
    wanted = {(name, value) for name, values in FIELDS.items() for value in values}
    chosen = sorted(met, key=len)
    for line in list(chosen):
        others = [other for other in chosen if other != line]
        if wanted <= set().union(*(met[other] for other in others)):
            chosen = others
    return chosen


if __name__ == "__main__":
    PLANS.write_text("\n".join(cover(random.Random(0), 1500, 8)) + "\n")
    print(f"{len(lines())} plans")
