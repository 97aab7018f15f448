"""What users hand to the facade."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_core.config.run import StrategyName, literal_values
from llama_core.config.strategy import LoRA, MoE
from llama_core.errors import ConfigError, did_you_mean

_PARAMETERS = {"standard": (), "lora": tuple(LoRA.model_fields), "moe": tuple(MoE.model_fields)}
"""The parameters of each strategy."""


@dataclass(frozen=True)
class TrainingStrategy:
    """How a model is trained.

    Raises:
        ConfigError: if the strategy or one of its parameters is unknown.
    """

    name: str = "standard"
    """standard trains every weight, lora adapters over a frozen model, moe layers of experts."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own: lora_rank, lora_alpha, target_modules; or num_experts, experts_per_token, moe_layers."""

    def __post_init__(self) -> None:
        if self.name not in literal_values(StrategyName):
            raise ConfigError(
                f"unknown strategy {self.name!r}; choose one of {', '.join(literal_values(StrategyName))}"
            )
        known = _PARAMETERS[self.name]
        unknown = [parameter for parameter in self.parameters if parameter not in known]
        if unknown:
            raise ConfigError(
                *(
                    f"strategy {self.name!r} takes {', '.join(known) or 'no parameters'}, not {parameter}"
                    f"{did_you_mean(parameter, known)}"
                    for parameter in unknown
                )
            )
