"""All optimizers by name. To add one, add its ``OptimizerType`` here, or bring it in a package of your own."""

from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.muon import MUON
from llama_core.optimizers.traits import OptimizerType
from llama_core.registry import Registry

OPTIMIZERS = Registry("optimizers", OptimizerType, "training.optimizer", ADAMW, MUON)

DEFAULT_OPTIMIZER = ADAMW.name


def optimizer_keys() -> tuple[str, ...]:
    """Return the settings of ``training`` that one optimizer or another takes."""
    return tuple(dict.fromkeys(key for optimizer in OPTIMIZERS.values() for key in optimizer.keys))
