"""``LlamaTrainingOrchestrator``: one run as a Python object."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.chain import environment, steps
from llama_core.chain.chain import run_chain
from llama_core.chain.console import say
from llama_core.chain.planned import plan_for_gpu, plan_run
from llama_core.chain.prepare import prepare_loader_run
from llama_core.chain.preview import preview
from llama_core.config.run import RunConfig, config_keys
from llama_core.errors import ConfigError, did_you_mean
from llama_core.planning.memory.peaks import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import TrainingSummary
from llama_core.units import GB
from training_infra.config import TrainingStrategy
from training_infra.local import local_steps

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


class LlamaTrainingOrchestrator:
    """One run: configure it, look at what it needs, rehearse it, and launch it.

    Args:
        model_variant: a model that ``training-infra models`` lists, or the path of a Hugging Face folder.
        training_strategy: the strategy or its name.
        num_gpus: devices in all; without CUDA, one device is the CPU.
        **settings: see ``configure``.

    Raises:
        ConfigError: naming every setting that is wrong.
    """

    def __init__(
        self,
        model_variant: str,
        training_strategy: TrainingStrategy | str = "standard",
        num_gpus: int = 1,
        **settings: Any,
    ) -> None:
        strategy = TrainingStrategy(training_strategy) if isinstance(training_strategy, str) else training_strategy
        own = {strategy.name: dict(strategy.parameters)} if strategy.parameters else {}
        self.config = RunConfig.from_mapping(
            {"model": model_variant, "strategy": strategy.name, "parallel": {"gpus": num_gpus}} | own
        )
        self.run_dir: Path | None = None
        """Where the run was launched; None before that."""
        self.configure(**settings)

    def configure(self, **settings: Any) -> None:
        """Change settings by the last word of their key: ``configure(batch_size=16, learning_rate=1e-4)``.

        A word that several sections share means the first, in the order of ``RunConfig``: ``steps`` is
        ``training.steps``.

        Raises:
            ConfigError: if there is no such setting, or its value does not do.
        """
        mapping = self.config.model_dump()
        for name, value in settings.items():
            *sections, key = _key(name)
            target = mapping
            for section in sections:
                target = target[section]
            target[key] = value
        self.config = RunConfig.from_mapping(mapping)

    def print_configuration(self) -> None:
        """Print the model, the settings that were resolved from this machine, the plan and its memory."""
        planned = plan_run(self.config)
        say("model", f"{self.config.model}, {self.config.spec.num_parameters:,} parameters")
        for choice in planned.choices:
            say("default", choice)
        say("plan", planned.plan.summary())
        for note in planned.plan.notes:
            say("note", note)
        say("estimate", planned.estimate.summary())

    def estimate_memory(self) -> MemoryEstimate:
        """Return the bytes of a rank by category and phase, by arithmetic."""
        return plan_run(self.config).estimate

    def dry_run(self) -> "DryRunResult | None":
        """Return the bytes of every rank counted on fake tensors: no device is needed. None under DeepSpeed."""
        return preview(self.config, here=True, data=False).rehearsed

    def launch_training(
        self,
        train_dataloader: Iterable[Any] | None = None,
        val_dataloader: Iterable[Any] | None = None,
        *,
        run_dir: Path | str | None = None,
        resume: bool = False,
    ) -> TrainingSummary:
        """Train, and write the run's report.

        With dataloaders the training happens in this process; without them a job trains on ``data.source``.

        Args:
            train_dataloader: an iterable of global batches: tensors of tokens [B, S], pairs of inputs and targets, or
                mappings with ``input_ids``.
            val_dataloader: held-out batches in the same forms.
            run_dir: where the run is kept; by default ``runs/<model>-<date>-<fingerprint>``.
            resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.

        Raises:
            TrainingInfraError: if the request is wrong or the run does not finish.
        """
        path = None if run_dir is None else Path(run_dir)
        own = local_steps(self.config, path, resume=resume)
        if train_dataloader is not None:
            loaders = (train_dataloader, val_dataloader)
            own = replace(
                own,
                prepare=lambda: prepare_loader_run(self.config, *loaders, run_dir=path, resume=resume),
                submit=lambda run: None,
                train=lambda run: steps.train_in_process(run, *loaders),
            )

        def prepare() -> RunDirectory:
            run = own.prepare()
            self.run_dir = run.path
            return run

        return steps.training_summary(run_chain(replace(own, prepare=prepare)))


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


def _key(name: str) -> list[str]:
    """Return the sections and the key that a setting's short name means."""
    for dotted in config_keys():
        *sections, key = dotted.split(".")
        if key == name:
            return [*sections, key]
    names = {dotted.rpartition(".")[2] for dotted in config_keys()}
    raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, names)}")
