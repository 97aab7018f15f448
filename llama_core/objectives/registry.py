"""All objectives by name. To add one, add its ``ObjectiveType`` here."""

from llama_core.errors import ConfigError, not_one_of
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.preferences import DPO, IPO, KTO, ORPO, SIMPO
from llama_core.objectives.traits import ObjectiveType

OBJECTIVES = {objective.name: objective for objective in (NEXT_TOKEN, DPO, IPO, SIMPO, ORPO, KTO)}

DEFAULT_OBJECTIVE = NEXT_TOKEN.name


def objective_names() -> tuple[str, ...]:
    """Return the name of every objective."""
    return tuple(OBJECTIVES)


def objective_type(name: str) -> ObjectiveType:
    """Return the objective called ``name``, with its traits.

    Raises:
        ConfigError: if there is no such objective; the message names the nearest ones.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"training.objective={name}{not_one_of(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def objective_keys() -> tuple[str, ...]:
    """Return the settings of ``training`` that one objective or another takes."""
    return tuple(dict.fromkeys(key for objective in OBJECTIVES.values() for key in objective.keys))
