"""A run rehearsed before it has a directory: nothing is written, no device is needed, nothing is trained."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llama_core.chain.planned import PlannedRun, plan_anywhere, plan_for_gpu
from llama_core.chain.prepare import check_initial_weights, refuse_untrainable
from llama_core.chain.steps import NOT_REHEARSED, rehearse_plan
from llama_core.config.run import RANDOM_BASE, RunConfig
from llama_core.data.check import DataCheck, check_data
from llama_core.errors import DoesNotFitError
from llama_core.planning.memory.peaks import MemoryEstimate

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult
    from llama_core.rehearsal.twin import TwinResult


@dataclass(frozen=True)
class Preview:
    """What a run would do."""

    planned: PlannedRun
    rehearsed: "DryRunResult | None"
    """What was counted; None under DeepSpeed, which works with real ranks only."""
    twin: "TwinResult | None" = None
    data: DataCheck | None = None
    """What the run's data begin with; None where they were not looked at."""

    @cached_property
    def verdict(self) -> MemoryEstimate:
        """What was counted, or else what was estimated, held against the device."""
        estimate = self.planned.estimate
        return estimate if self.rehearsed is None else replace(estimate, profile=self.rehearsed.profile)

    @property
    def exit_code(self) -> int:
        """What a command returns that shows it."""
        return 0 if self.verdict.fits else DoesNotFitError.exit_code

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to know beside the numbers, a sentence each."""
        left_out = () if self.rehearsed else (f"dry run {NOT_REHEARSED}",)
        random_base = (RANDOM_BASE,) if self.planned.config.has_random_base else ()
        return (*random_base, *left_out, *self.verdict.notes, *(self.data.notes if self.data else ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the preview as a record."""
        return {
            "estimate": self.planned.estimate.as_dict(),
            "dry_run": self.rehearsed and self.rehearsed.as_dict(),
            "plan": self.planned.plan.as_dict(),
            "fits": self.verdict.fits,
            "notes": list(self.notes),
        } | ({"twin": self.twin.as_dict()} if self.twin else {})


def preview(config: RunConfig, *, here: bool, data: bool = True, twin: bool = False) -> Preview:
    """Plan a run, check its data, and rehearse every distinct rank.

    Args:
        config: what to run.
        here: plan for this machine, as training would, where it has the devices; else for GPUs that need not be here,
            unless ``config`` names the CPU.
        data: check the data of ``config``; False where batches come from elsewhere.
        twin: also train the plan's tiny twin on real processes, against one process.

    Raises:
        ConfigError, DataError, WeightsError, PlanError: if the request cannot be met.
    """
    refuse_untrainable(config)
    check_initial_weights(config)
    planned = plan_anywhere(config) if here else plan_for_gpu(config)
    checked = check_data(planned.config.data, planned.config.spec) if data else None
    rehearsed = rehearse_plan(planned.config, planned.plan)
    if not twin:
        return Preview(planned, rehearsed, data=checked)
    from llama_core.rehearsal.twin import twin as train_twin

    return Preview(planned, rehearsed, train_twin(planned.config, planned.plan), checked)
