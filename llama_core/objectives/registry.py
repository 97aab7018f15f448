"""All objectives by name. To add one, add its ``ObjectiveType`` here, or bring it in a package of your own."""

from llama_core.errors import ConfigError, not_one_of
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.preferences import DPO, IPO, KTO, ORPO, SIMPO
from llama_core.objectives.traits import ObjectiveType
from llama_core.registry import Registry

OBJECTIVES = Registry("objectives", ObjectiveType, NEXT_TOKEN, DPO, IPO, SIMPO, ORPO, KTO)

DEFAULT_OBJECTIVE = NEXT_TOKEN.name


def objective_names() -> tuple[str, ...]:
    """Return the name of every objective."""
    return OBJECTIVES.names()


def objective_type(name: str) -> ObjectiveType:
    """Return the objective called ``name``, with its traits.

    Raises:
        ConfigError: if there is no such objective; the message names the nearest ones.
    """
    objective = OBJECTIVES.find(name)
    if objective is None:
        raise ConfigError(f"training.objective={name}{not_one_of(name, OBJECTIVES.names())}")
    return objective


def objective_keys() -> tuple[str, ...]:
    """Return the settings of ``training`` that one objective or another takes."""
    return tuple(dict.fromkeys(key for objective in OBJECTIVES.values() for key in objective.keys))
