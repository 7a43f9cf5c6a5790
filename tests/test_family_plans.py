"""Every family that runs, on plans of eight devices by lot: all is predicted, and one device's answer."""

import itertools
import json
import random

import numpy as np
import pytest
from parity import BATCH, FIXTURES, SEQ, check, name
from test_random_plans import DRAWN, OF_FAMILIES, known

from llmpar.plan import checks, families
from llmpar.plan.mesh_shape import AXES, MeshShape
from llmpar.plan.plan import Plan
from llmpar.plan.presets import described_model

FIXTURES_OF = {"kimi_k2": ["deepseek_v3"], "phi3": ["phi3", "phi3_long"]}
"""Of families that have another number of fixtures than one of their own."""
NUM_PLANS = 8
CHOICES = {field: known(values) for field, values in DRAWN["family_plans"].items()}


def file_of(family: str, number: int) -> dict:
    """A fixture's ``config.json`` of a family, with keys by lot that change its layers."""
    rng, names = random.Random(f"{family} {number}"), FIXTURES_OF.get(family, [family])
    with np.load(FIXTURES / f"hf_{names[number % len(names)]}.npz") as file:
        raw = json.loads(str(file["config"])) | {"model_type": family, "vocab_size": 256}
    sizes = {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"}
    entries = {key: rng.choice(xs) for key, xs in OF_FAMILIES[family].items() if key not in sizes}
    raw |= {key: value for key, value in entries.items() if rng.random() < 0.5}
    if family == "phi3":
        raw["original_max_position_embeddings"] = SEQ // 2  # rows of SEQ pass it
    count = rng.choice((3, 4, 5))
    orders = [order for order in known(DRAWN["layers"]["orders"]) if order and len(order) > 1]
    if family in DRAWN["layers"]["mixed"]:
        order = itertools.islice(itertools.cycle(rng.choice(orders)), count)
        raw["layer_types"] = [f"{kind}_attention" for kind in order]
    else:
        raw.pop("layer_types", None)
    lists = "mlp_layer_types", "no_rope_layers", "moe_layers"
    raw = {key: value for key, value in raw.items() if key not in lists}
    return raw | {"num_hidden_layers": count}


def drawn(family: str, seed: int):
    """A model and a plan that run. Each axis is there in some plans of a family."""
    rng = random.Random(f"{family} {seed}")
    for _ in range(1000):
        raw = file_of(family, seed // 4)  # two files a family
        config = described_model(family, raw).must_run()
        axes = [axis for axis in AXES if axis != "ep" or config.experts]
        chosen = [axes[seed % len(axes)], *rng.choices(axes, k=2)]
        mesh = MeshShape(**{axis: 2 ** chosen.count(axis) for axis in axes})
        asked = {key: rng.choice(values) for key, values in CHOICES.items() if rng.random() < 0.4}
        if mesh.pp > 1:
            asked |= {"mode": "manual", "microbatches": mesh.pp * rng.choice((1, 2))}
        plan = Plan(mesh, **asked)
        try:
            resolved = plan.resolve(config, None, BATCH, SEQ)
        except ValueError:
            continue
        if not checks.why_not_run(resolved):
            keys = {key: raw[key] for key in sorted(raw.keys() & {*OF_FAMILIES[family], "layer_types"})}
            return config, plan, f"{name(plan)}\n{keys}"
    raise AssertionError(f"{family} {seed}: nothing was accepted")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(NUM_PLANS))
@pytest.mark.parametrize("family", families.RUNNING)
def test_a_family_sends_what_is_predicted_and_loses_what_one_device_does(family, seed):
    config, plan, text = drawn(family, seed)
    print(f"{family} {seed}: {text}")
    check(config, plan, 2.5, loss=1e-6)
