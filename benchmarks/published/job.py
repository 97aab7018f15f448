"""A published training job, as far as its memory is concerned."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.published.architectures import Architecture
from benchmarks.published.traits import Framework

Recompute = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "v"]


@dataclass(frozen=True)
class Job:
    """One training job as far as its memory is concerned."""

    architecture: Architecture
    framework: Framework
    seq_len: int
    micro_batch: int
    num_microbatches: int
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    schedule: Schedule = "1f1b"
    """Whether all forwards come first, backwards as early as they can, or stages are placed in a V."""
    num_chunks: int = 1
    """Stages on one rank of a pipeline."""
    dp_shard: int = 1
    dp_replicate: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: int = 3
    weight_bytes: float = 4
    """Per parameter, of what is kept between steps."""
    frozen: bool = False
    """Whether only adapters are trained."""
    quantised: bool = False
    """Whether frozen matrices are; the embedding is not."""
    adapter_parameters: int = 0
    moment_bytes: float = 8
    recompute: Recompute = "none"
    recompute_every: int = 1
    """Recompute one layer of so many."""
    offloads_activations: bool = False
    steps_in_backward: bool = False
    """Whether a gradient is used and freed as soon as it is complete."""
    reshards: bool = True
    """Whether gathered weights are dropped after a layer's forward."""
    compiles: bool = False
    float8: bool = False
