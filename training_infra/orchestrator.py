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
from llama_core.planning.memory.verdict import MemoryEstimate
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
"""An iterable of batches, or a function that makes one."""


class LlamaTrainingOrchestrator:
    """One run: configure it, estimate it, rehearse it, and launch it.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face folder.
        training_strategy: the strategy or its name.
        num_gpus: devices in all; without CUDA, one device is the CPU.
        auto_configure: search for the fastest plan that fits wherever settings are left open; False uses no tensor,
            pipeline or context parallelism that is not asked for.
        training_config: how the model is trained.
        distributed_config: how the work is divided, with the number of devices; replaces ``num_gpus``.
        **settings: see ``configure``.

    Raises:
        ConfigError: if settings are wrong; the message names all of them.
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
        self.auto_configure = auto_configure
        self.config = RunConfig.from_mapping(
            {"model": model_variant, "parallel": self._divided({"gpus": num_gpus})} | strategy.as_keys()
        )
        self.run_dir: Path | None = None
        """The run's directory; None before launch."""
        if distributed_config is not None:
            self.distributed_config = distributed_config
        self.configure(**(dict(training_config.settings if training_config else {}) | settings))

    @python_spelling()
    def configure(self, **settings: Any) -> None:
        """Change settings by the last word of their key: ``configure(batch_size=16, learning_rate=1e-4)``.

        If several sections have the word, the first in ``RunConfig`` counts: ``steps`` is ``training.steps``.

        Raises:
            ConfigError: if there is no such setting, or its value is invalid.
        """
        self.config = with_settings(self.config, settings)

    @property
    def distributed_config(self) -> DistributedConfig:
        """How the work is divided. Assign a value of ``ConfigurationFactory`` to replace all of it, ``gpus`` too.

        Raises:
            ConfigError: if the assigned value contradicts the other settings.
        """
        return self.config.parallel

    @distributed_config.setter
    @python_spelling()
    def distributed_config(self, asked: DistributedConfig) -> None:
        if not isinstance(asked, DistributedConfig):
            raise ConfigError(
                f"distributed_config is a {type(asked).__name__!r}; make it with a method of ConfigurationFactory"
            )
        parallel = self._divided(asked.model_dump())
        self.config = RunConfig.from_mapping(self.config.model_dump() | {"parallel": parallel})

    def _divided(self, parallel: dict[str, Any]) -> dict[str, Any]:
        """Return a request for devices; without auto-configuration, degrees left open are 1."""
        if self.auto_configure:
            return parallel
        given = {key: value for key, value in parallel.items() if value != "auto"}
        return parallel | dict.fromkeys(("tp", "pp", "cp"), 1) | given

    @python_spelling()
    def print_configuration(self) -> None:
        """Print the model, the filled-in defaults, the plan and its memory.

        The plan is for this machine if it has the devices, otherwise for GPUs that need not be here.
        """
        planned = plan_anywhere(self.config)
        say("model", f"{self.config.model}, {self.config.spec.num_parameters:,} parameters")
        if self.config.spec.lora:
            say("weights", self.config.spec.parameter_counts)
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
        """Return the estimated bytes of a rank by category and phase."""
        return plan_anywhere(self.config).estimate

    @python_spelling()
    def dry_run(self) -> "DryRunResult | None":
        """Return the bytes of every rank, counted on fake tensors without a device; None under DeepSpeed."""
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

        With a dataloader, one device trains in this process. Several devices train on the ranks started by torchrun or
        srun, if this is one of them; otherwise this starts ranks on this machine and sends them the dataloader.
        Without a dataloader, a job trains on ``data.source``.

        Args:
            train_dataloader: an iterable of global batches, or a function that makes one: tensors of tokens [B, S],
                pairs of inputs and targets, or mappings with ``input_ids``. Ranks divide the rows of every batch.
            val_dataloader: held-out batches in the same forms.
            run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
            resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.

        Raises:
            TrainingInfraError: if the request is wrong or the run does not finish.
        """
        path = None if run_dir is None else Path(run_dir)
        own = local_steps(self.config, path, resume=resume)

        def validate(run: RunDirectory) -> EnvironmentReport:
            self.run_dir = run.path  # set early, for runs that fail
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
    """Return an orchestrator for ``model_variant`` with defaults for everything else.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face folder.
        strategy: the strategy or its name.
        num_gpus: devices in all.
        **settings: as for ``LlamaTrainingOrchestrator.configure``.
    """
    return LlamaTrainingOrchestrator(model_variant, strategy, num_gpus, **settings)


def create_tiny_llama3_orchestrator(
    size: str = "50m", num_gpus: int = 1, strategy: TrainingStrategy | str = "standard", **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for the Llama 3 of ``size`` 50m or 150m; other arguments as for ``quick_start``."""
    return LlamaTrainingOrchestrator(f"tiny_llama3_{size}", strategy, num_gpus, **settings)


def create_llama3_8b_orchestrator(
    num_gpus: int = 1, strategy: TrainingStrategy | str = "standard", *, instruct: bool = False, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3 8B or its instruct variant; other arguments as for ``quick_start``."""
    return LlamaTrainingOrchestrator(_llama3("8b", instruct), strategy, num_gpus, **settings)


def create_llama3_70b_orchestrator(
    num_gpus: int = 8, strategy: TrainingStrategy | str = "standard", *, instruct: bool = False, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3 70B or its instruct variant; other arguments as for ``quick_start``."""
    return LlamaTrainingOrchestrator(_llama3("70b", instruct), strategy, num_gpus, **settings)


def create_llama3_405b_orchestrator(
    num_gpus: int = 64, strategy: TrainingStrategy | str = "standard", *, instruct: bool = False, **settings: Any
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3.1 405B, also as an instruct model; other arguments as for ``quick_start``."""
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
    """Return the estimated memory of training.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face folder.
        batch_size: sequences per optimizer step over all devices.
        sequence_length: tokens per sequence; by default the model's usual length.
        num_gpus: GPUs in all.
        strategy: the strategy or its name.
        **settings: as for ``LlamaTrainingOrchestrator.configure``.

    Returns:
        ``memory_per_gpu_gb`` (peak of the fullest GPU, in GB of 1e9 bytes), ``min_memory_per_gpu_gb`` (peak of the
        emptiest), ``host_memory_per_node_gb``, ``fits``, ``device``, ``plan`` (a sentence), ``recommendations``
        (sentences), ``categories`` (bytes at the peak by category) and ``ranks`` (the same for every rank of a
        pipeline).
    """
    orchestrator = LlamaTrainingOrchestrator(
        model_variant, strategy, num_gpus, batch_size=batch_size, seq_len=sequence_length, **settings
    )
    planned = plan_for_gpu(orchestrator.config)
    estimate = planned.estimate
    return {
        "memory_per_gpu_gb": estimate.profile.peak_bytes / GB,
        "min_memory_per_gpu_gb": min(rank.peak_bytes for rank in estimate.ranks) / GB,
        "host_memory_per_node_gb": estimate.host_bytes_of_node / GB,
        "plan": planned.plan.summary(),
        "fits": estimate.fits,
        "device": estimate.device,
        "recommendations": list(estimate.notes),
        "categories": dict(estimate.profile.peak),
        "ranks": [dict(rank.peak) for rank in estimate.ranks],
    }


def validate_environment() -> dict[str, Any]:
    """Check this machine; return ``errors``, ``warnings``, ``facts``, and ``problems`` (of the facts, by name)."""
    return asdict(environment.validate_environment())
