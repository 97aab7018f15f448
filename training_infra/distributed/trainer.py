"""Trainers that divide the work over devices."""

from typing import Literal, get_args

from llama_core.errors import ConfigError, did_you_mean
from training_infra.config import TrainingConfig
from training_infra.distributed.config import DistributedConfig
from training_infra.models.llama import ParallelLlama
from training_infra.trainer import Trainer

TrainerType = Literal["adaptive", "standard"]


def create_distributed_trainer(
    model: ParallelLlama,
    config: TrainingConfig | None = None,
    distributed_config: DistributedConfig | None = None,
    trainer_type: TrainerType = "adaptive",
) -> Trainer:
    """Return a trainer of ``model``.

    Args:
        model: what a function of ``training_infra.models.llama`` returned.
        config: how it is trained.
        distributed_config: how the work is divided; by default as the model was made to be.
        trainer_type: adaptive searches the fastest plan that fits for what the configuration leaves open; standard
            takes it as given: tensor, pipeline and context parallelism that it does not name are not used.

    Raises:
        ConfigError: naming every setting that is wrong, or that the model and the configurations disagree in.
    """
    known = get_args(TrainerType)
    if trainer_type not in known:
        nearest = did_you_mean(trainer_type, known)
        raise ConfigError(f"unknown trainer_type {trainer_type!r}; choose one of {', '.join(known)}{nearest}")
    return Trainer(model, config, distributed_config, auto_configure=trainer_type == "adaptive")
