"""The sizes of tp, pp, cp and ep to try: those a request sets, else all worth trying; and why others are refused."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from llama_core.config.hardware import GPUS_PER_NODE, DeviceSpec
from llama_core.config.models import ModelSpec
from llama_core.config.parameter_counts import active_parameters
from llama_core.config.run import RunConfig
from llama_core.planning.stages import cut_layers
from llama_core.planning.time.links import node_size
from llama_core.units import divisors

MIN_CONTEXT_TOKENS = 8192
"""Fewest tokens of a sequence per context-parallel rank: with fewer, the ring waits for its transfers."""
MAX_UNEVENNESS = 1.2
"""Stages count as even up to this ratio of the heaviest stage to the mean."""
MIN_LAYERS = 3
"""Fewest layers per pipeline rank: with fewer, embedding, head and bubble outweigh the savings."""
_NO_EXPERTS = "the model has no experts"

Axis = Literal["tp", "pp", "cp", "ep"]
AXES: tuple[Axis, ...] = ("tp", "pp", "cp", "ep")


class Degrees:
    """The sizes to try for one request.

    Args:
        config: the request.
        device: the device to plan for; None if it is not in the device table.
    """

    def __init__(self, config: RunConfig, device: DeviceSpec | None) -> None:
        self.config = config
        self.asked = config.parallel
        self.node_size = node_size(config, device.gpus_per_node if device else GPUS_PER_NODE)
        """Devices connected by a fast link."""
        self.data_parallel_only = self.asked.zero_backend == "deepspeed" or (
            self.asked.gradient_compression == "powersgd"
        )
        """Whether a requested option works with data parallelism only."""

    def sizes(self, axis: Axis) -> list[int]:
        """Return the size asked for, or those that divide the devices and are not refused."""
        asked: int | str = getattr(self.asked, axis)
        if isinstance(asked, int):
            return [asked]
        return [size for size in self._divisors() if self.refusal(axis, size) is None]

    def is_even(self, num_stages: int) -> bool:
        """Return whether the layers divide evenly into ``num_stages`` pipeline stages."""
        spec = self.config.spec
        return num_stages <= spec.num_layers and unevenness(spec, num_stages) <= MAX_UNEVENNESS

    def _divisors(self) -> list[int]:
        return divisors(self.asked.gpus)

    def refusals(self) -> Iterator[str]:
        """Yield why sizes of the open axes are not tried: for each reason, the smallest size it rules out."""
        for axis in AXES:
            if getattr(self.asked, axis) == "auto":
                reasons: dict[str, int] = {}
                for size in self._divisors():
                    reasons.setdefault(self.refusal(axis, size) or "", size)
                reasons.pop(_NO_EXPERTS, None)  # goes without saying
                for reason, size in reasons.items():
                    if reason:
                        yield f"{axis} {size}: {reason}"

    def refusal(self, axis: Axis, size: int) -> str | None:
        """Return why an open axis may not have this size; None if it may."""
        if size == 1:
            return None
        if self.data_parallel_only:
            return "DeepSpeed and PowerSGD work with data parallelism only"
        match axis:
            case "tp":
                return self._tp_refusal(size)
            case "pp":
                return self._pp_refusal(size)
            case "cp":
                return self._cp_refusal(size)
            case "ep":
                return self._ep_refusal(size)

    def _pp_refusal(self, size: int) -> str | None:
        if self.config.spec.num_layers // size < MIN_LAYERS:
            return f"fewer than {MIN_LAYERS} layers per rank"
        if not self.is_even(size):
            return f"uneven stages, the heaviest over {MAX_UNEVENNESS} times the mean"
        return None

    def _cp_refusal(self, size: int) -> str | None:
        seq_len = self.config.seq_len
        if seq_len // size < MIN_CONTEXT_TOKENS:
            return f"fewer than {MIN_CONTEXT_TOKENS} tokens per rank (sequence length {seq_len})"
        if seq_len % (2 * size):
            return f"sequence length {seq_len} is not a multiple of 2 x cp"
        return None

    def _ep_refusal(self, size: int) -> str | None:
        moe = self.config.spec.moe
        if moe is None:
            return _NO_EXPERTS
        return f"does not divide {moe.num_experts} experts" if moe.num_experts % size else None

    def _tp_refusal(self, size: int) -> str | None:
        if self.node_size % size:
            return f"crosses nodes of {self.node_size}"
        divided = self.config.spec.divided_by_tp(whole_experts=self.asked.expert_tp == 1)
        if self.asked.sequence_parallel:
            divided["tokens of a sequence"] = self.config.seq_len
        for what, count in divided.items():
            if count % size:
                return f"does not divide {count} {what}"
        return None


@lru_cache(maxsize=1024)
def unevenness(spec: ModelSpec, num_stages: int) -> float:
    """Return the ratio of the heaviest stage to the mean over ``num_stages`` stages, by parameters a token uses."""
    sizes = [active_parameters(spec, layer) for layer in range(spec.num_layers)]
    used = [sum(sizes[layers.start : layers.stop]) for layers in cut_layers(spec, num_stages)]
    used[0] += spec.embedding_parameters
    used[-1] += spec.embedding_parameters
    return max(used) * num_stages / sum(used)
