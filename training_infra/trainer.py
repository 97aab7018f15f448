"""The base trainer: a model, its training configuration, and the division of the work."""

from pathlib import Path

from llama_core.records.measurements import TrainingSummary
from training_infra.config import TrainingConfig, check_kind
from training_infra.distributed.config import DistributedConfig
from training_infra.models.llama import ParallelLlama
from training_infra.orchestrator import LlamaTrainingOrchestrator, Loader
from training_infra.spelling import python_spelling


class Trainer:
    """Trains a model of ``training_infra.models.llama``.

    Args:
        model: the model.
        config: how it is trained; by default, with an orchestrator's defaults.
        distributed_config: how the work is divided; by default by the sizes of the model.
        auto_configure: as for ``LlamaTrainingOrchestrator``.

    Raises:
        ConfigError: if settings are wrong, or disagree with the model; the message names all of them.
    """

    @python_spelling()
    def __init__(
        self,
        model: ParallelLlama,
        config: TrainingConfig | None = None,
        distributed_config: DistributedConfig | None = None,
        *,
        auto_configure: bool = True,
    ) -> None:
        check_kind("model", model, ParallelLlama, "make one with ParallelLlama(...) of training_infra.models.llama")
        check_kind("config", config, TrainingConfig | None, "make it with TrainingConfig(...)")
        self.model = model
        self.orchestrator = LlamaTrainingOrchestrator(
            model.variant,
            training_config=config,
            distributed_config=model.divided(distributed_config),
            auto_configure=auto_configure,
        )

    def fit(
        self,
        train_dataloader: Loader | None = None,
        val_dataloader: Loader | None = None,
        *,
        run_dir: Path | str | None = None,
        resume: bool = False,
        allow_data_change: bool = False,
    ) -> TrainingSummary:
        """Train like ``LlamaTrainingOrchestrator.launch_training``; the model then has the run's weights."""
        summary = self.orchestrator.launch_training(
            train_dataloader, val_dataloader, run_dir=run_dir, resume=resume, allow_data_change=allow_data_change
        )
        self.model.run_dir = self.orchestrator.run_dir
        return summary
