"""All objectives by name. To add one, add its ``ObjectiveType`` here, or bring it in a package of your own."""

from llama_core.objectives.distill import DISTILL
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.objectives.preferences import DPO, IPO, KTO, ORPO, SIMPO
from llama_core.objectives.traits import ObjectiveType
from llama_core.registry import Registry

OBJECTIVES = Registry(
    "objectives", ObjectiveType, "training.objective", NEXT_TOKEN, DPO, IPO, SIMPO, ORPO, KTO, DISTILL
)

DEFAULT_OBJECTIVE = NEXT_TOKEN.name


def objective_keys() -> tuple[str, ...]:
    """Return the settings of ``training`` that one objective or another takes."""
    return tuple(dict.fromkeys(key for objective in OBJECTIVES.values() for key in objective.keys))
