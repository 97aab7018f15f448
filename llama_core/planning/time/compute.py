"""The time one device computes on one microbatch of a pipeline stage, and on an update, without communication."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from llama_core.config.hardware import DeviceSpec
from llama_core.config.run import RecomputeMode
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.time.kernels import NO_TIME, Pass, ProgramTime, Rates
from llama_core.planning.work import Work

MODEL_SHAPES = 0.9
"""Rate of a model's products over that of the best shape, which ``DeviceSpec.matmul_share`` gives.

720 over 794 TFLOP/s on H100: SemiAnalysis 2024, *MI300X vs H100 vs H200 Benchmark Part 1: Training*.
"""
MEMORY_SHARE = 0.85
"""Share of memory bandwidth that kernels are assumed to reach: about 0.9 in long streams, less in others."""


class StageCompute:
    """The times of a plan's layers, embedding and head on one rank, for one microbatch passing a stage.

    With a document mask no score is skipped; otherwise the scores after each token are, as if every row were one
    document. Without documents torch may have a faster kernel.

    Args:
        work: the model, the plan and the sequences.
        device: the device that computes.
    """

    def __init__(self, work: Work, device: DeviceSpec) -> None:
        self.work = replace(work, on_cuda=True)
        self.device = device
        peak = device.fp32_flops if work.precision == "fp32" else device.bf16_flops
        # cuDNN has no kernel for fp32, and blocks around a ring need the flash kernel's sums
        is_causal_row = work.documents == "none" and work.plan.cp == 1 and work.itemsize < FP32_BYTES
        attention_share = device.causal_share if is_causal_row else device.attention_share
        of_peak = device.matmul_share * MODEL_SHAPES
        self.rates = Rates(
            product_flops=peak * of_peak,
            fp8_flops=device.fp8_flops * of_peak if work.precision == "fp8" else None,
            attention_flops=peak * attention_share,
            visible_share=1.0 if work.documents == "mask" else 0.5,
            bandwidth=device.memory_bandwidth * MEMORY_SHARE,
            compiles=work.plan.compile,
            accumulates=not work.plan.uses_fully_shard,
        )
        self.casts_once = work.setting.is_narrow and work.plan.keeps_cast_weights
        """Whether weights are cast when they are updated, not at every use."""

    def stage(self, layers: Sequence[Passes], modes: Sequence[RecomputeMode], *, is_first: bool, is_last: bool) -> Pass:
        """Return the time of a stage.

        Args:
            layers: the forward and the backward of each of its layers.
            modes: the recomputation of each.
            is_first: whether it holds the embedding.
            is_last: whether it holds the head.
        """
        total = NO_TIME
        for (layer, mode), count in Counter(zip(layers, modes, strict=True)).items():
            total = total.plus(self.layer(mode, layer).times(count))
        if is_first:
            total = total.plus(self.embedding())
        return total.plus(self.head()) if is_last else total

    def layer(self, mode: RecomputeMode, layer: Passes | None = None) -> Pass:
        """Return the time of a layer, by default the last, with recomputation in its backward."""
        return ProgramTime(layer or self.work.layers[-1], self.rates).seconds(mode)

    def attention(self) -> Pass:
        """Return the time of one layer's attention: its scores and their products with the values."""
        return ProgramTime(self.work.layers[-1], self.rates).attention()

    def embedding(self) -> Pass:
        """Return the time to look up every token, and to add their gradients to the table's."""
        return ProgramTime(self.work.embedding, self.rates).seconds()

    def head(self) -> Pass:
        """Return the time of the final norm, the last product and the loss, which computes its gradients too."""
        parts = (self.work.final_norm, self.work.head)
        norm, loss = (ProgramTime(part, self.rates).seconds() for part in parts)
        return norm.plus(loss)

    def optimizer(self, num_parameters: float) -> float:
        """Return the time to clip and update ``num_parameters``, and to cast them once."""
        # the norm reads the gradient; clipping reads and writes it
        clipping = (1 + 2) * FP32_BYTES
        seconds = self.copying((clipping + self.work.optimizer.moved_bytes) * num_parameters)
        if self.casts_once:
            seconds += self.copying((FP32_BYTES + self.work.itemsize) * num_parameters)
        return seconds

    def copying(self, num_bytes: float) -> float:
        """Return the time to read or write ``num_bytes``."""
        return num_bytes / self.rates.bandwidth
