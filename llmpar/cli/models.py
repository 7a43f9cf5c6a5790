"""``llmpar models``: the presets by their makers, with exact numbers of parameters."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.options import OptionalText, Output, give
from llmpar.plan.model_config import PRESETS, ModelConfig, maker_of, preset


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
        notes = configs[0].notes if self.name is not None else []
        give({"models": list(map(document, configs))}, self.json, [*lines, *notes])


def document(config: ModelConfig) -> dict[str, Any]:
    """Return a model's fields and counts as JSON has them; of a planned one without its rows."""
    fields = dataclasses.asdict(config)
    for name in ("kinds", "lead", "period", "planned"):
        del fields[name]
    counts = {"params": config.num_params, "active_params": config.active_params}
    return fields | counts | {"maker": maker_of(config.name), "notes": config.notes}


def described(config: ModelConfig) -> str:
    """Return a model's sizes in a line."""
    line = (
        f"{config.name:<18}{config.num_params:>20,} parameters{config.num_layers:>5}"
        f" layers{config.width:>7} wide"
    )
    if config.active_params < config.num_params:
        line += f", {config.active_params:,} active"
    return line + ", planned" * bool(config.planned)
