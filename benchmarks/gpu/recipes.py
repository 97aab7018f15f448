"""Other recipes than pre-training with AdamW: their steps, and the kernel work that they alone have."""

# Shape suffixes: O rows of a matrix, I its columns

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.steps import Steps
from llama_core.config.nf4 import BLOCK
from llama_core.models import nf4
from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.traits import NAMES
from llama_core.training.bf16_moments import Bf16Moments

ADAPTERS = {"lora_rank": 16, "target_modules": ["all-linear"]}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, moments in bf16": {"moments": "bf16"},
    "Muon": {"optimizer": "muon"},
}
OF_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TUNING: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("8B", {"sections": {"strategy": "lora", "lora": ADAPTERS}}),
    "QLoRA": ("8B", {"sections": {"strategy": "lora", "lora": ADAPTERS | {"base": "nf4"}}}),
    "QLoRA, compiled": ("8B", {"sections": {"strategy": "lora", "lora": ADAPTERS | {"base": "nf4"}}, "compile": True}),
    "DPO": ("1B", {"training": {"objective": "dpo"}}),
}
"""The shape of each, and further arguments of its steps."""


def optimizers(bench: Bench) -> Iterator[Row]:
    """Yield a step of 1B with each optimizer."""
    for name, training in OPTIMIZERS.items():
        if bench.is_late:
            return
        row = {"what": f"1B, {name}"}
        yield bench.attempted(row, _measured, bench, "1B", training=training)


def tuning(bench: Bench) -> Iterator[Row]:
    """Yield steps of tuning."""
    for name, (shape, settings) in TUNING.items():
        if bench.is_late:
            return
        yield bench.attempted({"what": f"{shape}, {name}"}, _measured, bench, shape, **settings)


def _measured(bench: Bench, shape: str, **settings: Any) -> Row:
    compiled = bench.size(settings.pop("compile", False), False)  # other tests compile it on a CPU
    return Steps(bench, shape, recompute="selective", compile=compiled, **settings).measured(repeats=3)


def numbers_in_nf4(bench: Bench) -> Iterator[Row]:
    """Yield whether the device packs and unpacks a matrix as a CPU does, and how long it takes to unpack it."""
    rows, columns = bench.size((14336, 4096), (64, 128))
    matrix_OI = bench.random(rows, columns)
    packed = nf4.pack(matrix_OI)
    on_cpu = nf4.pack(matrix_OI.cpu())
    place = nf4.BlockPlace(0, 0, columns // BLOCK)
    like = torch.empty(0, dtype=torch.bfloat16, device=bench.device)
    of_device = nf4.unpack(packed, place, like).cpu()
    of_cpu = nf4.unpack(nf4.Packed(*(part.cpu() for part in packed)), place, like.cpu())
    yield {
        "matrix": f"{rows} x {columns}",
        "bytes that differ from a CPU's": int((packed.bytes_OK.cpu() != on_cpu.bytes_OK).sum()),
        "the same numbers of the same bytes": torch.equal(of_device, of_cpu),
    }
    in_parts = partial(nf4.unpack_in_parts, packed, place, like.dtype)
    ways = {
        "as in training": partial(nf4.unpack, packed, place, like),
        "in parts": in_parts,
        "in parts, compiled": torch.compile(in_parts),
    }
    for name, way in ways.items():
        if bench.is_late:
            return
        yield bench.attempted({"unpacking": name}, _time_unpacking, bench, way)


def moments_in_bf16(bench: Bench) -> Iterator[Row]:
    """Yield whether the device's kernel rounds AdamW's moments as a CPU does, and how long the kernel takes."""
    torch.manual_seed(0)
    shape = bench.size((8192, 2048), (64, 128))
    weight = bench.random(*shape, dtype=torch.float32)
    gradient = bench.random(*shape, dtype=torch.float32)
    row = {"matrix": f"{shape[0]} x {shape[1]}"}
    yield bench.attempted(row, _compare_moments, bench, weight, gradient)


def _compare_moments(bench: Bench, weight: Tensor, gradient: Tensor) -> Row:
    update, (ours, kept) = _updated(weight, gradient)
    _, (theirs, expected) = _updated(weight.cpu(), gradient.cpu())
    differing = sum(int((kept[name].cpu() != expected[name]).sum()) for name in ("exp_avg", "exp_avg_sq"))
    ms = bench.milliseconds(update)
    return {
        "share of moments that differ from a CPU's": differing / (2 * weight.numel()),
        "weights differ by at most, of a step": float((ours.cpu() - theirs).abs().max()) / OF_ADAMW["lr"],
        "ms": ms,
        "GB/s": ADAMW.with_moments("bf16").on(cuda=True).moved_bytes * weight.numel() / ms / 1e6,
    }


def _updated(weight: Tensor, gradient: Tensor) -> tuple[Callable[[], None], tuple[Tensor, dict[str, Tensor]]]:
    """Return another update of a weight, and copies of the weight and its states after the first two."""
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient
    moments = Bf16Moments([OF_ADAMW | {"params": [parameter], NAMES: ["layers.0.feed_forward.w1.weight"]}], seed=0)
    kept: dict[str, Tensor] = {}

    def update() -> None:
        with torch.no_grad():
            moments.update([parameter], {parameter: kept}, OF_ADAMW, None, None)

    update()
    update()
    return update, (parameter.detach().clone(), {name: state.clone() for name, state in kept.items()})


def _time_unpacking(bench: Bench, way: Callable[[], Tensor]) -> Row:
    matrix_OI = way()
    ms = bench.milliseconds(way)
    return {"ms": ms, "GB/s written": matrix_OI.numel() * matrix_OI.element_size() / ms / 1e6}
