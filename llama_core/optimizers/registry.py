"""All optimizers by name. To add one, add its ``OptimizerType`` here."""

from llama_core.errors import ConfigError, not_one_of
from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.muon import MUON
from llama_core.optimizers.traits import OptimizerType

OPTIMIZERS = {optimizer.name: optimizer for optimizer in (ADAMW, MUON)}

DEFAULT_OPTIMIZER = ADAMW.name


def optimizer_names() -> tuple[str, ...]:
    """Return the name of every optimizer."""
    return tuple(OPTIMIZERS)


def optimizer_type(name: str) -> OptimizerType:
    """Return the optimizer called ``name``, with its traits.

    Raises:
        ConfigError: if there is no such optimizer; the message names the nearest ones.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(f"training.optimizer={name}{not_one_of(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def optimizer_keys() -> tuple[str, ...]:
    """Return the settings of ``training`` that one optimizer or another takes."""
    return tuple(dict.fromkeys(key for optimizer in OPTIMIZERS.values() for key in optimizer.keys))
