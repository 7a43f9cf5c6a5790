"""Families that are planned have the parameters that transformers counts (families.json), or are refused."""

import functools
import json
import math
import random

import pytest
from shared import CASES as SHARED
from shared import HERE, TABLES

from llmpar.plan import families
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import ExpertConfig
from llmpar.plan.places import repeated
from llmpar.plan.presets import described_model
from llmpar.predict.parameters import notes_on

KEPT = json.loads((HERE / "families.json").read_text())
CASES = {name: (case["config"], case["parameters"]) for name, case in KEPT["families"].items()}
FUZZED = "llama deepseek_v3 gemma4_text qwen3_next nemotron_h jamba gpt_oss mpt lfm2 ernie4_5_moe".split()
BAD = (None, "x", -1, 1e99, [], {}, math.nan, math.inf, 0, 1.5, True, ["x"], [[]], {"a": [1]}, 10**30)


def read(config):
    return families.read_family(families.text_part(config), "m", "it has other layers")


def described(config):
    return described_model("m", families.text_part(config))


def test_every_family_has_the_parameters_of_transformers():
    wrong = {}
    for name, case in KEPT["families"].items():
        alone = {"n_group": 1} if name.startswith("deepseek_v3") else {}  # its 12 experts are no 8 groups
        model = described(case["config"] | alone)
        counts = model.num_params, model.active_params
        if counts != (case["parameters"], case.get("active", counts[1])):
            wrong[name] = counts
    assert not wrong
    assert len({case["config"]["model_type"] for case in KEPT["families"].values()}) >= 140


def test_published_files_have_the_parameters_that_transformers_and_their_makers_count():
    """To 0.5 %, or as far as the maker rounds (70e9 may be 65e9 to 75e9); where not, a row says why."""
    for case in KEPT["published"]:
        model, makers = described(case["config"]), case["published"]
        assert (model.num_params, model.active_params) == (case["parameters"], case["active"]), case["names"]
        rounding = 10 ** (len(str(makers)) - len(str(makers).rstrip("0"))) / 2
        is_near = abs(model.num_params - makers) <= max(rounding, 0.005 * makers)
        assert is_near != ("beyond" in case), case["names"]
        assert not [note for note in notes_on(model) if note.startswith("keys of")], "all keys are read"


def test_a_layer_says_what_travels_and_what_is_kept():
    models = {name: described(case["config"]) for case in KEPT["published"] for name in case["names"]}
    layers = lambda name: [models[name].blocks[kind][1] for kind in models[name].layer_kinds]
    latent = models["deepseek-ai--DeepSeek-V3"]
    assert (latent.described.cache_width, latent.described.value_width) == (576, 128)
    assert (latent.num_heads, latent.num_kv_heads, latent.head_width) == (128, 128, 192)
    assert latent.lead == (0, 0, 0) and latent.period == (1,)
    groups = {"num_groups": 8, "top_groups": 4}  # of its class
    assert latent.kinds[1].experts == ExpertConfig(256, 8, num_shared=1, **groups)
    assert models["zai-org--GLM-5"].described.cache_width == 512 + 64 + 128
    assert [kind.window for kind in layers("openai--gpt-oss-20b")[:4]] == [128, None, 128, None]
    flash = layers("XiaomiMiMo--MiMo-V2-Flash")[:2]
    assert [(kind.num_kv_heads, kind.described.value_width) for kind in flash] == [(4, 128), (8, 128)]
    delta, *_, full = layers("Qwen--Qwen3.5-27B")[:4]
    assert (delta.mixer, delta.state_size) == ("recurrent", 48 * 128 * 128)
    assert (full.mixer, full.num_kv_heads, full.head_width) == ("attention", 4, 256)
    hybrid = layers("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8")[:8]
    assert [kind.mixer[0] for kind in hybrid] == list("rnrnrnra")  # M E M E M E M *
    assert hybrid[0].state_size == 128 * 64 * 128 and hybrid[1].ffn_width == 2688
    widths = [kind.described.cache_width for kind in layers("deepseek-ai--DeepSeek-V4-Flash")]
    assert widths[:4] == [512, 512, (512 + 128) // 4, 512 // 128] and len(widths) == 43


def test_whatever_a_file_holds_is_read_or_refused():
    random.seed(0)
    for name in FUZZED:
        config = families.text_part(CASES[name][0])
        for key in random.sample(sorted(config.keys() - {"model_type"}), 6):
            for value in random.sample(BAD, 4):
                try:
                    read(config | {key: value})
                except ValueError as error:
                    assert "\n" not in str(error) and len(str(error)) < 400


@pytest.mark.parametrize(
    "key",
    "hidden_size num_hidden_layers num_attention_heads vocab_size kv_lora_rank moe_intermediate_size"
    " num_experts_per_tok n_routed_experts v_head_dim".split(),
)
def test_a_missing_key_is_named(key):
    config = CASES["deepseek_v3"][0]
    with pytest.raises(ValueError, match=key):
        read({name: value for name, value in config.items() if name not in (key, "mlp_layer_types")})


@pytest.mark.parametrize("family, change, why", SHARED["layers_not_described"])
def test_layers_that_are_not_described_are_refused_by_name(family, change, why):
    with pytest.raises(ValueError, match=why):
        read(CASES[family][0] | json.loads(change))
    assert not any(map(families.is_planned, ("spectral", None, [])))


def test_keys_that_might_count_are_named_and_others_are_not():
    config = CASES["llama"][0]
    silent = {"torch_dtype": "bfloat16", "bos_token_id": 1, "attention_dropout": 0.1, "x_size": 0}
    assert read(config | silent)["described"]["notes"] == []
    (note,) = read(config | silent | {"zebra_width": 7, "num_experts": 4})["described"]["notes"]
    assert note == "keys of the file that are not read and might change sizes: num_experts, zebra_width"
    more = {"num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"}}
    notes = read(config | more)["described"]["notes"]
    assert [x for note in notes for x in ("(MTP)", "quantized") if x in note] == ["(MTP)", "quantized"]


def test_the_text_part_of_several_media_has_the_defaults_of_its_class():
    """LLaVA's file names no size of its language model, and not that it is a Llama; Gemma 3's only some."""
    outer = {"model_type": "llava", "vision_config": {"depth": 9}, "text_config": {"vocab_size": 32064}}
    assert described(outer).num_params == 6_738_415_616 + 2 * 64 * 4096
    assert read(outer)["described"]["notes"] == ["the text part alone: vision_config is not counted"]
    narrow = {"vocab_size": 32064, "hidden_size": 960, "num_attention_heads": 12}
    assert described(outer | {"text_config": narrow}).num_params == 1_194_087_360
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    inner = {"model_type": "gemma3_text", "tie_word_embeddings": False}  # the whole model does not read it
    gemma = {"model_type": "gemma3", "text_config": sizes | inner}
    assert described(gemma).num_params == 3_880_263_168 and described(gemma).tied
    assert "the outer one is taken" in read(gemma | {"tie_word_embeddings": True})["described"]["notes"][-1]


def test_a_model_says_its_parameters_as_its_maker_counts_them():
    """DeepSeek-V3 has 685 B with its MTP layer; its 37 B active, and gpt-oss' 5.1 B, have no embedding."""
    cases = {name: case["config"] for case in KEPT["published"] for name in case["names"]}
    notes = {name: notes_on(described_model(name, families.text_part(file))) for name, file in cases.items()}
    further = "with the MTP layers about 682.6 B parameters; 684.5 B where they have"
    deepseek = notes["deepseek-ai--DeepSeek-V3"]
    assert [note[:69] for note in deepseek if note.startswith("with")] == [further[:69]]
    active = "active parameters without the embedding: "
    assert active + "36.6 billion" in deepseek
    assert active + "5.13 billion" in notes["openai--gpt-oss-120b"]
    assert not [note for note in notes["google--gemma-4-26B-A4B"] if note.startswith(active)]  # tied
    assert not [x for x in notes["meta-llama--Meta-Llama-3.1-70B"] if x.startswith((active, "with"))]


def test_lead_and_period_are_the_shortest():
    random.seed(0)
    for _ in range(300):
        lead = random.choices(range(3), k=random.randrange(4))
        period = random.choices(range(3), k=random.randrange(1, 5))
        order = tuple((lead + period * 9)[: random.randrange(1, 20)])
        first, shortest = repeated(order)
        assert (*first, *shortest * len(order))[: len(order)] == order and shortest
        assert len(first) + len(shortest) <= min(len(order), len(lead) + len(period))


def test_rows_are_layouts():
    for part, rows in families.PARTS.items():
        for path, row in rows.items():
            region, *dims = (word.partition("=")[0] for word in row.split())
            layout = parse_layout(" ".join((region, "l", *dims)))
            assert layout.region == region and len(layout.dims) == 1 + len(dims), f"{part}: {path}"


RUNS = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4}
RUNS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize("more, why", TABLES["families_ask"], ids=str)
def test_a_family_that_runs_says_what_of_a_file_it_does_not_compute(more, why):
    """Such a model is planned, with that reason: nothing that a file asks for is left out silently."""
    config = described_model("m", RUNS | more)
    assert config.runs == (not why) and why in config.why_planned


def test_a_key_counts_as_transformers_reads_it():
    """Of two keys the one that counts there; one that is left out is what its class has, and null is none."""
    of = lambda **more: described_model("m", RUNS | more)
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert of(model_type="mixtral", sliding_window_size=5, **routed).window is None
    experts = lambda name, **more: of(model_type=name, **routed, **more).experts.num_experts
    assert experts("mixtral", num_experts=6) == experts("gpt_oss", num_experts=6) == 6
    assert experts("qwen3_moe", num_experts=6, n_routed_experts=8, moe_intermediate_size=8) == 4
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for original, more in ((32, {}), (8, {"original_max_position_embeddings": 8})):
        assert of(rope_scaling=rope, **more).rope_scaling.original_context == original
    factors = {"rope_type": "longrope"} | dict.fromkeys(("short_factor", "long_factor"), [1.5] * 4)
    config = CASES["deepseek_v3"][0] | {"n_group": 1, "topk_group": 1}
    latent = described(config | {"rope_scaling": factors})
    assert latent.runs and len(latent.rope_scaling.long_factors) == 4, "one for each pair that rotates"
    mistral = functools.partial(of, model_type="mistral")
    assert mistral().window == 4096 and mistral(sliding_window=None).window is None
    assert of(model_type="gemma2").variant.logit_cap == 30


@pytest.mark.parametrize("name, key, parameters", TABLES["keys_of_relatives"], ids=str)
def test_a_key_of_a_relative_counts_as_the_class_of_the_model_type_has_it(name, key, parameters):
    assert described(CASES[name][0] | key).num_params == parameters
