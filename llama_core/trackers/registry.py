"""All trackers by name. To add one, add its ``TrackerType`` here, or bring it in a package of your own."""

from typing import Any

from llama_core.registry import Registry
from llama_core.trackers.mlflow import MLFLOW
from llama_core.trackers.tensorboard import TENSORBOARD
from llama_core.trackers.trackio import TRACKIO
from llama_core.trackers.traits import TrackerType
from llama_core.trackers.wandb import WANDB

TRACKERS: Registry[TrackerType[Any]] = Registry(
    "trackers", TrackerType, "tracking.trackers", TENSORBOARD, WANDB, MLFLOW, TRACKIO
)


def folders_with_links() -> tuple[str, ...]:
    """Return the folders of a run in which trackers make links of their own."""
    return tuple(f"logs/{kind.name}" for kind in TRACKERS.values() if kind.makes_links)
