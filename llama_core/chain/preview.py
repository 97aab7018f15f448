"""Plan and rehearse a run without a directory: writes only to caches, needs no device, trains nothing."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.chain.downloads import DOCUMENTS, INITIAL_WEIGHTS, resolve
from llama_core.chain.expected import expected_here
from llama_core.chain.planned import PlannedRun, plan_anywhere, plan_for_gpu, plan_run
from llama_core.chain.prepare import check_initial_weights, refuse_unfit_on_any_nodes
from llama_core.chain.steps import NOT_REHEARSED, rehearse_plan
from llama_core.config.run import RANDOM_BASE, RunConfig
from llama_core.data.check import DataCheck, check_data
from llama_core.errors import DoesNotFitError
from llama_core.launch.jobs.launcher import known_launchers, launcher_of
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.planning.time.cost import Cost
from llama_core.records.directory import RunDirectory
from llama_core.runs.continuing import new_run

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult
    from llama_core.rehearsal.parity import ParityResult


@dataclass(frozen=True)
class Preview:
    """The plan of a run, its dry run and the check of its data."""

    planned: PlannedRun
    rehearsed: "DryRunResult | None"
    """The dry run's result; None under DeepSpeed, which needs real ranks."""
    parity: "ParityResult | None" = None
    data: DataCheck | None = None
    """The check of the data's first records; None if they were not checked."""
    tokens: float | None = None
    """The tokens to train on, if they do not follow from the configuration."""
    of_hub: tuple[str, ...] = ()
    """A sentence for each thing of the Hub that is not here yet, or that something here takes the place of."""

    @cached_property
    def verdict(self) -> MemoryEstimate:
        """The dry run's bytes, or the estimate's if there was none, compared with the device."""
        estimate = self.planned.estimate
        return estimate if self.rehearsed is None else replace(estimate, profile=self.rehearsed.profile)

    @property
    def cost(self) -> Cost | None:
        """The time and the price of the run; None if its length or the time of a step is unknown."""
        return self.planned.cost(self.tokens, self.data)

    @property
    def expected(self) -> str:
        """How long a step and the run take on this machine's CPU; empty elsewhere. Times matrix products."""
        num_tokens, _ = self.planned.length(self.tokens, self.data)
        reference_tokens = self.planned.reference_tokens(self.data)
        return expected_here(self.planned.config, self.planned.plan, num_tokens, reference_tokens or 0)

    @property
    def exit_code(self) -> int:
        """The exit code of a command that shows the preview."""
        return 0 if self.verdict.fits else DoesNotFitError.exit_code

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the numbers, a sentence each."""
        left_out = () if self.rehearsed else (f"dry run {NOT_REHEARSED}",)
        random_base = (RANDOM_BASE,) if self.planned.config.has_random_base else ()
        return (*self.of_hub, *random_base, *left_out, *self.verdict.notes, *(self.data.notes if self.data else ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the preview as a record."""
        return {
            "estimate": self.planned.estimate.as_dict(),
            "dry_run": self.rehearsed and self.rehearsed.as_dict(),
            "config": self.planned.config.model_dump(mode="json"),
            "plan": self.planned.plan.as_dict(),
            "step": self.planned.step_record(),
            "rates": self.planned.device.as_dict(),
            "cost": self.cost and self.cost.as_dict(),
            "fits": self.verdict.fits,
            "notes": list(self.notes),
        } | ({"parity": self.parity.as_dict()} if self.parity else {})


def preview(
    config: RunConfig, *, here: bool, data: bool = True, parity: bool = False, tokens: float | None = None
) -> Preview:
    """Plan a run, check its data, and rehearse every distinct rank.

    Args:
        config: what to run.
        here: plan with ``plan_anywhere``; False plans with ``plan_for_gpu``.
        data: check the data of ``config``; False if batches come from elsewhere.
        parity: also train a tiny model under the plan on real processes, and compare it with one process.
        tokens: the tokens to train on; by default those of ``training.steps``, or else of the data.

    Raises:
        ConfigError, DataError, WeightsError, PlanError: if the request cannot be met.
    """
    asked = resolve(config)
    no_weights = asked.waits_for(INITIAL_WEIGHTS)
    no_data = asked.waits_for(*DOCUMENTS) if data else []
    if not no_weights:
        check_initial_weights(asked.config)
    planned = plan_anywhere(asked.config) if here else plan_for_gpu(asked.config)
    checked = None
    if data and not no_data:
        config = planned.config
        checked = check_data(config.data, config.spec, reads=config.objective.reads)
    rehearsed = rehearse_plan(planned.config, planned.plan)
    previewed = Preview(planned, rehearsed, data=checked, tokens=tokens, of_hub=(*asked.notes, *no_weights, *no_data))
    if not parity:
        return previewed
    from llama_core.rehearsal.parity import check_parity

    return replace(previewed, parity=check_parity(planned.config, planned.plan))


def preview_script(config: RunConfig, run_dir: Path | None = None) -> str:
    """Return the script that ``train`` would submit, without a run directory, a scheduler or a job.

    If the launcher of the run writes no scripts, the script is that of the first one that does.

    Raises:
        ConfigError, PlanError: if the request cannot be met.
        DoesNotFitError: if it does not fit and ``launch.force`` is not set.
    """
    own = launcher_of(config.launch.launcher)
    launcher = next(one for one in (own, *known_launchers()) if one.script is not None)
    planned = plan_run(config.with_overrides(f"launch.launcher={launcher.kind.name}"))
    refuse_unfit_on_any_nodes(planned)
    run = RunDirectory(new_run(planned.config, run_dir).path.absolute())
    folder = run.logs / "submitit" / "submission-00000"
    host_bytes = planned.estimate.host_bytes_to_ask_for
    assert launcher.script is not None
    return launcher.script(planned.config, run.name, folder, planned.plan.world_size, host_bytes, run_dir=run.path)
