"""The parts of parallelism: the plan of a run, pipeline schedules, and a rank's part of a model.

Names are imported on first use; only ``ParallelModel`` imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_core.parallel.apply import ParallelModel as ParallelModel
    from llama_core.planning.plan import ParallelPlan as ParallelPlan
    from llama_core.schedules.clock import simulate as simulate
    from llama_core.schedules.registry import build_schedule as build_schedule
    from llama_core.schedules.registry import schedule_names as schedule_names

_HOMES = {
    "ParallelModel": "parallel.apply",
    "ParallelPlan": "planning.plan",
    "build_schedule": "schedules.registry",
    "schedule_names": "schedules.registry",
    "simulate": "schedules.clock",
}
__all__ = ["ParallelModel", "ParallelPlan", "build_schedule", "schedule_names", "simulate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"llama_core.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
