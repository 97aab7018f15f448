"""Llama models without weights until they are trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from training_infra.config import check_kind
from training_infra.distributed.config import MADE_BY_FACTORY, DistributedConfig
from training_infra.spelling import python_spelling

if TYPE_CHECKING:
    from llama_core.models.llama import Llama


class ParallelLlama:
    """A model and the way to divide it. It holds no weights and needs no device.

    Args:
        variant: a model listed by ``training-infra models``, or the path of a Hugging Face folder.
        tensor_parallel_size: devices that divide every matrix; None leaves it open.
        pipeline_parallel_size: devices that divide the layers; None leaves it open.
        use_flash_attention: whether torch chooses among its attention kernels; False selects the math kernel.
        use_checkpointing: recompute activations in the backward (True), keep them (False), or keep what fits (None).

    Raises:
        ConfigError: if there is no such model, or a size is out of range.
    """

    @python_spelling()
    def __init__(
        self,
        variant: str,
        *,
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        use_flash_attention: bool = True,
        use_checkpointing: bool | None = None,
    ) -> None:
        self.variant = variant
        self.asked: dict[str, Any] = {"tp": tensor_parallel_size, "pp": pipeline_parallel_size}
        if use_checkpointing is not None:
            self.asked["recompute"] = "full" if use_checkpointing else "none"
        if not use_flash_attention:
            self.asked["attention"] = "math"
        self.run_dir: Path | None = None
        """The run that trained it; None before training."""
        self.divided(None)

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return RunConfig.from_mapping({"model": self.variant}).spec

    @property
    def num_parameters(self) -> int:
        """Number of all parameters; a tied head counts once."""
        return self.spec.num_parameters

    def divided(self, config: DistributedConfig | None) -> DistributedConfig:
        """Return ``config`` with the sizes of this model; without one, a request for as many devices as they need.

        Raises:
            ConfigError: if the two disagree, or ``config`` is something else.
        """
        check_kind("distributed_config", config, DistributedConfig | None, MADE_BY_FACTORY)
        asked = {key: value for key, value in self.asked.items() if value is not None}
        if config is None:
            gpus = (asked.get("tp") or 1) * (asked.get("pp") or 1)
            parallel = {"gpus": gpus} | asked
        else:
            given = config.model_dump()
            names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
            problems = [
                f"{names[key]}={value} of the model, but {given[key]} in distributed_config; give both the same value"
                for key, value in asked.items()
                if key in names and given[key] not in {"auto", value}
            ]
            if problems:
                raise ConfigError(*problems)
            parallel = given | asked
        return RunConfig.from_mapping({"model": self.variant, "parallel": parallel}).parallel

    def module(self) -> "Llama":
        """Return the whole model as a torch module: on the meta device, or on the CPU with its trained weights."""
        from llama_core.training.stored_weights import whole_model

        return whole_model(self.spec, self.run_dir)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield the parameters of ``module``."""
        return self.module().named_parameters()

    def __repr__(self) -> str:
        weights = "no weights yet" if self.run_dir is None else f"trained in {self.run_dir}"
        return f"ParallelLlama({self.variant!r}, {self.num_parameters:,} parameters, {weights})"


def create_llama_7b_parallel(**options: Any) -> ParallelLlama:
    """Return Llama 2 7B; the options are those of ``ParallelLlama``."""
    return ParallelLlama("llama2_7b", **options)


def create_llama_13b_parallel(**options: Any) -> ParallelLlama:
    """Return Llama 2 13B; the options are those of ``ParallelLlama``."""
    return ParallelLlama("llama2_13b", **options)


def create_llama_70b_parallel(**options: Any) -> ParallelLlama:
    """Return Llama 2 70B; the options are those of ``ParallelLlama``."""
    return ParallelLlama("llama2_70b", **options)


def create_llama3_8b_parallel(**options: Any) -> ParallelLlama:
    """Return Llama 3 8B; the options are those of ``ParallelLlama``."""
    return ParallelLlama("llama3_8b", **options)


def create_llama3_70b_parallel(**options: Any) -> ParallelLlama:
    """Return Llama 3 70B; the options are those of ``ParallelLlama``."""
    return ParallelLlama("llama3_70b", **options)


def create_llama3_405b_parallel(**options: Any) -> ParallelLlama:
    """Return Llama 3.1 405B; the options are those of ``ParallelLlama``."""
    return ParallelLlama("llama3_405b", **options)


def create_tiny_llama3_parallel(size: str = "50m", **options: Any) -> ParallelLlama:
    """Return a small Llama 3 of ``size`` 50m or 150m; the options are those of ``ParallelLlama``."""
    return ParallelLlama(f"tiny_llama3_{size}", **options)
