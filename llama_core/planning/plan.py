"""``ParallelPlan``: the answer to a run's request for devices."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from llama_core.config.run import RecomputeMode, literal_values
from llama_core.errors import PlanError


@dataclass(frozen=True)
class ParallelPlan:
    """How one optimizer step is divided over ranks and microbatches.

    Raises:
        PlanError: naming every size that is out of range.
    """

    dp_shard: int = 1
    """Data-parallel ranks that divide optimizer states, gradients and weights among them."""
    dp_replicate: int = 1
    """Copies of that group."""
    zero_stage: int = 0
    """What the sharding ranks divide: 1 optimizer states, 2 also gradients, 3 also weights."""
    microbatch_size: int = 1
    """Sequences per forward pass and rank."""
    num_microbatches: int = 1
    """Forward passes per rank and optimizer step."""
    recompute: RecomputeMode = "none"
    """What is computed again in the backward pass instead of being kept."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise PlanError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        for name in ("dp_shard", "dp_replicate", "microbatch_size", "num_microbatches"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} is not at least 1"
        if self.zero_stage not in range(4):
            yield f"zero_stage={self.zero_stage} is not one of 0, 1, 2, 3"
        if self.recompute not in literal_values(RecomputeMode):
            yield f"recompute={self.recompute!r} is not one of {', '.join(literal_values(RecomputeMode))}"

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_shard * self.dp_replicate

    @property
    def effective_zero_stage(self) -> int:
        """The ZeRO stage that takes effect: 0 where there is nobody to shard with."""
        return self.zero_stage if self.dp_shard > 1 else 0

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.world_size * self.microbatch_size * self.num_microbatches

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a flat record, with the sizes that follow from it for those who read it."""
        return asdict(self) | {
            "world_size": self.world_size,
            "effective_zero_stage": self.effective_zero_stage,
            "batch_size": self.batch_size,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the plan that ``as_dict`` recorded; keys that only follow from others are not read."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})
