"""Plan and rehearse a run without a directory: writes nothing, needs no device, trains nothing."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llama_core.chain.planned import PlannedRun, plan_anywhere, plan_for_gpu
from llama_core.chain.prepare import check_initial_weights
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
    """The plan of a run, its dry run and the check of its data."""

    planned: PlannedRun
    rehearsed: "DryRunResult | None"
    """The dry run's result; None under DeepSpeed, which needs real ranks."""
    twin: "TwinResult | None" = None
    data: DataCheck | None = None
    """The check of the data's first records; None if they were not checked."""

    @cached_property
    def verdict(self) -> MemoryEstimate:
        """The dry run's bytes, or the estimate's if there was none, compared with the device."""
        estimate = self.planned.estimate
        return estimate if self.rehearsed is None else replace(estimate, profile=self.rehearsed.profile)

    @property
    def exit_code(self) -> int:
        """The exit code of a command that shows the preview."""
        return 0 if self.verdict.fits else DoesNotFitError.exit_code

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the numbers, a sentence each."""
        left_out = () if self.rehearsed else (f"dry run {NOT_REHEARSED}",)
        random_base = (RANDOM_BASE,) if self.planned.config.has_random_base else ()
        return (*random_base, *left_out, *self.verdict.notes, *(self.data.notes if self.data else ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the preview as a record."""
        return {
            "estimate": self.planned.estimate.as_dict(),
            "dry_run": self.rehearsed and self.rehearsed.as_dict(),
            "config": self.planned.config.model_dump(mode="json"),
            "plan": self.planned.plan.as_dict(),
            "fits": self.verdict.fits,
            "notes": list(self.notes),
        } | ({"twin": self.twin.as_dict()} if self.twin else {})


def preview(config: RunConfig, *, here: bool, data: bool = True, twin: bool = False) -> Preview:
    """Plan a run, check its data, and rehearse every distinct rank.

    Args:
        config: what to run.
        here: plan with ``plan_anywhere``; False plans with ``plan_for_gpu``.
        data: check the data of ``config``; False if batches come from elsewhere.
        twin: also train a tiny twin of the plan on real processes and compare it with one process.

    Raises:
        ConfigError, DataError, WeightsError, PlanError: if the request cannot be met.
    """
    check_initial_weights(config)
    planned = plan_anywhere(config) if here else plan_for_gpu(config)
    checked = check_data(planned.config.data, planned.config.spec) if data else None
    rehearsed = rehearse_plan(planned.config, planned.plan)
    if not twin:
        return Preview(planned, rehearsed, data=checked)
    from llama_core.rehearsal.twin import twin as train_twin

    return Preview(planned, rehearsed, train_twin(planned.config, planned.plan), checked)
