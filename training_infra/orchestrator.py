"""``LlamaTrainingOrchestrator``: one run as a Python object."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.chain import environment, steps
from llama_core.chain.chain import run_chain
from llama_core.chain.console import say
from llama_core.chain.loader import refuse_started_ranks, run_loader_chain
from llama_core.chain.planned import plan_anywhere, plan_for_gpu
from llama_core.chain.preview import preview
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.peaks import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import TrainingSummary
from llama_core.units import GB
from training_infra.config import TrainingConfig, TrainingStrategy, with_settings
from training_infra.distributed.config import DistributedConfig
from training_infra.local import local_steps
from training_infra.spelling import in_python, python_spelling

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


Loader = Iterable[Any] | Callable[[], Iterable[Any]]
"""Batches, or a function that makes an iterable of them."""


class LlamaTrainingOrchestrator:
    """One run: configure it, look at what it needs, rehearse it, and launch it.

    Args:
        model_variant: a model that ``training-infra models`` lists, or the path of a Hugging Face folder.
        training_strategy: the strategy or its name.
        num_gpus: devices in all; without CUDA, one device is the CPU.
        auto_configure: search the fastest plan that fits for what is left open; without it, tensor, pipeline and
            context parallelism that are not asked for are not used.
        training_config: how it is trained.
        distributed_config: how the work is divided, the number of devices included; in place of ``num_gpus``.
        **settings: see ``configure``.

    Raises:
        ConfigError: naming every setting that is wrong.
    """

    @python_spelling()
    def __init__(
        self,
        model_variant: str,
        training_strategy: TrainingStrategy | str = "standard",
        num_gpus: int = 1,
        *,
        auto_configure: bool = True,
        training_config: TrainingConfig | None = None,
        distributed_config: DistributedConfig | None = None,
        **settings: Any,
    ) -> None:
        strategy = TrainingStrategy(training_strategy) if isinstance(training_strategy, str) else training_strategy
        own = {strategy.name: dict(strategy.parameters)} if strategy.parameters else {}
        self.auto_configure = auto_configure
        self.config = RunConfig.from_mapping(
            {"model": model_variant, "strategy": strategy.name, "parallel": self._divided({"gpus": num_gpus})} | own
        )
        self.run_dir: Path | None = None
        """Where the run was launched; None before that."""
        if distributed_config is not None:
            self.distributed_config = distributed_config
        self.configure(**(dict(training_config.settings if training_config else {}) | settings))

    @python_spelling()
    def configure(self, **settings: Any) -> None:
        """Change settings by the last word of their key: ``configure(batch_size=16, learning_rate=1e-4)``.

        A word that several sections share means the first, in the order of ``RunConfig``: ``steps`` is
        ``training.steps``.

        Raises:
            ConfigError: if there is no such setting, or its value does not do.
        """
        self.config = with_settings(self.config, settings)

    @property
    def distributed_config(self) -> DistributedConfig:
        """How the work is divided. Assigning what ``ConfigurationFactory`` makes replaces all of it, ``gpus`` too.

        Raises:
            ConfigError: if what is assigned does not go with the other settings.
        """
        return self.config.parallel

    @distributed_config.setter
    @python_spelling()
    def distributed_config(self, asked: DistributedConfig) -> None:
        if not isinstance(asked, DistributedConfig):
            raise ConfigError(
                f"distributed_config is what a method of ConfigurationFactory returns, not {type(asked).__name__!r}"
            )
        parallel = self._divided(asked.model_dump())
        self.config = RunConfig.from_mapping(self.config.model_dump() | {"parallel": parallel})

    def _divided(self, parallel: dict[str, Any]) -> dict[str, Any]:
        """Return a request for devices; without auto-configuration, degrees that it leaves open are 1."""
        if self.auto_configure:
            return parallel
        given = {key: value for key, value in parallel.items() if value != "auto"}
        return parallel | dict.fromkeys(("tp", "pp", "cp"), 1) | given

    @python_spelling()
    def print_configuration(self) -> None:
        """Print the model, the settings that were resolved, the plan and its memory.

        It is planned for this machine or, where that has not the devices, for GPUs that need not be here.
        """
        planned = plan_anywhere(self.config)
        say("model", f"{self.config.model}, {self.config.spec.num_parameters:,} parameters")
        for choice in planned.choices:
            say("default", in_python(choice))
        say("plan", planned.plan.summary())
        for note in planned.plan.notes:
            say("note", in_python(note))
        say("estimate", planned.estimate.summary())
        for note in planned.estimate.notes:
            say("note", in_python(note))

    @python_spelling()
    def estimate_memory(self) -> MemoryEstimate:
        """Return the bytes of a rank by category and phase, by arithmetic."""
        return plan_anywhere(self.config).estimate

    @python_spelling()
    def dry_run(self) -> "DryRunResult | None":
        """Return the bytes of every rank counted on fake tensors: no device is needed. None under DeepSpeed."""
        return preview(self.config, here=True, data=False).rehearsed

    @python_spelling()
    def launch_training(
        self,
        train_dataloader: Loader | None = None,
        val_dataloader: Loader | None = None,
        *,
        run_dir: Path | str | None = None,
        resume: bool = False,
    ) -> TrainingSummary:
        """Train, and write the run's report.

        With dataloaders one device trains in this process. Several train as the ranks that torchrun or srun has
        started, if this is one of them; else ranks are started on this machine, which the dataloader is sent to.
        Without dataloaders a job trains on ``data.source``.

        Args:
            train_dataloader: an iterable of global batches, or a function that makes one: tensors of tokens [B, S],
                pairs of inputs and targets, or mappings with ``input_ids``. Ranks divide the rows of every batch.
            val_dataloader: held-out batches in the same forms.
            run_dir: where the run is kept; by default ``runs/<model>-<date>-<fingerprint>``.
            resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.

        Raises:
            TrainingInfraError: if the request is wrong or the run does not finish.
        """
        path = None if run_dir is None else Path(run_dir)
        own = local_steps(self.config, path, resume=resume)

        def validate(run: RunDirectory) -> EnvironmentReport:
            self.run_dir = run.path  # of a run that fails too
            return steps.validate(run)

        own = replace(own, validate=validate)
        if train_dataloader is not None:
            run = run_loader_chain(self.config, train_dataloader, val_dataloader, own, path, resume=resume)
        else:
            refuse_started_ranks()
            run = run_chain(own)
        self.run_dir = run.path
        return steps.training_summary(run)


def quick_start(
    model_variant: str, strategy: TrainingStrategy | str = "standard", num_gpus: int = 1, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for ``model_variant`` with everything else chosen for it.

    Args:
        model_variant: a model that ``training-infra models`` lists, or the path of a Hugging Face folder.
        strategy: the strategy or its name.
        num_gpus: devices in all.
        **settings: as ``LlamaTrainingOrchestrator.configure``.
    """
    return LlamaTrainingOrchestrator(model_variant, strategy, num_gpus, **settings)


def create_tiny_llama3_orchestrator(
    size: str = "50m", num_gpus: int = 1, strategy: TrainingStrategy | str = "standard", **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for the Llama 3 of ``size`` 50m or 150m; the rest as ``quick_start``."""
    return LlamaTrainingOrchestrator(f"tiny_llama3_{size}", strategy, num_gpus, **settings)


def create_llama3_8b_orchestrator(
    num_gpus: int = 1, strategy: TrainingStrategy | str = "standard", *, instruct: bool = False, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3 8B, or its instruct variant; the rest as ``quick_start``."""
    return LlamaTrainingOrchestrator(_llama3("8b", instruct), strategy, num_gpus, **settings)


def create_llama3_70b_orchestrator(
    num_gpus: int = 8, strategy: TrainingStrategy | str = "standard", *, instruct: bool = False, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3 70B, or its instruct variant; the rest as ``quick_start``."""
    return LlamaTrainingOrchestrator(_llama3("70b", instruct), strategy, num_gpus, **settings)


def create_llama3_405b_orchestrator(
    num_gpus: int = 64, strategy: TrainingStrategy | str = "standard", *, instruct: bool = False, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3.1 405B, trained on conversations with ``instruct``; the rest as above."""
    own = {"instruct": True} if instruct else {}
    return LlamaTrainingOrchestrator("llama3_405b", strategy, num_gpus, **(own | settings))


def _llama3(size: str, instruct: bool) -> str:
    return f"llama3_{size}_instruct" if instruct else f"llama3_{size}"


@python_spelling()
def estimate_requirements(
    model_variant: str,
    batch_size: int = 8,
    sequence_length: int | None = None,
    num_gpus: int = 1,
    strategy: TrainingStrategy | str = "standard",
    **settings: Any,
) -> dict[str, Any]:
    """Return what training needs, by arithmetic.

    Args:
        model_variant: a model that ``training-infra models`` lists, or the path of a Hugging Face folder.
        batch_size: sequences per optimizer step over all devices.
        sequence_length: tokens per sequence; by default what the model was made for.
        num_gpus: GPUs in all.
        strategy: the strategy or its name.
        **settings: as ``LlamaTrainingOrchestrator.configure``.

    Returns:
        ``memory_per_gpu_gb`` (GB of 1e9 bytes at the peak of the GPU that holds most), ``min_memory_per_gpu_gb`` (of
        the one that holds least), ``fits``, ``device``, ``plan`` (a sentence), ``recommendations`` (sentences),
        ``categories`` (bytes at the peak by category) and ``ranks`` (the same of every rank of a pipeline).
    """
    orchestrator = LlamaTrainingOrchestrator(
        model_variant, strategy, num_gpus, batch_size=batch_size, seq_len=sequence_length, **settings
    )
    planned = plan_for_gpu(orchestrator.config)
    estimate = planned.estimate
    return {
        "memory_per_gpu_gb": estimate.profile.peak_bytes / GB,
        "min_memory_per_gpu_gb": min(rank.peak_bytes for rank in estimate.ranks) / GB,
        "plan": planned.plan.summary(),
        "fits": estimate.fits,
        "device": estimate.device,
        "recommendations": list(estimate.notes),
        "categories": dict(estimate.profile.peak),
        "ranks": [dict(rank.peak) for rank in estimate.ranks],
    }


def validate_environment() -> dict[str, Any]:
    """Return what this machine has and lacks: ``errors``, ``warnings`` and ``facts``."""
    return asdict(environment.validate_environment())
