"""Division of the work over devices, and trainers for it. Names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training_infra.distributed.config import ConfigurationFactory as ConfigurationFactory
    from training_infra.distributed.config import DistributedConfig as DistributedConfig
    from training_infra.distributed.microbatch_scheduler import MicrobatchScheduler as MicrobatchScheduler
    from training_infra.distributed.trainer import create_distributed_trainer as create_distributed_trainer

_HOMES = {
    "ConfigurationFactory": "config",
    "DistributedConfig": "config",
    "MicrobatchScheduler": "microbatch_scheduler",
    "create_distributed_trainer": "trainer",
}
__all__ = ["ConfigurationFactory", "DistributedConfig", "MicrobatchScheduler", "create_distributed_trainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
