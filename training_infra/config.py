"""Arguments of the Python API: strategies, and settings by their short names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from llama_core.config.names import keys_called
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig, config_keys
from llama_core.config.settings import StrategyName, literal_values
from llama_core.config.strategy import PARTS, LoRA, MoE, not_a_strategy
from llama_core.errors import ConfigError, ask_for, did_you_mean
from training_infra.spelling import python_spelling

_SECTIONS: dict[str, tuple[str, ...]] = {"lora": tuple(LoRA.model_fields), "moe": tuple(MoE.model_fields)}
"""The parameters in each section of a run's configuration."""


@dataclass(frozen=True)
class TrainingStrategy:
    """How a model is trained.

    Raises:
        ConfigError: if the strategy or one of its parameters is unknown.
    """

    name: str = "standard"
    """standard trains every weight, lora adapters over a frozen model, moe a mixture of experts, hybrid both."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``LoRA`` or ``MoE``: lora_rank, lora_alpha, target_modules; num_experts, moe_layers and so on.

    lora and hybrid also take ``trainable``.
    """

    def __post_init__(self) -> None:
        if self.name not in literal_values(StrategyName):
            why = not_a_strategy(self.name) or f"choose one of {', '.join(literal_values(StrategyName))}"
            raise ConfigError(f"unknown strategy {self.name!r}; {why}")
        known = [name for part in PARTS[self.name] for name in _SECTIONS.get(part, (part,))]
        unknown = [parameter for parameter in self.parameters if parameter not in known]
        if unknown:
            raise ConfigError(
                *(
                    f"strategy {self.name!r} takes {', '.join(known) or 'no parameters'}, not {parameter}"
                    f"{did_you_mean(parameter, known)}"
                    for parameter in unknown
                )
            )

    def as_keys(self) -> dict[str, Any]:
        """Return the strategy as nested keys of a run configuration."""
        keys: dict[str, Any] = {"strategy": self.name}
        for part in PARTS[self.name]:
            given = {name: value for name, value in self.parameters.items() if name in _SECTIONS.get(part, (part,))}
            if given:
                keys[part] = given if part in _SECTIONS else given[part]
        return keys


class TrainingConfig:
    """How a model is trained: settings by the last word of their key, such as ``batch_size`` or ``learning_rate``.

    Args:
        model_name: name of the run, which its directory's name starts with; by default the model's name.
        **settings: as for ``LlamaTrainingOrchestrator.configure``.

    Raises:
        ConfigError: if settings are wrong; the message names all of them.
    """

    @python_spelling()
    def __init__(self, model_name: str | None = None, **settings: Any) -> None:
        self.settings: Mapping[str, Any] = settings | ({} if model_name is None else {"run_name": model_name})
        self._config = with_settings(RunConfig(), self.settings)

    @property
    def model_name(self) -> str | None:
        """The name of the run; None for the model's name."""
        return self._config.tracking.run_name

    def __getattr__(self, name: str) -> Any:
        """Return a setting by its short name; its default if it was not given."""
        if name.startswith("_"):
            raise AttributeError(name)
        value: Any = self._config
        try:
            for key in setting_path(name):
                value = getattr(value, key)
        except ConfigError as error:
            raise AttributeError(str(error)) from None
        return value

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"TrainingConfig({given})"


def check_kind(name: str, given: object, kind: type | UnionType, remedy: str) -> None:
    """Refuse an argument of another class than ``kind``.

    Raises:
        ConfigError: with the argument's name, its class, and the remedy.
    """
    if not isinstance(given, kind):
        raise ConfigError(f"{name} is a {type(given).__name__!r}; {remedy}")


def with_settings(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return ``config`` with settings changed by the last word of their key.

    If several sections have the word, the first in ``RunConfig`` counts: ``steps`` is ``training.steps``.

    Raises:
        ConfigError: if there is no such setting, or its value is invalid.
    """
    return config.with_overrides(*(Override(".".join(setting_path(name)), value) for name, value in settings.items()))


def setting_path(name: str) -> list[str]:
    """Return the sections and the key of a setting's short name.

    Raises:
        ConfigError: if there is no such setting; the message suggests the nearest names.
    """
    for dotted in config_keys():
        *sections, key = dotted.split(".")
        if key == name:
            return [*sections, key]
    names = {dotted.rpartition(".")[2]: dotted for dotted in config_keys()}
    meant = [key.rpartition(".")[2] for key in keys_called(name, names.values())]
    raise ConfigError(f"unknown setting {name!r}{ask_for(meant) or did_you_mean(name, names)}")
