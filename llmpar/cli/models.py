"""``llmpar models``: the presets, with exact numbers of parameters."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from llmpar.cli.options import OptionalText, Output, give
from llmpar.plan.model_config import PRESETS, preset


@dataclass(frozen=True)
class Models(Output):
    """List the presets, or describe one model, with exact numbers of parameters.

    Attributes:
        name: a preset's name or the path of a config.json or its folder; all presets where it is left out.
    """

    name: Annotated[OptionalText, tyro.conf.Positional] = None

    def run(self) -> None:
        models, lines = [], []
        for config in PRESETS.values() if self.name is None else [preset(self.name)]:
            counts = {"params": config.num_params, "active_params": config.active_params}
            models.append(dataclasses.asdict(config) | counts)
            active = (
                f", {config.active_params:,} active"
                if config.active_params < config.num_params
                else ""
            )
            lines.append(
                f"{config.name:<16}{config.num_params:>18,} parameters{config.num_layers:>5}"
                f" layers{config.width:>7} wide{active}"
            )
        give({"models": models}, self.json, lines)
