"""Requests for devices by kind of parallelism: the ``parallel`` section of a run's configuration."""

from typing import Any

from llama_core.config.run import RunConfig
from llama_core.config.settings import ParallelConfig as DistributedConfig
from training_infra.spelling import python_spelling

__all__ = ["ConfigurationFactory", "DistributedConfig"]

MADE_BY_FACTORY = "make it with a method of ConfigurationFactory"
"""What to do about an argument that is no ``DistributedConfig``."""


class ConfigurationFactory:
    """Makes values for ``distributed_config``. The planner chooses the settings that a method leaves open.

    Every method takes further keys of the section ``parallel``, such as ``recompute="full"``, and raises ConfigError
    with every invalid value.
    """

    @staticmethod
    def create_data_parallel_config(
        num_gpus: int, *, zero_stage: int | None = None, **others: Any
    ) -> DistributedConfig:
        """Divide every batch over ``num_gpus`` devices.

        Args:
            num_gpus: devices in all.
            zero_stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights.
            **others: further keys.
        """
        return _config(gpus=num_gpus, tp=1, pp=1, cp=1, zero_stage=zero_stage, **others)

    @staticmethod
    def create_tensor_parallel_config(num_gpus: int, **others: Any) -> DistributedConfig:
        """Divide every matrix over ``num_gpus`` devices."""
        return _config(**({"gpus": num_gpus, "tp": num_gpus, "pp": 1, "cp": 1} | others))

    @staticmethod
    def create_pipeline_parallel_config(
        pipeline_stages: int,
        microbatch_size: int | None = None,
        schedule: str = "auto",
        *,
        num_gpus: int | None = None,
        **others: Any,
    ) -> DistributedConfig:
        """Divide the layers over ``pipeline_stages`` devices.

        Args:
            pipeline_stages: devices of the pipeline.
            microbatch_size: sequences per microbatch.
            schedule: order of forwards and backwards: gpipe, 1f1b, interleaved, chimera and others.
            num_gpus: devices in all; more than ``pipeline_stages`` make several pipelines, which divide every batch.
            **others: further keys.
        """
        gpus = pipeline_stages if num_gpus is None else num_gpus
        asked = {"gpus": gpus, "tp": 1, "pp": pipeline_stages, "cp": 1}
        return _config(**(asked | {"microbatch_size": microbatch_size, "schedule": schedule} | others))

    @staticmethod
    def create_hybrid_parallel_config(
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        *,
        context_parallel_size: int = 1,
        use_zero: bool = True,
        zero_stage: int | None = None,
        **others: Any,
    ) -> DistributedConfig:
        """Combine kinds of parallelism; the number of devices is the product of the sizes.

        Args:
            tensor_parallel_size: devices that divide every matrix.
            pipeline_parallel_size: devices that divide the layers.
            data_parallel_size: devices, or groups of them, that divide every batch.
            context_parallel_size: devices that divide every sequence.
            use_zero: whether data-parallel devices may shard states.
            zero_stage: what they shard, as for ``create_data_parallel_config``; None leaves it open.
            **others: further keys.
        """
        inner = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size, "cp": context_parallel_size}
        gpus = tensor_parallel_size * pipeline_parallel_size * data_parallel_size * context_parallel_size
        return _config(**({"gpus": gpus} | inner | {"zero_stage": zero_stage if use_zero else 0} | others))


@python_spelling()
def _config(**keys: Any) -> DistributedConfig:
    return RunConfig.from_mapping({"parallel": keys}).parallel
