"""The blocks that are compiled: a configuration and the arguments of a plan each."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.shapes import llama3
from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan

TOKENS = 8192
"""Of the row that a block is compiled for."""
NUM_DOCUMENTS = 8
"""Of that row."""
_ADAPTERS = {"strategy": "lora", "lora": {"lora_rank": 16, "target_modules": ["all-linear"]}}
_OVER_NF4 = {"strategy": "lora", "lora": {**_ADAPTERS["lora"], "base": "nf4"}}  # type: ignore[dict-item]
_EXPERTS = {"strategy": "moe", "moe": {"num_experts": 8}}


def _first_layers(model: str, num_layers: int) -> dict[str, Any]:
    """Return a model of the registry with few layers: those between the first and the last have neither's ends."""
    return {"model": model, "architecture": {"num_layers": num_layers}}


@dataclass(frozen=True)
class Kind:
    """Blocks of a model."""

    name: str
    """How the table calls it."""
    model: dict[str, Any]
    """The top of its configuration."""
    sections: dict[str, Any] = field(default_factory=dict)
    """Further sections of it."""
    precision: str = "bf16"
    plan: dict[str, Any] = field(default_factory=dict)
    """Arguments of the plan besides compilation."""
    layers: tuple[int, ...] = (1,)
    """Those whose blocks are compiled."""

    def config(self) -> RunConfig:
        """Return the configuration of a run on a GPU that trains on packed documents."""
        return RunConfig.from_mapping(
            {
                **self.model,
                "training": {"seq_len": TOKENS, "batch_size": 1, "precision": self.precision},
                "data": {"document_mask": True},
                "launch": {"device": "cuda"},
                **self.sections,
            }
        )

    def parallel_plan(self) -> ParallelPlan:
        """Return the plan of one rank that compiles its blocks."""
        return ParallelPlan(compile=True, **self.plan)


_KINDS = (
    Kind("1B", llama3("1B")),
    Kind("1B, selective recomputation", llama3("1B"), plan={"recompute": "selective"}),
    Kind("1B, fp8", llama3("1B"), precision="fp8"),
    Kind("gemma3_1b, with a window", _first_layers("gemma3_1b", 3)),
    Kind("gpt_oss_20b", _first_layers("gpt_oss_20b", 4)),
    Kind("1B with 8 experts", llama3("1B"), _EXPERTS),
    Kind("moonlight_16b_a3b", _first_layers("moonlight_16b_a3b", 4), layers=(0, 1)),  # only the others have experts
    Kind("8B, LoRA", llama3("8B"), _ADAPTERS),
    Kind("8B, QLoRA", llama3("8B"), _OVER_NF4),
)
KINDS = {kind.name: kind for kind in _KINDS}
