"""All optimizers by name. To add one, add its ``OptimizerType`` here, or bring it in a package of your own."""

from llama_core.errors import ConfigError, not_one_of
from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.muon import MUON
from llama_core.optimizers.traits import OptimizerType
from llama_core.registry import Registry

OPTIMIZERS = Registry("optimizers", OptimizerType, ADAMW, MUON)

DEFAULT_OPTIMIZER = ADAMW.name


def optimizer_type(name: str) -> OptimizerType:
    """Return the optimizer called ``name``, with its traits.

    Raises:
        ConfigError: if there is no such optimizer; the message names the nearest ones.
    """
    optimizer = OPTIMIZERS.find(name)
    if optimizer is None:
        raise ConfigError(f"training.optimizer={name}{not_one_of(name, OPTIMIZERS.names())}")
    return optimizer


def optimizer_keys() -> tuple[str, ...]:
    """Return the settings of ``training`` that one optimizer or another takes."""
    return tuple(dict.fromkeys(key for optimizer in OPTIMIZERS.values() for key in optimizer.keys))
