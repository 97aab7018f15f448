"""Whole optimizer steps of this engine: their time, memory and kernels."""

# Shape suffixes: B batch, S sequence

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.parity import packed_positions
from benchmarks.gpu.parts import kernel_rows, part_rows, profiled
from benchmarks.gpu.shapes import llama3
from llama_core.attention import DocumentAttention
from llama_core.config.hardware import DeviceSpec, recognise_gpu
from llama_core.config.run import RunConfig
from llama_core.models.batch import Batch, ones_per_token
from llama_core.planning.memory.estimate import estimate_memory
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.step_time import flops_per_token
from llama_core.planning.work import Work
from llama_core.rehearsal.dry_run import rehearse
from llama_core.training.engine import build_engine, train_step
from llama_core.units import GIB, TFLOP

NUM_BATCHES = 4
"""Batches with other documents each, which the steps take in turn."""
DOCUMENTS_PER_ROW = 8
"""Documents of a row, on average."""
FULL_MEMORY = "estimated to need {needed:.1f} GiB, and {free:.1f} GiB are free"


class Steps:
    """Optimizer steps of this engine on one device.

    Args:
        bench: the device.
        shape: a key of ``SHAPES``; on a CPU always the tiny one.
        documents: how attention stays within packed documents: ``varlen``, ``mask`` or ``none``; on a CPU, a mask in
            place of the kernel.
        precision: the dtype of activations.
        deterministic: whether to use only deterministic kernels.
        times: how many such models are to fit the device.
        training: further settings of the training.
        sections: further sections of the configuration.
        plan: arguments of the plan: recomputation and compilation.

    Raises:
        MemoryError: if the device has less memory left than the model is estimated to need.
    """

    def __init__(
        self,
        bench: Bench,
        shape: str,
        *,
        documents: DocumentAttention = "varlen",
        precision: str = "bf16",
        deterministic: bool = False,
        times: int = 1,
        training: Mapping[str, Any] = MappingProxyType({}),
        sections: Mapping[str, Any] = MappingProxyType({}),
        **plan: Any,
    ) -> None:
        self.bench = bench
        self.documents: DocumentAttention = "mask" if bench.is_tiny and documents == "varlen" else documents
        self.config = RunConfig.from_mapping(
            llama3(bench.size(shape, "tiny"))
            | {
                "training": {
                    "seq_len": bench.size(8192, 64),
                    "batch_size": 1,
                    "precision": precision,
                    "deterministic": deterministic,
                    **training,
                },
                "data": {"document_mask": documents != "none"},
                "launch": {"device": bench.device.type},
                **sections,
            }
        )
        self.plan = ParallelPlan(**plan)
        self._refuse_full_memory(times)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.use_deterministic_algorithms(deterministic)
        self.engine = build_engine(self.config, self.plan, bench.device)
        self.engine.initialize_weights(0)
        length = self.config.seq_len
        self.positions = [packed_positions(1, length, length // DOCUMENTS_PER_ROW, seed) for seed in range(NUM_BATCHES)]
        self.batches = [self._batch(positions_BS) for positions_BS in self.positions]
        self.number = 0

    def _refuse_full_memory(self, times: int) -> None:
        if self.bench.is_tiny:
            return
        needed = times * self.estimated_gib()
        free = torch.cuda.mem_get_info()[0] / GIB
        if needed > free:
            raise MemoryError(FULL_MEMORY.format(needed=needed, free=free))

    def _batch(self, positions_BS: torch.Tensor) -> Batch:
        tokens_BS = torch.randint(0, self.config.spec.vocab_size, positions_BS.shape)
        values = ones_per_token(tokens_BS, self.config.objective.values_per_token)
        documents = None if self.documents == "none" else positions_BS
        batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), documents, per_token=values)
        return (batch.with_documents() if self.documents == "varlen" else batch).to(self.bench.device)

    def take(self, batches: list[Batch] | None = None) -> None:
        """Run the next step; consecutive steps have different documents."""
        batches = batches or self.batches
        self.number += 1
        train_step(self.engine, [batches[self.number % len(batches)]], learning_rate=1e-4, max_grad_norm=1.0)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.config.batch_size * self.config.seq_len

    @property
    def gpu(self) -> DeviceSpec | None:
        """The data sheet of the device; None if it has none."""
        return None if self.bench.is_tiny else recognise_gpu(torch.cuda.get_device_name())

    @property
    def visible_share(self) -> float:
        """The scores within documents, of those of rows that are one document each."""
        length = self.config.seq_len
        whole = len(self.positions) * length * (length + 1) / 2
        return sum(float((positions_BS + 1).sum()) for positions_BS in self.positions) / whole

    def measured(self, repeats: int = 5) -> Row:
        """Return the time, the model FLOPs utilisation and the memory of a step, beside the estimated memory."""
        began = time.perf_counter()
        self.take()
        self.bench.synchronize()
        first_s = time.perf_counter() - began
        self.take()
        self.bench.memory()  # reset the peaks, now that all states and graphs exist
        ms = self.bench.milliseconds(self.take, repeats)
        allocated, reserved = self.bench.memory()
        return self.speed(ms) | {
            "first step s": first_s,
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "allocated GiB": allocated,
            "reserved GiB": reserved,
            "estimated GiB": self.estimated_gib(),
        }

    def speed(self, ms: float) -> Row:
        """Return the rates that follow from the time of a step."""
        flops = self.tokens * flops_per_token(self.config.spec, self.config.seq_len)
        return {
            "ms": ms,
            "tokens/s": 1e3 * self.tokens / ms,
            "TFLOP/s": flops / ms * 1e3 / TFLOP,
            "MFU %": 100 * flops / ms * 1e3 / self.gpu.bf16_flops if self.gpu else "-",
        }

    def rehearsed_gib(self) -> float | str:
        """Return the memory of a step as the dry run counts it. Steps after it are compiled again."""
        if self.documents == "mask" and not self.bench.is_tiny:
            return "-"  # on CUDA, the dry run assumes the varlen kernel
        return rehearse(self.config, self.plan).profile.peak_bytes / GIB

    def estimated_gib(self) -> float:
        """Return the memory of a step as the planner estimates it."""
        work = replace(Work.of(self.config, self.plan), documents=self.documents)
        return estimate_memory(work).peak_bytes / GIB


def _measured(bench: Bench, shape: str, *, repeats: int = 5, **settings: Any) -> Row:
    return Steps(bench, shape, **settings).measured(repeats)


def _rows(bench: Bench, *combinations: tuple[str, bool, str, str]) -> Iterator[Row]:
    """Yield a step of each combination of shape, compilation, documents and recomputation, and then its rehearsal."""
    for shape, on_cuda, kind, recompute in combinations[:: bench.size(1, 2)]:  # every second one tests the code
        if bench.is_late:
            return
        compiled = bench.size(on_cuda, False)  # as ``profiled_step`` compiles on a CPU too
        documents = bench.size(kind, "mask")
        row = {"model": shape, "compiled": compiled, "documents": documents, "recompute": recompute}
        settings = {"documents": documents, "compile": compiled, "recompute": recompute}
        built: list[Steps] = []
        yield bench.attempted(row, _measure_built, built, bench, shape, settings)
        if built:
            yield bench.attempted(row, _rehearsed, built)
        built.clear()  # or its memory would be there while the next one is measured
        bench.release()


def _measure_built(built: list[Steps], bench: Bench, shape: str, settings: dict[str, Any]) -> Row:
    """Build steps, put them into ``built``, and measure them."""
    built.append(Steps(bench, shape, **settings))
    return built[0].measured()


def _rehearsed(built: list[Steps]) -> Row:
    return {"rehearsed GiB": built[0].rehearsed_gib()}


def profiled_step(bench: Bench) -> Iterator[Row]:
    """Yield a compiled step of 1B with documents, its parts beside those that the planner predicts, and its kernels."""
    steps = Steps(bench, "1B", compile=True)
    measured = steps.measured()
    row = {"model": "1B", "compiled": True, "documents": steps.documents, "recompute": "none"}
    yield row | measured
    recorded = profiled(bench, steps.take)
    yield from part_rows(
        recorded,
        steps.config,
        steps.plan,
        steps.gpu,
        step_ms=measured["ms"],
        documents=steps.documents,
        visible_share=steps.visible_share,
    )
    yield from kernel_rows(recorded)
    yield bench.attempted(row, lambda: {"rehearsed GiB": steps.rehearsed_gib()})


def training(bench: Bench) -> Iterator[Row]:
    """Yield whole steps with documents, the most informative first."""
    yield from _rows(
        bench,
        ("1B", True, "varlen", "selective"),
        ("3B", True, "varlen", "selective"),
        ("1B", False, "varlen", "none"),
        ("1B", False, "varlen", "selective"),
    )


def masks(bench: Bench) -> Iterator[Row]:
    """Yield the same with a mask in place of the kernel for documents."""
    yield from _rows(
        bench,
        ("1B", True, "mask", "none"),
        ("1B", True, "mask", "selective"),
        ("1B", False, "mask", "none"),
        ("3B", True, "mask", "selective"),
    )


def large(bench: Bench) -> Iterator[Row]:
    """Yield steps of 8B, whose states nearly fill 141 GB."""
    yield from _rows(bench, ("8B", True, "varlen", "full"), ("8B", False, "varlen", "full"))


def fp8(bench: Bench) -> Iterator[Row]:
    """Yield a step of 3B in bf16 and in fp8."""
    for precision in ("bf16", "fp8"):
        settings = {"compile": bench.size(True, False), "recompute": "selective"}
        yield bench.attempted({"what": f"3B, {precision}"}, _measured, bench, "3B", precision=precision, **settings)


def precision(bench: Bench) -> Iterator[Row]:
    """Yield eager steps of 1B in other precisions, and with deterministic kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch looks at the process's first product
    for name, settings in (
        ("bf16", {}),
        ("bf16, deterministic", {"deterministic": True}),
        ("fp16", {"precision": "fp16"}),
        ("fp32", {"precision": "fp32", "documents": "mask"}),
        ("fp32, rows of one document", {"precision": "fp32", "documents": "none"}),
    ):
        if bench.is_late:
            return
        row = {"what": name}
        yield bench.attempted(row, _measured, bench, "1B", repeats=3, recompute="selective", **settings)
