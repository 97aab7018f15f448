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
    """Return a trainer for ``model``.

    Args:
        model: a model of ``training_infra.models.llama``.
        config: how it is trained.
        distributed_config: how the work is divided; by default by the sizes of the model.
        trainer_type: adaptive searches for the fastest plan that fits wherever the configuration leaves settings open;
            standard uses no tensor, pipeline or context parallelism that the configuration does not name.

    Raises:
        ConfigError: if settings are wrong, or disagree with the model; the message names all of them.
    """
    known = get_args(TrainerType)
    if trainer_type not in known:
        nearest = did_you_mean(trainer_type, known)
        raise ConfigError(f"unknown trainer_type {trainer_type!r}; choose one of {', '.join(known)}{nearest}")
    return Trainer(model, config, distributed_config, auto_configure=trainer_type == "adaptive")
