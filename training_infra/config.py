"""What users hand to the facade."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llama_core.config.run import StrategyName, literal_values
from llama_core.errors import ConfigError


@dataclass(frozen=True)
class TrainingStrategy:
    """How a model is trained.

    Raises:
        ConfigError: if the strategy or one of its parameters is unknown.
    """

    name: str = "standard"
    """standard trains every weight."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The strategy's own parameters; standard has none."""

    def __post_init__(self) -> None:
        if self.name not in literal_values(StrategyName):
            raise ConfigError(
                f"unknown strategy {self.name!r}; choose one of {', '.join(literal_values(StrategyName))}"
            )
        if self.parameters:
            raise ConfigError(f"strategy {self.name!r} takes no parameters, not {', '.join(self.parameters)}")
