"""The stages of ``benchmarks.gpu``: each is a generator of rows, which are written as they come."""

# Shape suffixes: B batch, S sequence, T tokens, N query heads, K key/value heads, H head dim, D model dim, V vocabulary

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from llama_core.config.hardware import recognise_gpu
from llama_core.config.run import RunConfig
from llama_core.models import loss as losses
from llama_core.models.batch import Batch, Documents
from llama_core.models.fp8 import product_of_rounded, rounded, scaled_product
from llama_core.models.layers import attend, document_mask
from llama_core.models.loss import linear_cross_entropy
from llama_core.parallel.block_attention import VARLEN, block_backward
from llama_core.parallel.context import ring_masks, sequence_index
from llama_core.parallel.gathered_attention import held_documents
from llama_core.parallel.ring import attention_over_blocks
from llama_core.planning.memory.estimate import estimate_memory, sizes_of
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.step_time import flops_per_token
from llama_core.rehearsal.byte_counter import replaced
from llama_core.rehearsal.dry_run import rehearse
from llama_core.training.engine import build_engine, train_step
from llama_core.units import GB, GIB, TFLOP

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The device and the time limit of a stage."""

    device: torch.device
    deadline: float
    """No row starts after this ``time.monotonic`` time."""

    @property
    def is_tiny(self) -> bool:
        """Whether to use the tiny sizes, for a test on a CPU."""
        return self.device.type == "cpu"

    def size(self, full: Any, tiny: Any) -> Any:
        """Return the size for this device."""
        return tiny if self.is_tiny else full

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.is_tiny:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Return the median time of ``run`` in ms, after two warm-up runs."""
        repeats = self.size(repeats, 2)
        times = []
        for number in range(repeats + 2):
            self.synchronize()
            started = time.perf_counter()
            run()
            self.synchronize()
            times.append(1e3 * (time.perf_counter() - started) if number > 1 else 0.0)
        return statistics.median(times[2:])

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normally distributed numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def memory(self) -> tuple[float, float]:
        """Return the peak GiB allocated and reserved since the last call, and reset the peaks."""
        if self.is_tiny:
            return 0.0, 0.0
        peaks = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peaks


def attempted(row: Row, measure: Callable[..., Row], *arguments: Any, **settings: Any) -> Row:
    """Return ``row`` with the columns that ``measure`` returns, or with the error it raises."""
    try:
        return row | measure(*arguments, **settings)
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}
    finally:
        gc.collect()


# --- machine


def machine(bench: Bench) -> Iterator[Row]:
    """Yield the versions and the device, and its measured rates of copies and matrix products."""
    yield {"what": "torch", "value": torch.__version__}
    yield {"what": "python", "value": platform.python_version()}
    if not bench.is_tiny:
        properties = torch.cuda.get_device_properties(bench.device)
        yield {"what": "device", "value": f"{properties.name}, {properties.total_memory / GIB:.1f} GiB"}
        yield {"what": "CUDA", "value": str(torch.version.cuda)}
        yield {"what": "NCCL", "value": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    yield {"what": "varlen_attn", "value": str(signature(varlen_attn))}
    one = torch.ones(1, device=bench.device)
    launches = bench.size(1000, 10)
    yield {
        "what": "launching a kernel, us",
        "value": 1e3 * bench.milliseconds(lambda: [one.add_(1) for _ in range(launches)]) / launches,
    }
    source = bench.random(bench.size(2**29, 2**16))
    ms = bench.milliseconds(partial(torch.empty_like(source).copy_, source))
    yield {"what": "copying on the device, read and written, GB/s", "value": 2 * source.nbytes / ms / 1e6}
    for dtype, *shape in (
        (torch.bfloat16, 8192, 8192, 8192),
        (torch.bfloat16, 8192, 14336, 4096),
        (torch.bfloat16, 8192, 128256, 2048),
        (torch.float32, 8192, 8192, 8192),
    ):
        rows, columns, inner = (bench.size(size, size // 64) for size in shape)
        left, right = bench.random(rows, inner, dtype=dtype), bench.random(inner, columns, dtype=dtype)
        ms = bench.milliseconds(partial(torch.mm, left, right))
        name = f"product {rows} x {inner} x {columns}, {_name(dtype)}, TFLOP/s"
        yield {"what": name, "value": 2 * rows * columns * inner / ms / 1e9}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- parity


def parity(bench: Bench) -> Iterator[Row]:
    """Yield each kernel's largest deviation from fp64, relative to the largest number of the result."""
    row_length = bench.size(2048, 64)
    positions_BS = _packed_positions(2, row_length, row_length // 5)
    heads = {"q": (2, 8, row_length, 64), "k": (2, 2, row_length, 64), "v": (2, 2, row_length, 64)}
    tensors = [bench.random(*shape) for shape in heads.values()]
    mask = document_mask(positions_BS, torch.float64).to(bench.device)
    exact = _with_gradients(partial(attend, mask=mask), [x.double() for x in tensors])
    documents = Documents.of_positions(positions_BS)
    starts = documents.starts.to(bench.device)
    empty = Documents(torch.cat((starts, starts[-1:].expand(3))), documents.longest)
    kinds: dict[str, Tensor | Documents] = {
        "mask": mask.to(torch.bfloat16),
        "documents": documents._replace(starts=starts),
        "documents, three of them empty": empty,
    }
    for name, kind in kinds.items():
        ours = partial(_with_gradients, partial(attend, mask=kind), tensors)
        yield attempted({"what": name, "dtype": "bfloat16"}, _distances, ours, exact)
    causal = _with_gradients(partial(attend, mask=None), [x.double() for x in tensors])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ours = partial(_with_gradients, partial(attend, mask=None), [x.to(dtype) for x in tensors])
        yield attempted({"what": "causal", "dtype": _name(dtype)}, _distances, ours, causal)
    for name, positions, expected in (("ring of 4", None, causal), ("ring of 4, documents", positions_BS, exact)):
        ours = partial(_ring, bench, tensors, positions)
        yield attempted({"what": name, "dtype": "bfloat16"}, _distances, ours, expected)
    ours = partial(_gathered, bench, tensors, documents)
    yield attempted({"what": "documents, gathered by 4", "dtype": "bfloat16"}, _distances, ours, exact)
    hidden_and_weight = _loss_operands(bench)
    exact = _loss_and_gradients([x.double() for x in hidden_and_weight])
    ours = partial(_loss_and_gradients, [x.bfloat16() for x in hidden_and_weight])
    yield attempted(
        {"what": "loss", "dtype": "bfloat16"}, _distances, ours, exact, ("loss", "grad hidden", "grad weight")
    )


def _packed_positions(num_rows: int, row_length: int, mean_length: int, seed: int = 0) -> Tensor:
    """Return positions, on the CPU, of rows packed with documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    starts_BS = (torch.rand((num_rows, row_length), generator=generator) < 1 / mean_length).long()
    index_S = torch.arange(row_length)
    return index_S - (starts_BS * index_S).cummax(1).values


def _with_gradients(attention: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the attention of q, k and v, and its gradients for a fixed upstream gradient."""
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, _upstream(out))]


def _upstream(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).to(out)


def _distances(
    ours: Callable[[], list[Tensor]],
    exact: list[Tensor],
    names: Sequence[str] = ("output", "grad q", "grad k", "grad v"),
) -> Row:
    pairs = zip(names, ours(), exact, strict=True)
    return {name: float((x.double() - y).abs().max() / y.abs().max()) for name, x, y in pairs}


def _ring(bench: Bench, tensors: list[Tensor], positions_BS: Tensor | None, size: int = 4) -> list[Tensor]:
    """Return attention and gradients as the ranks of a ring compute them, simulated one rank after the other."""
    whole = tensors[0].shape[2]
    out, *grads = (torch.zeros_like(x, dtype=torch.float64) for x in (tensors[0], *tensors))
    upstream = _upstream(out).to(tensors[0].dtype)
    places = [sequence_index(whole, rank, size, bench.device) for rank in range(size)]
    kv = [torch.stack((tensors[1][:, :, place], tensors[2][:, :, place])) for place in places]
    for rank, place in enumerate(places):
        own = None if positions_BS is None else positions_BS.to(bench.device)[:, place]
        masks = ring_masks(own, place, tensors[0].dtype, cp_rank=rank, cp_size=size)
        sources = [(rank - step) % size for step in range(size)]
        q = tensors[0][:, :, place]
        part, lse = attention_over_blocks(q, (kv[source] for source in sources), masks)
        out[:, :, place] = part.double()
        for source, mask in zip(sources, masks, strict=True):
            grad_q, grad_kv = block_backward(upstream[:, :, place], q, part, lse, kv[source], mask=mask)
            grads[0].index_add_(2, place[mask.queries], grad_q.double())
            for grad, piece in zip(grads[1:], grad_kv, strict=True):
                grad.index_add_(2, places[source][mask.keys], piece.double())
    return [out, *grads]


def _gathered(bench: Bench, tensors: list[Tensor], documents: Documents, size: int = 4) -> list[Tensor]:
    """Return the same as computed by ranks that gather keys and values."""
    out, *grads = (torch.zeros_like(x, dtype=torch.float64) for x in (tensors[0], *tensors))
    upstream = _upstream(out).to(tensors[0].dtype)
    (batch, _, whole, _), chunk = out.shape, out.shape[2] // (2 * size)
    for rank in range(size):
        place = sequence_index(whole, rank, size, bench.device)
        starts = held_documents(documents, 2 * chunk, cp_rank=rank, cp_size=size)
        bounds = (*(x.to(bench.device) for x in starts[:2]), min(documents.longest, chunk), documents.longest)
        ends = ((rank + 1) * chunk, (2 * size - rank) * chunk)
        seen = torch.cat([torch.arange(end, device=bench.device) for end in ends])
        q, k, v, grad_out = (
            x[:, :, index].transpose(1, 2).flatten(0, 1)
            for x, index in zip((*tensors, upstream), (place, seen, seen, place), strict=True)
        )
        part, lse = VARLEN.forward(q, k, v, *bounds)
        parts = (part, *VARLEN.backward(grad_out, q, k, v, part, lse, *bounds))
        for whole_BNSH, x, index in zip((out, *grads), parts, (place, place, seen, seen), strict=True):
            whole_BNSH.index_add_(2, index, x.view(batch, -1, *x.shape[1:]).transpose(1, 2).double())
    return [out, *grads]


def _loss_operands(bench: Bench) -> list[Tensor]:
    tokens, hidden, vocab = bench.size((4096, 2048, 128256), (64, 32, 512))
    return [bench.random(tokens, hidden), 0.02 * bench.random(vocab, hidden, dtype=torch.float32)]


def _loss_and_gradients(operands: list[Tensor]) -> list[Tensor]:
    hidden_TD, weight_VD = (x.detach().requires_grad_() for x in operands)
    targets_T = torch.arange(len(hidden_TD), device=hidden_TD.device) * 31 % len(weight_VD)
    loss = linear_cross_entropy(hidden_TD, weight_VD, targets_T)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden_TD, weight_VD))]


# --- attention


def attention(bench: Bench) -> Iterator[Row]:
    """Yield the time of attention by kernel: one row of 32 query and 8 key heads of 128, forward and backward."""
    for length in bench.size((4096, 8192, 32768), (64,)):
        q, k, v = (bench.random(1, length, heads, 128).transpose(1, 2) for heads in (32, 8, 8))
        short = _packed_positions(1, length, length // 8)
        kinds: dict[str, tuple[Any, SDPBackend | None]] = {
            "causal, flash": (None, SDPBackend.FLASH_ATTENTION),
            "causal, cuDNN": (None, SDPBackend.CUDNN_ATTENTION),
            "causal, as torch chooses": (None, None),
            "documents, one": (_documents(bench, torch.arange(length)[None]), None),
            "documents, about 8": (_documents(bench, short), None),
            "mask, the same documents": ("mask", None),
        }
        scores = {True: _visible_scores(short), False: length * (length + 1) / 2}
        for name, (mask, backend) in kinds.items():
            if bench.is_late:
                return
            visible = scores["8" in name or "mask" in name]
            made = mask if mask != "mask" else document_mask(short.to(bench.device), torch.bfloat16)
            flops = 4 * visible * 32 * 128
            yield attempted({"tokens": length, "kernel": name}, _time_attention, bench, (q, k, v), made, backend, flops)


def _documents(bench: Bench, positions_BS: Tensor) -> Documents:
    documents = Documents.of_positions(positions_BS)
    return documents._replace(starts=documents.starts.to(bench.device))


def _visible_scores(positions_BS: Tensor) -> float:
    return float((positions_BS + 1).sum())


def _time_attention(
    bench: Bench, heads: tuple[Tensor, Tensor, Tensor], mask: Any, backend: SDPBackend | None, forward_flops: float
) -> Row:
    q, k, v = leaves = [x.detach().requires_grad_() for x in heads]
    with sdpa_kernel(backend) if backend else nullcontext():
        forward_ms = bench.milliseconds(lambda: attend(q, k, v, mask))
        out = attend(q, k, v, mask)
        upstream = torch.ones_like(out)
        backward_ms = bench.milliseconds(lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True))
    return {
        "forward ms": forward_ms,
        "backward ms": backward_ms,
        "TFLOP/s of visible scores, forward": forward_flops / forward_ms / 1e9,
        "both": 3.5 * forward_flops / (forward_ms + backward_ms) / 1e9,
        "peak GiB": bench.memory()[0],
    }


# --- loss


def loss(bench: Bench) -> Iterator[Row]:
    """Yield the time and memory of the head and its loss, forward and backward, by implementation."""
    for tokens, hidden, vocab in bench.size(((8192, 2048, 128256), (8192, 4096, 128256)), ((64, 32, 512),)):
        operands = [bench.random(tokens, hidden), 0.02 * bench.random(vocab, hidden, dtype=torch.float32)]
        ways = {
            "blocks": partial(_with_kernels, False),
            "kernel": partial(_with_kernels, True),
            "torch's linear_cross_entropy": _torchs_loss,
        }
        for name, way in ways.items():
            if bench.is_late:
                return
            yield attempted({"what": name, "hidden size": hidden}, _time_loss, bench, way, operands)


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
    from torch.nn.functional import linear_cross_entropy as theirs  # from torch 2.13 on
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    weight_VD = weight_VD.to(hidden_TD.dtype)
    return theirs(hidden_TD, weight_VD, targets_T, reduction="sum", options=LinearCrossEntropyOptions())


# --- fp8


def fp8(bench: Bench) -> Iterator[Row]:
    """Yield the rates of products in bf16 and fp8 at the shapes of 8B, and of a 3B step in both."""
    tokens = bench.size(8192, 64)
    for columns, rows in bench.size(((4096, 4096), (4096, 14336), (14336, 4096)), ((32, 64),)):
        x, weight = bench.random(tokens, columns), bench.random(rows, columns)
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
            yield attempted({"what": name, "product": shape}, _time_product, bench, way, tokens * columns * rows)
    for precision in ("bf16", "fp8"):
        settings = {"documents": bench.size("varlen", "mask"), "compile": True, "recompute": "selective"}
        yield attempted({"what": f"3B step, {precision}"}, _measured, bench, "3B", precision=precision, **settings)


def _time_product(bench: Bench, way: Callable[[], Tensor], multiplications: int) -> Row:
    ms = bench.milliseconds(way)
    return {"ms": ms, "TFLOP/s": 2 * multiplications / ms / 1e9}


# --- whole steps

SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "ffn_size": 8192},
    "3B": {
        "hidden_size": 3072,
        "num_layers": 28,
        "num_heads": 24,
        "num_kv_heads": 8,
        "head_dim": 128,
        "ffn_size": 8192,
    },
    "8B": {},
    "tiny": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 128,
        "vocab_size": 512,
    },
}
"""Sizes of Llama 3.2 1B and 3B, but with an untied head, of Llama 3 8B, and a tiny model."""


class Steps:
    """Optimizer steps of this engine on one device.

    Args:
        bench: the device.
        shape: a key of ``SHAPES``; always the tiny one on a CPU.
        documents: how attention stays within packed documents: ``varlen``, ``mask`` or ``none``.
        precision: the dtype of activations.
        deterministic: whether to use only deterministic kernels.
        num_rows: sequences per step.
        plan: arguments of the plan: recomputation and compilation.
    """

    def __init__(
        self,
        bench: Bench,
        shape: str,
        *,
        documents: str = "varlen",
        precision: str = "bf16",
        deterministic: bool = False,
        num_rows: int = 1,
        **plan: Any,
    ) -> None:
        self.bench, self.documents = bench, documents
        self.config = RunConfig.from_mapping(
            {
                "model": "llama3_8b",
                "architecture": SHAPES[bench.size(shape, "tiny")],
                "training": {
                    "seq_len": bench.size(8192, 64),
                    "batch_size": num_rows,
                    "precision": precision,
                    "deterministic": deterministic,
                },
                "data": {"document_mask": documents != "none"},
                "launch": {"device": bench.device.type},
            }
        )
        self.plan = ParallelPlan(microbatch_size=num_rows, **plan)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.use_deterministic_algorithms(deterministic)
        self.engine = build_engine(self.config, self.plan, bench.device)
        self.engine.initialize_weights(0)
        length = self.config.seq_len
        self.batches = [self._batch(_packed_positions(num_rows, length, length // 8, seed)) for seed in range(4)]
        self.number = 0

    def _batch(self, positions_BS: Tensor) -> Batch:
        tokens_BS = torch.randint(0, self.config.spec.vocab_size, positions_BS.shape)
        batch = Batch(tokens_BS, tokens_BS.roll(-1, 1), None if self.documents == "none" else positions_BS)
        return (batch.with_documents() if self.documents == "varlen" else batch).to(self.bench.device)

    def take(self) -> None:
        """Run the next step; consecutive steps have different documents."""
        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        train_step(self.engine, [batch], learning_rate=1e-4, max_grad_norm=1.0)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.config.batch_size * self.config.seq_len

    def measured(self, repeats: int = 5) -> Row:
        """Return the time, the model FLOPs utilisation and the memory of a step, beside the predicted memory."""
        for _ in range(2):
            self.take()
        self.bench.memory()  # reset the peaks, now that all states and graphs exist
        ms = self.bench.milliseconds(self.take, repeats)
        allocated, reserved = self.bench.memory()
        return self.speed(ms) | {
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
            "allocated GiB": allocated,
            "reserved GiB": reserved,
            "rehearsed GiB": self._rehearsed(),
            "estimated GiB": self._estimated(),
        }

    def speed(self, ms: float) -> Row:
        """Return the rates that follow from the time of a step."""
        gpu = None if self.bench.is_tiny else recognise_gpu(torch.cuda.get_device_name())
        flops = self.tokens * flops_per_token(self.config.spec, self.config.seq_len)
        return {
            "ms": ms,
            "tokens/s": 1e3 * self.tokens / ms,
            "TFLOP/s": flops / ms * 1e3 / TFLOP,
            "MFU %": 100 * flops / ms * 1e3 / gpu.bf16_flops if gpu else 0.0,
        }

    def _rehearsed(self) -> float | str:
        if self.bench.size(self.documents, "mask") == "mask" and not self.bench.is_tiny:
            return "-"  # on CUDA, the dry run assumes the varlen kernel
        return rehearse(self.config, self.plan).profile.peak_bytes / GIB

    def _estimated(self) -> float:
        sizes = sizes_of(self.config, self.plan)
        sizes["documents"] = self.documents  # type: ignore[typeddict-item]
        return estimate_memory(self.config.spec, self.plan, **sizes).peak_bytes / GIB


def training(bench: Bench) -> Iterator[Row]:
    """Yield whole steps of 1B and 3B at 8k tokens, the most informative first."""
    combinations = [
        (True, "varlen", "none"),
        (True, "varlen", "selective"),
        (False, "varlen", "none"),
        (False, "mask", "none"),
        (False, "varlen", "selective"),
        (True, "mask", "none"),
        (True, "mask", "selective"),
        (False, "mask", "selective"),
    ]
    if bench.is_tiny:  # a CPU has no varlen kernel
        combinations = [one for one in combinations if one[1] == "mask"]
    for compiled, documents, recompute in combinations:
        for shape in ("1B", "3B"):
            if bench.is_late:
                return
            row = {"model": shape, "compiled": compiled, "attention": documents, "recompute": recompute}
            yield attempted(row, _measured, bench, shape, documents=documents, compile=compiled, recompute=recompute)


def _measured(bench: Bench, shape: str, *, repeats: int = 5, **settings: Any) -> Row:
    return Steps(bench, shape, **settings).measured(repeats)


def peer(bench: Bench) -> Iterator[Row]:
    """Yield steps of this engine and of torchtitan's model of the same shape, alternating in one process."""
    for shape in ("1B", "3B"):
        if bench.is_late:
            return
        yield from _turns(bench, shape)


def _turns(bench: Bench, shape: str) -> Iterator[Row]:
    row = {"model": shape, "rounds": bench.size(8, 1)}
    try:
        from benchmarks.gpu_peer import TitanSteps
    except ImportError as error:
        yield row | {"error": f"torchtitan 0.2.2 is not there: {error}"}
        return
    ours = Steps(bench, shape, documents="none", compile=True, recompute="selective")
    bench.memory()
    theirs = TitanSteps(bench.device, ours.config.spec, ours.config.seq_len, ours.batches)
    rounds = [[bench.milliseconds(steps.take, 1) for steps in (ours, theirs)] for _ in range(row["rounds"])]
    for name, times in zip(("ours", "torchtitan"), zip(*rounds, strict=True), strict=True):
        yield row | {"whose": name} | ours.speed(statistics.median(times))
    ratios = sorted(b / a for a, b in rounds)
    yield row | {"their time over ours": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}


def profile(bench: Bench) -> Iterator[Row]:
    """Yield the time of one compiled 1B step by kernel, and the time in which no kernel runs."""
    steps = Steps(bench, "1B", documents=bench.size("varlen", "mask"), compile=True, recompute="selective")
    for _ in range(5):
        steps.take()
    bench.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (not bench.is_tiny)
    started = time.perf_counter()
    with torch.profiler.profile(activities=kinds) as watched:
        steps.take()
        bench.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started)
    device_time = "self_cpu_time_total" if bench.is_tiny else "self_device_time_total"
    found = sorted(watched.key_averages(), key=lambda event: -getattr(event, device_time))
    busy_ms = sum(getattr(event, device_time) for event in found) / 1e3
    yield {"kernel": "a step, with the profiler's own time", "calls": 1, "ms": wall_ms, "share %": 100.0}
    yield {"kernel": "no kernel runs", "calls": 0, "ms": wall_ms - busy_ms, "share %": 100 * (1 - busy_ms / wall_ms)}
    for event in found[:25]:
        ms = getattr(event, device_time) / 1e3
        yield {"kernel": event.key[:100], "calls": event.count, "ms": ms, "share %": 100 * ms / wall_ms}


def memory(bench: Bench) -> Iterator[Row]:
    """Yield the memory taken besides tensors: by the context, the first product and attention, and a communicator."""
    x = torch.zeros(1, device=bench.device)
    outside, inside = _memory_held(bench)
    yield {"what": "context", "GiB outside the allocator": outside, "GiB inside it": inside}
    size = bench.size(4096, 64)
    x = bench.random(size, size)
    heads = x.view(1, 1, size, size)[..., :64]
    for name, run in (
        ("first product (cuBLAS)", lambda: torch.mm(x, x).sum()),
        ("first attention", lambda: attend(heads, heads, heads, None).sum()),
        ("first communicator (one rank)", lambda: _one_rank(bench)),
    ):
        before = _memory_held(bench)
        run()
        bench.synchronize()
        outside, inside = (now - then for now, then in zip(_memory_held(bench), before, strict=True))
        yield {"what": name, "GiB outside the allocator": outside, "GiB inside it": inside}


def _memory_held(bench: Bench) -> tuple[float, float]:
    """Return the GiB in use outside torch's allocator, and the GiB allocated by it."""
    if bench.is_tiny:
        return 0.0, 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / GIB, torch.cuda.memory_allocated() / GIB


def _one_rank(bench: Bench) -> None:
    backend = "gloo" if bench.is_tiny else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2**20, device=bench.device))
    bench.synchronize()
    dist.destroy_process_group()


def large(bench: Bench) -> Iterator[Row]:
    """Yield a step of 8B, whose states nearly fill 141 GB, and the speed of copying a checkpoint to the host."""
    documents = bench.size("varlen", "mask")
    for compiled in (True, False):
        settings = {"documents": documents, "compile": compiled, "recompute": "full"}
        yield attempted({"model": "8B", "compiled": compiled}, _measured, bench, "8B", repeats=3, **settings)
        if bench.is_late:
            return
    state = {"weights": bench.random(bench.size(2**32, 2**16))}
    num_bytes = state["weights"].nbytes
    for name, run in _stagings(bench, state):
        yield {"what": name, "GiB": num_bytes / GIB, "GB/s": num_bytes / GB / (bench.milliseconds(run, 2) / 1e3)}


def _stagings(bench: Bench, state: dict[str, Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

    yield (
        "staged as async_save does by default",
        lambda: BlockingAsyncStager(cache_staged_state_dict=False).stage(state),
    )
    options = StagingOptions(
        use_pinned_memory=not bench.is_tiny,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=not bench.is_tiny,
    )
    pinned = DefaultStager(options)
    yield "staged in pinned memory that is kept", lambda: pinned.stage(state)


def precision(bench: Bench) -> Iterator[Row]:
    """Yield 1B steps in other precisions, and with deterministic kernels."""
    for name, settings in (
        ("bf16", {}),
        ("bf16, deterministic", {"deterministic": True}),
        ("fp16", {"precision": "fp16"}),
        ("fp32", {"precision": "fp32", "documents": "mask"}),
        ("fp32, rows of one document", {"precision": "fp32", "documents": "none"}),
    ):
        if bench.is_late:
            return
        every = {"recompute": "selective", "documents": bench.size("varlen", "mask")}
        yield attempted({"what": name}, _measured, bench, "1B", repeats=3, **every | settings)


STAGES = (machine, parity, attention, loss, fp8, training, peer, profile, memory, large, precision)


def main() -> None:
    """Run one stage and write its rows as they come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=[stage.__name__ for stage in STAGES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
        torch.compiler.set_default_backend("aot_eager")  # builds graphs but generates no code
    else:
        torch.cuda.set_device(0)
    bench = Bench(torch.device(options.device), time.monotonic() + 0.8 * options.seconds)
    stage = next(stage for stage in STAGES if stage.__name__ == options.stage)
    rows = []
    for row in stage(bench):
        rows.append(row)
        options.rows.write_text(json.dumps(rows, indent=1))
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
