"""The time one device computes on one microbatch of a pipeline stage, and on an update, without communication."""

from collections.abc import Callable
from dataclasses import replace

from llama_core.config.hardware import DeviceSpec
from llama_core.config.run import RecomputeMode
from llama_core.optimizers.traits import Trained
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.time.kernels import NO_TIME, Pass, ProgramTime, Rates
from llama_core.planning.time.measured import MeasuredKernels, MeasuredTimes
from llama_core.planning.work import Stage, Work
from llama_core.records.step_parts import HEAD

MODEL_SHAPES = 0.9
"""Rate of a model's products over that of the best shape, which ``DeviceSpec.matmul_share`` gives.

720 over 794 TFLOP/s on H100: SemiAnalysis 2024, *MI300X vs H100 vs H200 Benchmark Part 1: Training*.
"""
MEMORY_SHARE = 0.85
"""Share of memory bandwidth that kernels are assumed to reach: about 0.9 in long streams, less in others."""


def of_layers(stage: Stage, seconds: Callable[[Passes, RecomputeMode], Pass]) -> Pass:
    """Return the time that all layers of a stage take, given that of a kind of layer."""
    total = NO_TIME
    for (layer, mode), count in stage.kinds.items():
        total = total.plus(seconds(layer, mode).times(count))
    return total


class StageCompute:
    """The times of a plan's layers, embedding and head on one rank, for one microbatch passing a stage.

    With a document mask no score is skipped; otherwise the scores after each token are, as if every row were one
    document. Without documents torch may have a faster kernel.

    Args:
        work: the model, the plan and the sequences.
        device: the device that computes.
    """

    def __init__(self, work: Work, device: DeviceSpec) -> None:
        self.work = work if work.on_cuda == device.is_gpu else replace(work, on_cuda=device.is_gpu)
        self.device = device
        self.measured_rates = device.rates(min(device.gpus_per_node, work.plan.world_size))
        self.measured = None
        self.kernels = None
        if self.measured_rates is not None and device.is_gpu:
            self.kernels = MeasuredKernels(self.work, self.measured_rates.seconds)
        elif self.measured_rates is not None:
            self.measured = MeasuredTimes(self.work, self.measured_rates.seconds)
        peak = device.fp32_flops if work.precision == "fp32" else device.bf16_flops
        # cuDNN has no kernel for fp32, and blocks around a ring need the flash kernel's sums
        is_causal_row = work.kernel.is_fused_causal and work.itemsize < FP32_BYTES
        attention_share = device.causal_share if is_causal_row else device.attention_share
        of_peak = device.matmul_share * MODEL_SHAPES
        self.rates = Rates(
            product_flops=peak * of_peak,
            half_rate_dim=device.half_rate_dim,
            fp8_flops=device.fp8_flops * of_peak if work.precision == "fp8" else None,
            attention_flops=peak * attention_share,
            visible_share=1.0 if work.kernel.told == "mask" else 0.5,
            bandwidth=device.memory_bandwidth * MEMORY_SHARE,
            compiles=work.plan.compile,
            # ``fully_shard`` reduces them instead
            added_share=0.0 if work.plan.uses_fully_shard else 1 - 1 / work.plan.num_microbatches,
            launch_seconds=device.launch_seconds,
            computes_meanwhile=device.is_gpu,
        )
        self.casts_once = work.setting.is_mixed_precision and work.plan.keeps_cast_weights
        """Whether weights are cast when they are updated, not at every use."""

    def stage(self, stage: Stage) -> Pass:
        """Return the time of a stage."""
        total = of_layers(stage, self._seconds)
        for end in stage.ends:
            total = total.plus(self._seconds(end))
        return total

    def by_kind(self, stage: Stage) -> dict[str, Pass]:
        """Return the time of a stage by kind of work; all of the head is ``HEAD``."""
        total: dict[str, Pass] = {}
        for (layer, mode), count in stage.kinds.items():
            for kind, one in self._by_kind(layer, mode).items():
                total[kind] = total.get(kind, NO_TIME).plus(one.times(count))
        for end in stage.ends:
            for kind, one in self._by_kind(end).items():
                name = HEAD if end is stage.head else kind
                total[name] = total.get(name, NO_TIME).plus(one)
        return total

    def layer(self, mode: RecomputeMode) -> Pass:
        """Return the time of the last layer, with recomputation in its backward."""
        return self._seconds(self.work.layers[-1], mode)

    def attention(self) -> Pass:
        """Return the time of one layer's attention: its scores and their products with the values."""
        return ProgramTime(self.work.layers[-1], self.rates, self.measured, self.kernels).attention()

    def embedding(self) -> Pass:
        """Return the time to look up every token, and to add their gradients to the table's."""
        return self._seconds(self.work.embedding)

    def head(self) -> Pass:
        """Return the time of the final norm, the last product and the loss, which computes its gradients too."""
        return self._seconds(self.work.final_norm).plus(self._seconds(self.work.head))

    def _seconds(self, passes: Passes, mode: RecomputeMode = "none") -> Pass:
        return self._as_a_whole(passes, self.sum_of_operations(passes, mode))

    def _by_kind(self, passes: Passes, mode: RecomputeMode = "none") -> dict[str, Pass]:
        kinds = ProgramTime(passes, self.rates, self.measured, self.kernels).by_kind(mode)
        return {kind: self._as_a_whole(passes, seconds) for kind, seconds in kinds.items()}

    def _as_a_whole(self, passes: Passes, seconds: Pass) -> Pass:
        """Return the time of operations as they run one after the other, not each alone."""
        if self.measured_rates is None:
            return seconds
        is_end = any(passes is end for end in (self.work.embedding, self.work.final_norm, self.work.head))
        forward, backward = self.measured_rates.ends_share if is_end else self.measured_rates.layers_share
        return Pass(forward * seconds.forward, backward * seconds.backward)

    def sum_of_operations(self, passes: Passes, mode: RecomputeMode = "none") -> Pass:
        """Return the time of the operations of a program, each as if it ran alone."""
        return ProgramTime(passes, self.rates, self.measured, self.kernels).seconds(mode)

    def optimizer(self, updated: Trained) -> float:
        """Return the time to clip and update parameters, and to cast them once."""
        num_parameters = sum(updated)
        if self.measured is not None:
            return self.measured.update(updated)
        if self.kernels is not None:
            seconds = self.kernels.update(updated)
            if seconds is not None:
                return seconds + self._casting_once(num_parameters)
        # the norm reads the gradient; clipping reads and writes it
        clipping = (1 + 2) * FP32_BYTES * num_parameters
        return self.copying(clipping + self.work.update.moved_for(updated)) + self._casting_once(num_parameters)

    def _casting_once(self, num_parameters: float) -> float:
        """Return the time to cast weights when they are updated; 0 if every use casts them."""
        return self.copying((FP32_BYTES + self.work.itemsize) * num_parameters) if self.casts_once else 0.0

    def on_whole_matrices(self, pp_rank: int) -> float:
        """Return the time that the optimizer computes on whole matrices, of which every rank of a stage has its share.

        Products are bf16 on any GPU.
        """
        flops = self.work.optimizer.flops
        if flops is None:
            return 0.0
        plan = self.work.plan
        if self.measured is not None:
            return self._measured_on_whole_matrices(self.measured, pp_rank)
        of_stage = sum(flops(*shape) for shape in self.work.trained_matrices(pp_rank, of_experts=False))
        of_stage += plan.ep * sum(flops(*shape) for shape in self.work.trained_matrices(pp_rank, of_experts=True))
        ranks = plan.world_size / plan.pp
        return of_stage / ranks / (self.device.bf16_flops * self.device.matmul_share * MODEL_SHAPES)

    def _measured_on_whole_matrices(self, measured: MeasuredTimes, pp_rank: int) -> float:
        plan = self.work.plan
        seconds = 0.0
        for of_experts, copies in ((False, 1), (True, plan.ep)):
            for rows, columns in self.work.trained_matrices(pp_rank, of_experts=of_experts):
                seconds += copies * measured.orthogonalising(rows, columns)
        return seconds / (plan.world_size / plan.pp)

    def copying(self, num_bytes: float) -> float:
        """Return the time to read or write ``num_bytes``."""
        if self.measured is not None:
            return self.measured.moving(num_bytes)
        measured = None if self.kernels is None else self.kernels.moving(num_bytes)
        return num_bytes / self.rates.bandwidth if measured is None else measured
