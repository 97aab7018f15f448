"""The time of attention, of the head with its loss, and of products in fp8, kernel by kernel."""

# Shape suffixes: T tokens, D model dim, V vocabulary

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.parity import packed_positions
from llama_core.models import loss as losses
from llama_core.models.attention import attend, document_mask
from llama_core.models.batch import Documents
from llama_core.models.fp8 import product_of_rounded, rounded, scaled_product
from llama_core.models.loss import linear_cross_entropy
from llama_core.rehearsal.byte_counter import replaced

QUERY_HEADS = 32
KEY_HEADS = 8
HEAD_DIM = 128
BACKWARD_AND_FORWARD = 3.5
"""FLOPs of attention's forward and backward over those of its forward: seven products over two."""
AT_ONCE = 4
"""Runs between two events: short kernels would otherwise wait for their launch."""


def attention(bench: Bench) -> Iterator[Row]:
    """Yield the time of attention by kernel: one row of 32 query and 8 key heads of 128, forward and backward."""
    length = bench.size(8192, 64)
    q, k, v = (
        bench.random(1, length, heads, HEAD_DIM).transpose(1, 2) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    )
    in_documents = packed_positions(1, length, length // 8)
    whole = torch.arange(length)[None]
    mask = document_mask(in_documents.to(bench.device), torch.bfloat16)
    for name, kind, backend, positions_BS in (
        ("documents, about 8", _documents(bench, in_documents), None, in_documents),
        ("documents, one", _documents(bench, whole), None, whole),
        ("causal, as torch chooses", None, None, whole),
        ("causal, flash", None, SDPBackend.FLASH_ATTENTION, whole),
        ("causal, cuDNN", None, SDPBackend.CUDNN_ATTENTION, whole),
        ("mask, the same documents", mask, None, in_documents),
    ):
        if bench.is_late:
            return
        visible_scores = float((positions_BS + 1).sum())
        forward_flops = 4 * visible_scores * QUERY_HEADS * HEAD_DIM
        row = {"tokens": length, "kernel": name}
        yield bench.attempted(row, _time_attention, bench, (q, k, v), kind, backend, forward_flops)


def _documents(bench: Bench, positions_BS: Tensor) -> Documents:
    documents = Documents.of_positions(positions_BS)
    return documents._replace(starts=documents.starts.to(bench.device))


def _time_attention(
    bench: Bench, heads: tuple[Tensor, Tensor, Tensor], mask: Any, backend: SDPBackend | None, forward_flops: float
) -> Row:
    q, k, v = leaves = [x.detach().requires_grad_() for x in heads]
    bench.memory()
    with sdpa_kernel(backend) if backend else nullcontext():
        forward_ms = bench.milliseconds(lambda: attend(q, k, v, mask), at_once=AT_ONCE)
        out = attend(q, k, v, mask)
        upstream = torch.ones_like(out)
        backward = partial(torch.autograd.grad, out, leaves, upstream, retain_graph=True)
        backward_ms = bench.milliseconds(backward, at_once=AT_ONCE)
    both = BACKWARD_AND_FORWARD * forward_flops
    return {
        "forward ms": forward_ms,
        "backward ms": backward_ms,
        "TFLOP/s of visible scores, forward": forward_flops / forward_ms / 1e9,
        "both": both / (forward_ms + backward_ms) / 1e9,
        "peak GiB": bench.memory()[0],
    }


def loss(bench: Bench) -> Iterator[Row]:
    """Yield the time and memory of the head and its loss, forward and backward, by implementation."""
    ways: dict[str, Callable[..., Tensor]] = {
        "our kernel": partial(_with_kernels, True),
        "in blocks": partial(_with_kernels, False),
    }
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
        ways["torch's linear_cross_entropy"] = _torchs_loss
    for tokens, hidden, vocab in bench.size(((8192, 2048, 128256), (8192, 4096, 128256)), ((64, 32, 512),)):
        operands = [bench.random(tokens, hidden), 0.02 * bench.random(vocab, hidden, dtype=torch.float32)]
        for name, way in ways.items():
            if bench.is_late:
                return
            yield bench.attempted({"what": name, "hidden size": hidden}, _time_loss, bench, way, operands)


def _time_loss(bench: Bench, way: Callable[[Tensor, Tensor, Tensor], Tensor], operands: list[Tensor]) -> Row:
    hidden_TD, weight_VD = leaves = [x.detach().requires_grad_() for x in operands]
    targets_T = torch.arange(len(hidden_TD), device=hidden_TD.device) * 31 % len(weight_VD)
    bench.memory()
    ms = bench.milliseconds(lambda: torch.autograd.grad(way(hidden_TD, weight_VD, targets_T), leaves))
    return {
        "ms": ms,
        "TFLOP/s": 6 * len(hidden_TD) * weight_VD.numel() / ms / 1e9,
        "peak GiB": bench.memory()[0],
    }


def _with_kernels(fused: bool, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    with replaced(losses, "uses_kernels", lambda _: fused):
        return linear_cross_entropy(hidden_TD, weight_VD, targets_T)


def _torchs_loss(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    from torch.nn.functional import linear_cross_entropy as theirs
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    weight_VD = weight_VD.to(hidden_TD.dtype)
    return theirs(hidden_TD, weight_VD, targets_T, reduction="sum", options=LinearCrossEntropyOptions())


def fp8_products(bench: Bench) -> Iterator[Row]:
    """Yield the rates of products in bf16 and fp8 at the shapes of 8B."""
    tokens = bench.size(8192, 64)
    for columns, rows in bench.size(((4096, 4096), (4096, 14336), (14336, 4096)), ((32, 64),)):
        x = bench.random(tokens, columns)
        weight = bench.random(rows, columns)
        both = rounded(x), rounded(weight)
        ways = {
            "bf16": partial(F.linear, x, weight),
            "fp8, without the rounding": partial(product_of_rounded, *both, x.dtype),
            "fp8": partial(scaled_product, x, weight),
            "fp8, compiled": partial(torch.compile(scaled_product), x, weight),
        }
        shape = f"{tokens} x {columns} x {rows}"
        for name, way in ways.items():
            if bench.is_late:
                return
            row = {"what": name, "product": shape}
            yield bench.attempted(row, _time_product, bench, way, tokens * columns * rows)


def _time_product(bench: Bench, way: Callable[[], Tensor], multiplications: int) -> Row:
    ms = bench.milliseconds(way)
    return {"ms": ms, "TFLOP/s": 2 * multiplications / ms / 1e9}
