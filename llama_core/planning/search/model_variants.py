"""The model variants, each with the fewest GPUs that can train it."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import ModelSpec, model_names, model_spec
from llama_core.config.run import RunConfig
from llama_core.planning.search.least_memory import Least, least_devices


@dataclass(frozen=True)
class ModelVariant:
    """A model and the fewest GPUs that can train it, at its usual sequence length and with the smallest microbatch."""

    spec: ModelSpec
    full: Least | None
    """The fewest GPUs that can train every weight; None if none up to ``MAX_DEVICES`` can."""
    lora: Least | None
    """The fewest GPUs that can train adapters, and all experts of a mixture."""
    qlora: Least | None
    """The fewest GPUs that can train adapters over matrices in NF4."""

    def as_dict(self) -> dict[str, Any]:
        """Return the variant as a record."""
        found = {"full": self.full, "lora": self.lora, "qlora": self.qlora}
        return (
            asdict(self.spec)
            | {"moe": self.spec.moe and self.spec.moe.model_dump(), "num_parameters": self.spec.num_parameters}
            | {f"min_gpus_{name}": least and least.gpus for name, least in found.items()}
            | {f"bytes_per_gpu_{name}": least and least.peak_bytes for name, least in found.items()}
        )


def list_variants(gpu_type: str) -> list[ModelVariant]:
    """Return every variant, in the registry's order.

    Raises:
        ConfigError: if there is no such GPU.
    """
    gpu_spec(gpu_type)
    return [ModelVariant(model_spec(name), *_least(name, gpu_type)) for name in model_names()]


def _least(name: str, gpu_type: str) -> tuple[Least | None, ...]:
    weights = name.removesuffix("_instruct")
    same = weights if weights in model_names() else name
    whole, adapters = ("moe", "hybrid") if model_spec(same).moe else ("standard", "lora")
    overrides = (f"strategy={whole}",), (f"strategy={adapters}",), (f"strategy={adapters}", "lora.base=nf4")
    return tuple(_with(same, gpu_type, *chosen) for chosen in overrides)


@cache
def _with(name: str, gpu_type: str, *overrides: str) -> Least | None:
    launch = {"device": "cuda", "gpu_type": gpu_type}
    request = {"model": name, "training": {"precision": "bf16"}, "launch": launch}
    return least_devices(RunConfig.from_mapping(request, overrides), gpu_spec(gpu_type))
