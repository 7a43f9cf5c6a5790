"""``llmpar models``: the presets by their makers, with exact numbers of parameters."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.options import OptionalText, Output, give
from llmpar.plan.model_config import OF_FAMILIES, ModelConfig
from llmpar.plan.presets import PRESETS, maker_of, preset
from llmpar.predict.parameters import notes_on, params_of_a_layer


@dataclass(frozen=True)
class Models(Output):
    """List the presets, or describe one model, with exact numbers of parameters.

    Attributes:
        name: a preset's name or the path of a config.json or its folder; all presets where it is left out.
    """

    name: Annotated[OptionalText, tyro.conf.Positional] = None

    def run(self) -> None:
        configs = list(PRESETS.values()) if self.name is None else [preset(self.name)]
        lines, maker = list[str](), ""
        for config in configs:
            if self.name is None and maker_of(config.name) != maker:
                maker = maker_of(config.name)
                lines.append(f"{maker}:")
            lines.append(described(config))
        if self.name is not None:
            lines += [described_kind(*pair) for pair in configs[0].blocks if configs[0].described]
            lines += notes_on(configs[0])
        give({"models": list(map(document, configs))}, self.json, lines)


def document(config: ModelConfig) -> dict[str, Any]:
    """Return a model's fields and counts as JSON has them; of a planned one what was read, kind by kind of
    its layers."""
    fields = asdict(config)
    for name in ("kinds", "lead", "period", "described", *OF_FAMILIES):
        del fields[name]
    if config.described:
        sizes = "name vocab_size width num_layers tied context_length experts".split()
        fields = {name: fields[name] for name in sizes}
        fields["layers"] = [kind_document(*pair) for pair in config.blocks]
        fields["experts"] = max((kind["experts"] for kind in fields["layers"]), key=len)
    counts = {"params": config.num_params, "active_params": config.active_params}
    return fields | counts | {"maker": maker_of(config.name), "notes": notes_on(config)}


def kind_document(count: int, block: ModelConfig) -> dict[str, Any]:
    """Return how many layers there are of a kind, and their sizes."""
    names = "mixer num_heads num_kv_heads head_width value_width window cache_width state_size ffn_width"
    sizes = {name: getattr(block, name) for name in names.split()}
    experts = ("num_experts", "top_k") if block.experts else ()
    sizes["experts"] = {name: getattr(block.experts, name) for name in experts}
    return {"layers": count, "params": params_of_a_layer(block)} | sizes


def described_kind(count: int, block: ModelConfig) -> str:
    """Return what layers of a kind are, in a line."""
    mixers = {"attention": "attention", "recurrent": "a recurrent state", "none": "no mixer"}
    words = [mixers[block.mixer]]
    if block.has_latent_attention:
        words[0] = "latent attention"
    if block.window:
        cut = "chunks" if block.variant.chunked else "a window"
        words.append(f"in {cut} of {block.window:,}")
    if block.experts:
        words.append(f"with {block.experts.top_k} of {block.experts.num_experts} experts")
    elif not block.ffn_width:
        words.append("without a feed-forward")
    return f"  {count} layers of {params_of_a_layer(block):,} parameters: {' '.join(words)}"


def described(config: ModelConfig) -> str:
    """Return a model's sizes in a line."""
    line = (
        f"{config.name:<18}{config.num_params:>20,} parameters{config.num_layers:>5}"
        f" layers{config.width:>7} wide"
    )
    if config.active_params < config.num_params:
        line += f", {config.active_params:,} active"
    return line + ", planned" * (not config.runs)
