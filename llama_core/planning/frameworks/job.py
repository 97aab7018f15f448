"""A training job of some framework: all that affects its memory and the time of its step."""

from dataclasses import dataclass
from typing import Literal

from llama_core.planning.frameworks.architectures import Architecture
from llama_core.planning.frameworks.traits import Framework

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "v"]


@dataclass(frozen=True)
class Job:
    """One training job: all that affects its memory and the time of its step."""

    architecture: Architecture
    framework: Framework
    seq_len: int
    micro_batch: int
    num_microbatches: int
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    schedule: Schedule = "1f1b"
    """gpipe runs all forwards first, 1f1b each backward as early as possible; v places the stages in a V."""
    num_chunks: int = 1
    """Stages per rank of a pipeline."""
    dp_shard: int = 1
    dp_replicate: int = 1
    cp: int = 1
    ep: int = 1
    """Ranks that divide the experts, among those that do not divide each of them."""
    expert_tp: int | None = None
    """Ranks that divide every expert; None: ``tp``."""
    zero_stage: int = 3
    weight_bytes: float = 4
    """Bytes per parameter of the weights kept between steps."""
    frozen: bool = False
    """Whether only adapters are trained."""
    quantised: bool = False
    """Whether frozen matrices are quantised; the embedding is not."""
    adapter_parameters: int = 0
    moment_bytes: float = 8
    recompute: Recompute = "none"
    recompute_every: int = 1
    """n: one layer in n is recomputed."""
    offloads_activations: bool = False
    steps_in_backward: bool = False
    """Whether a gradient is used and freed as soon as it is complete."""
    reshards: bool = True
    """Whether gathered weights are freed after a layer's forward."""
    offloads_states: bool = False
    """Whether weights, gradients and moments are in host memory between their uses."""
    compiles: bool = False
    float8: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tp * self.pp * self.cp * self.dp_shard * self.dp_replicate

    @property
    def expert_parts(self) -> int:
        """Ranks that together hold the experts of a layer once."""
        return self.ep * (self.tp if self.expert_tp is None else self.expert_tp)

    @property
    def global_batch(self) -> int:
        """Sequences of an optimizer step."""
        return self.micro_batch * self.num_microbatches * self.dp_shard * self.dp_replicate
