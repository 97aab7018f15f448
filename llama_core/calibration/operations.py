"""The engine's operations as calibration measures them: the kinds and sizes that ``planning.time.measured`` asks for.

Each is built with inputs of the sizes that were asked for, from the functions that training calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llama_core.config.measured_rates import Sizes
from llama_core.config.settings import TrainingConfig
from llama_core.models import fp8, moe, nf4
from llama_core.models.activations import OF_BOTH, OF_GATE
from llama_core.models.attention import attend, document_mask
from llama_core.models.batch import Documents
from llama_core.models.cast_weights import cast_grouped, cast_linear
from llama_core.models.grouped import grouped_outer_product, grouped_product
from llama_core.models.layers import rms_norm
from llama_core.models.loss import linear_cross_entropy
from llama_core.models.rotation import Rotation, rotate
from llama_core.training.muon import orthogonalised
from llama_core.training.optimizer import build_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LINK_REPEATS = 8
HEAD_DIM = 64
"""Numbers in a row of a rotated or normalised tensor."""
WIDTH = 512
GPU_WIDTH = 4096
"""The same of what a GPU normalises."""


@dataclass(frozen=True)
class Prepared:
    """An operation with its inputs."""

    run: Callable[[], Tensor]
    """Its forward."""
    inputs: Sequence[Tensor] = ()
    """What its backward makes gradients of; none if only the forward is measured."""
    repeats: int | None = None
    """How often it is run, if that may not depend on the time it takes."""


def prepare(kind: str, sizes: Sizes, device: torch.device) -> Prepared:
    """Return the operation of a kind, such as ``linear bf16 forward``, with random inputs of some sizes."""
    name, *words = kind.split()
    return _BUILDERS[name](words, sizes, device)


def _random(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=device).to(dtype)


def _linear(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """A product with an fp32 weight, cast at each use, and both gradients."""
    rows, columns, outputs = sizes
    x = _random((rows, columns), DTYPES[words[0]], device).requires_grad_()
    weight = _random((outputs, columns), torch.float32, device).requires_grad_()
    if words[0] == "fp32":
        return Prepared(lambda: F.linear(x, weight), (x, weight))
    return Prepared(lambda: cast_linear(x, weight, None), (x, weight))


def _product(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """A product, or one of its gradients alone."""
    if words[0] == "fp8":
        return _product_fp8(words, sizes, device)
    rows, columns, outputs = sizes
    dtype = DTYPES[words[0]]
    shapes = ((rows, columns), (outputs, columns), (rows, outputs))
    x, weight, grad = (_random(shape, dtype, device) for shape in shapes)
    ways = {"forward": lambda: x @ weight.t(), "input": lambda: grad @ weight, "weight": lambda: grad.t() @ x}
    return Prepared(ways[words[1]])


def _product_fp8(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The same of operands that are rounded to fp8 already, and of which the second one is transposed."""
    rows, columns, outputs = sizes
    shapes = {
        "forward": (rows, columns, outputs),
        "input": (rows, outputs, columns),
        "weight": (outputs, rows, columns),
    }
    height, inner, width = shapes[words[1]]
    left = fp8.rounded(_random((height, inner), torch.bfloat16, device))
    right = fp8.rounded(_random((width, inner), torch.bfloat16, device))
    return Prepared(lambda: fp8.product_of_rounded(left, right, torch.bfloat16))


def _grouped(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The products of equal groups of rows, each with a matrix of its own."""
    groups, rows, columns, outputs = sizes
    dtype = DTYPES[words[1]]
    x, grad = (_random((groups * rows, width), dtype, device) for width in (columns, outputs))
    weight = _random((groups, outputs, columns), dtype, device)
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
    ways = {
        "forward": lambda: grouped_product(x, weight.mT, ends),
        "input": lambda: grouped_product(grad, weight, ends),
        "weight": lambda: grouped_outer_product(grad, x, ends),
    }
    return Prepared(ways[words[2]])


def _experts(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The same with fp32 weights, cast at each use, and both gradients."""
    groups, rows, columns, outputs = sizes
    x = _random((groups * rows, columns), DTYPES[words[0]], device).requires_grad_()
    weight = _random((groups, outputs, columns), torch.float32, device).requires_grad_()
    ends = torch.arange(1, groups + 1, device=device, dtype=torch.int32) * rows
    if words[0] == "fp32":
        return Prepared(lambda: grouped_product(x, weight.mT, ends), (x, weight))
    return Prepared(lambda: cast_grouped(x, weight, None, ends), (x, weight))


def _packed(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """A product with a frozen matrix that is held in NF4."""
    rows, columns, outputs = sizes
    x = _random((rows, columns), DTYPES[words[0]], device).requires_grad_()
    matrix = nf4.pack(_random((outputs, columns), torch.float32, device))
    return Prepared(lambda: nf4.multiply(x, matrix.bytes_OK, matrix.scales_G), (x,))


def _orthogonalise(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """Muon's direction for two matrices of one shape."""
    matrices = [_random(sizes, DTYPES[words[0]], device) for _ in range(2)]
    return Prepared(lambda: orthogonalised(matrices)[0])


def _sort(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The order of tokens by expert, and its inverse."""
    experts = torch.randint(0, 8, sizes, device=device)
    return Prepared(lambda: experts.argsort(stable=True).argsort())


def _rearrange(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    x = _random(_rows(sizes[0]), DTYPES[words[0]], device).requires_grad_()
    order = torch.randperm(len(x), device=device)
    inverse = order.argsort()
    return Prepared(lambda: moe.rearrange(x, order, inverse), (x,))


def _attention(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """Attention of rows that are one document each, told as the engine tells them."""
    rows, heads, key_heads, seq_len, head_dim = sizes
    dtype = DTYPES[words[1]]
    q, k, v = (
        _random((rows, seq_len, number, head_dim), dtype, device).requires_grad_()
        for number in (heads, key_heads, key_heads)
    )
    mask = None
    if words[0] == "varlen":
        starts = torch.arange(rows + 1, device=device, dtype=torch.int32) * seq_len
        documents = Documents(starts, seq_len)
        return Prepared(lambda: attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents), (q, k, v))
    if words[0] == "mask":
        mask = document_mask(torch.arange(seq_len, device=device).expand(rows, -1), dtype)
    return Prepared(lambda: attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask), (q, k, v))


def _loss(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The cross-entropy of tokens and a head, which makes the gradients in its forward."""
    rows, columns, outputs = sizes
    is_trained = words[0] != "frozen"
    hidden = _random((rows, columns), DTYPES[words[0 if is_trained else 1]], device).requires_grad_()
    dtype = torch.float32 if is_trained else hidden.dtype
    weight = (0.02 * _random((outputs, columns), torch.float32, device)).to(dtype).requires_grad_(is_trained)
    targets = torch.randint(0, outputs, (rows,), device=device)
    inputs = (hidden, weight) if is_trained else (hidden,)
    return Prepared(lambda: linear_cross_entropy(hidden, weight, targets), inputs)


def _cast(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    x = _random(sizes, DTYPES[words[0]], device)
    return Prepared(lambda: x.to(DTYPES[words[1]]))


def _rows(elements: int, width: int = WIDTH) -> tuple[int, int]:
    return max(1, elements // width), min(width, elements)


def _pointwise(
    function: Callable[[Tensor], Tensor], words: Sequence[str], sizes: Sizes, device: torch.device
) -> Prepared:
    x = _random(_rows(sizes[0]), DTYPES[words[0]], device).requires_grad_()
    return Prepared(lambda: function(x), (x,))


def _of_two(
    function: Callable[[Tensor, Tensor], Tensor], words: Sequence[str], sizes: Sizes, device: torch.device
) -> Prepared:
    x, y = (_random(_rows(sizes[0]), DTYPES[words[0]], device).requires_grad_() for _ in range(2))
    return Prepared(lambda: function(x, y), (x, y))


def _norm(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The norm of rows, with the gradient of its weights."""
    x = _random(_rows(sizes[0], GPU_WIDTH), DTYPES[words[0]], device).requires_grad_()
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=device, requires_grad=True)
    return Prepared(lambda: rms_norm(x, weight, 1e-5), (x, weight))


def _copy(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """A kernel that reads and writes so many bytes together."""
    source = torch.zeros(max(1, sizes[0] // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Prepared(lambda: target.copy_(source))


def _launch(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """A kernel that has nothing to do, so that all its time is its launch from Python."""
    one = torch.zeros(1, device=device)
    return Prepared(lambda: one.add_(1.0))


def _rotate(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    tokens = max(1, sizes[0] // (8 * HEAD_DIM))
    x = _random((1, tokens, 8, HEAD_DIM), DTYPES[words[0]], device).requires_grad_()
    angles = torch.randn(1, tokens, 1, HEAD_DIM // 2, device=device)
    rotary = Rotation(angles.cos(), angles.sin())
    return Prepared(lambda: rotate(x, rotary), (x,))


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _update(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """The norm of all gradients, and an update that clips them, of matrices of at most a million numbers."""
    side = min(1024, max(1, int(sizes[0] ** 0.5)))
    number = max(1, round(sizes[0] / side**2))
    model = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False, device=device) for _ in range(number))
    optimizer = build_optimizer(model, TrainingConfig.model_validate({"optimizer": words[0]}))
    gradients = [torch.randn_like(weight) for weight in model.parameters()]
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.grad = gradient

    def run() -> Tensor:
        norm = torch.nn.utils.get_total_norm(gradients)
        optimizer.grad_scale = norm.float()  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
        optimizer.step()
        return norm

    return Prepared(run)


def _link(words: Sequence[str], sizes: Sizes, device: torch.device) -> Prepared:
    """A collective of all ranks, or a message from each rank to the next one, of so many bytes."""
    _, num_bytes = sizes
    num_ranks = dist.get_world_size()  # a smaller group of them is as fast, since all share the cores
    part = torch.zeros(max(1, num_bytes // num_ranks), dtype=torch.uint8, device=device)
    floats = torch.zeros(max(1, num_bytes // 4 // num_ranks) * num_ranks, device=device)
    whole = part.new_zeros(num_ranks * len(part))
    rank = dist.get_rank()

    def send() -> None:
        if device.type == "cuda":  # both in one call: NCCL would do the second once the first is done
            received = torch.empty_like(whole)
            to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
            both = [dist.P2POp(dist.isend, whole, to), dist.P2POp(dist.irecv, received, source)]
            for one in dist.batch_isend_irecv(both):
                one.wait()
            return
        to, source = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        work = dist.isend(whole, to)
        dist.recv(torch.empty_like(whole), source)
        assert work is not None
        work.wait()

    ways: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(floats[: len(floats) // num_ranks].clone(), floats),
        "all_reduce": lambda: dist.all_reduce(floats),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": send,
    }

    def run() -> Tensor:
        ways[words[0]]()
        return part

    # a rank that takes one more round than the others would wait for them forever
    return Prepared(run, repeats=LINK_REPEATS)


_BUILDERS: dict[str, Callable[[Sequence[str], Sizes, torch.device], Prepared]] = {
    "linear": _linear,
    "update": _update,
    "link": _link,
    "product": _product,
    "fused_norm": _norm,
    "copy": _copy,
    "launch": _launch,
    "grouped": _grouped,
    "attention": _attention,
    "loss": _loss,
    "cast": _cast,
    "rotate": _rotate,
    "multiply": partial(_of_two, torch.mul),
    "add": partial(_of_two, torch.add),
    "add_bias": partial(_pointwise, lambda x: x + x[0]),
    **{name: partial(_pointwise, activation) for name, activation in OF_GATE.items()},
    **{name: partial(_of_two, activation) for name, activation in OF_BOTH.items()},
    "exp": partial(_pointwise, torch.exp),
    "tanh": partial(_pointwise, torch.tanh),
    "scale": partial(_pointwise, lambda x: 2.0 * x),
    "softmax": partial(_pointwise, lambda x: x.softmax(-1)),
    "log_sum_exp": partial(_pointwise, lambda x: x.logsumexp(-1)),
    "inverse_rms": partial(_pointwise, _inverse_rms),
    "rearrange": _rearrange,
    "experts": _experts,
    "packed": _packed,
    "orthogonalise": _orthogonalise,
    "sort": _sort,
}
