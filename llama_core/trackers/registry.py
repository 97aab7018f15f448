"""All trackers by name. To add one, add its ``TrackerType`` here, or bring it in a package of your own."""

from typing import Any

from llama_core.errors import ConfigError, not_one_of
from llama_core.registry import Registry
from llama_core.trackers.tensorboard import TENSORBOARD
from llama_core.trackers.traits import TrackerType
from llama_core.trackers.wandb import WANDB

TRACKERS: Registry[TrackerType[Any]] = Registry("trackers", TrackerType, TENSORBOARD, WANDB)


def tracker_type(name: str) -> TrackerType[Any]:
    """Return the tracker called ``name``, with its traits.

    Raises:
        ConfigError: if there is no such tracker; the message names the nearest ones.
    """
    kind = TRACKERS.find(name)
    if kind is None:
        raise ConfigError(f"tracking.trackers.{name}{not_one_of(name, TRACKERS.names())}")
    return kind


def folders_with_links() -> tuple[str, ...]:
    """Return the folders of a run in which trackers make links of their own."""
    return tuple(f"logs/{kind.name}" for kind in TRACKERS.values() if kind.makes_links)
