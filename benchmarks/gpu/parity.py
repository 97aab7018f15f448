"""How far the kernels are from the same computation in fp64.

A distance is the largest deviation, relative to the largest number of the result.
"""

# Shape suffixes: B batch, S sequence, T tokens, N query heads, K key/value heads, H head dim, D model dim,
# V vocabulary, R rows, I columns of the rows, O columns of the result, E groups

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, Row, name_of
from llama_core.config.run import RunConfig
from llama_core.models.attention import attend, document_mask
from llama_core.models.batch import Documents
from llama_core.models.block_attention import VARLEN, block_backward
from llama_core.models.grouped import grouped_product
from llama_core.models.loss import linear_cross_entropy
from llama_core.parallel import document_chunks
from llama_core.parallel.context import ring_masks, sequence_index, shard_sequence
from llama_core.parallel.document_chunks import DocumentChunks
from llama_core.parallel.gathered_attention import held_chunks, held_documents
from llama_core.parallel.ring import attention_over_blocks
from llama_core.rehearsal.byte_counter import replaced
from llama_core.training.flash import activate_flash_attention

NUM_ROWS = 2
QUERY_HEADS = 8
KEY_HEADS = 2
HEAD_DIM = 64
RING_SIZE = 4


def packed_positions(num_rows: int, row_length: int, mean_length: int, seed: int = 0) -> Tensor:
    """Return positions, on the CPU, of rows packed with documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    starts_BS = (torch.rand((num_rows, row_length), generator=generator) < 1 / mean_length).long()
    index_S = torch.arange(row_length)
    return index_S - (starts_BS * index_S).cummax(1).values


class _Attention:
    """Queries, keys and values of rows with documents, and their attention in fp64."""

    def __init__(self, bench: Bench) -> None:
        row_length = bench.size(2048, 64)
        torch.manual_seed(0)
        self.heads = [
            bench.random(NUM_ROWS, num_heads, row_length, HEAD_DIM) for num_heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
        ]
        self.positions_BS = packed_positions(NUM_ROWS, row_length, row_length // 5)
        self.documents = Documents.of_positions(self.positions_BS)
        self.on_device = self.documents._replace(starts=self.documents.starts.to(bench.device))
        self.mask = document_mask(self.positions_BS, torch.float64).to(bench.device)
        self.window = bench.size(256, 6)
        self.mask_of_window = document_mask(self.positions_BS, torch.float64, self.window).to(bench.device)
        wide = [x.double() for x in self.heads]
        self.in_documents = _with_gradients(partial(attend, mask=self.mask), wide)
        self.in_window = _with_gradients(partial(attend, mask=self.mask_of_window), wide)
        self.causal = _with_gradients(partial(attend, mask=None), wide)


def attention(bench: Bench) -> Iterator[Row]:
    """Yield the distances of attention over whole rows."""
    exact = _Attention(bench)
    starts = exact.on_device.starts
    with_empty = exact.on_device._replace(starts=torch.cat((starts, starts[-1:].expand(3))))
    in_window = exact.on_device._replace(window=exact.window)
    for what, mask, expected in (
        ("mask", exact.mask.to(torch.bfloat16), exact.in_documents),
        ("documents", exact.on_device, exact.in_documents),
        ("documents, three of them empty", with_empty, exact.in_documents),
        ("sliding window, mask", exact.mask_of_window.to(torch.bfloat16), exact.in_window),
        ("sliding window, documents", in_window, exact.in_window),
    ):
        row = {"what": what, "dtype": "bfloat16"}
        yield bench.attempted(row, _distances, partial(_attended, exact.heads, mask), expected)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        heads = [x.to(dtype) for x in exact.heads]
        row = {"what": "causal", "dtype": name_of(dtype)}
        yield bench.attempted(row, _distances, partial(_attended, heads, None), exact.causal)


def _attended(heads: list[Tensor], mask: Tensor | Documents | None) -> list[Tensor]:
    return _with_gradients(partial(attend, mask=mask), heads)


def _distances(
    ours: Callable[[], list[Tensor]],
    exact: list[Tensor],
    names: Sequence[str] = ("output", "grad q", "grad k", "grad v"),
) -> Row:
    pairs = zip(names, ours(), exact, strict=True)
    return {name: float((x.double() - y).abs().max() / y.abs().max()) for name, x, y in pairs}


def _with_gradients(attention: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the attention of q, k and v, and its gradients for a fixed upstream gradient."""
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, _upstream(out))]


def _upstream(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator).to(out)


def divided(bench: Bench) -> Iterator[Row]:
    """Yield the distances of attention as the ranks of a divided sequence compute it, one rank after the other."""
    exact = _Attention(bench)
    ring = partial(_ring, bench, exact.heads)
    gathered = partial(_gathered, bench, exact.heads)
    documents = exact.documents
    for what, ours, expected in (
        ("ring of 4", partial(ring, None), exact.causal),
        ("ring of 4, documents", partial(ring, exact.positions_BS), exact.in_documents),
        ("ring of 4, sliding window", partial(ring, exact.positions_BS, exact.window), exact.in_window),
        ("documents, gathered by 4", partial(gathered, documents), exact.in_documents),
        ("documents, each cut by 4", partial(gathered, documents, shortest_piece=1), exact.in_documents),
        ("sliding window, documents, gathered by 4", partial(gathered, documents, exact.window), exact.in_window),
    ):
        yield bench.attempted({"what": what, "dtype": "bfloat16"}, _distances, ours, expected)


def _ring(bench: Bench, tensors: list[Tensor], positions_BS: Tensor | None, window: int = 0) -> list[Tensor]:
    """Return attention and gradients as the ranks of a ring compute them."""
    whole = tensors[0].shape[2]
    out, *grads = (torch.zeros_like(x, dtype=torch.float64) for x in (tensors[0], *tensors))
    upstream = _upstream(out).to(tensors[0].dtype)
    places = [sequence_index(whole, rank, RING_SIZE, bench.device) for rank in range(RING_SIZE)]
    kv = [torch.stack((tensors[1][:, :, place], tensors[2][:, :, place])) for place in places]
    for rank, place in enumerate(places):
        own = None if positions_BS is None else positions_BS.to(bench.device)[:, place]
        masks = ring_masks(own, place, tensors[0].dtype, window, cp_rank=rank, cp_size=RING_SIZE)
        sources = [(rank - step) % RING_SIZE for step in range(RING_SIZE)]
        q = tensors[0][:, :, place]
        part, lse = attention_over_blocks(q, (kv[source] for source in sources), masks)
        out[:, :, place] = part.double()
        for source, mask in zip(sources, masks, strict=True):
            grad_q, grad_kv = block_backward(upstream[:, :, place], q, part, lse, kv[source], mask=mask)
            grads[0].index_add_(2, place[mask.queries], grad_q.double())
            for grad, piece in zip(grads[1:], grad_kv, strict=True):
                grad.index_add_(2, places[source][mask.keys], piece.double())
    return [out, *grads]


def _gathered(
    bench: Bench,
    tensors: list[Tensor],
    documents: Documents,
    window: int = 0,
    *,
    shortest_piece: int = document_chunks.SHORTEST_PIECE,
) -> list[Tensor]:
    """Return the same as computed by ranks that gather keys and values."""
    batch, _, length, _ = tensors[0].shape
    own_length = length // RING_SIZE
    upstream = _upstream(tensors[0])
    q_TNH, k_TKH, v_TKH, grad_out_TNH = (x.transpose(1, 2).flatten(0, 1) for x in (*tensors, upstream))
    out, *grads = (torch.zeros_like(x, dtype=torch.float64) for x in (q_TNH, q_TNH, k_TKH, v_TKH))
    for rank in range(RING_SIZE):
        with replaced(document_chunks, "SHORTEST_PIECE", shortest_piece):
            chunks = DocumentChunks(documents.starts, batch, length, 2 * RING_SIZE)
            held = held_documents(documents, batch, own_length, cp_rank=rank, cp_size=RING_SIZE)
        first_of_row_B1 = length * torch.arange(batch)[:, None]
        tokens = chunks.order + first_of_row_B1
        own = shard_sequence(tokens, rank, RING_SIZE).flatten().to(bench.device)
        of_chunks = [tokens[:, : (last + 1) * own_length // 2] for last in held_chunks(rank, RING_SIZE)]
        seen = torch.empty(held.key_places.numel(), dtype=torch.int64)
        seen[held.key_places.flatten()] = torch.cat(of_chunks, dim=1).flatten()
        seen = seen.to(bench.device)
        starts = (x.to(bench.device) for x in (held.query_starts, held.key_starts))
        bounds = (*starts, min(documents.row_length, own_length // 2), documents.row_length, window)
        q, k, v, grad_out = q_TNH[own], k_TKH[seen], v_TKH[seen], grad_out_TNH[own]
        part, lse = VARLEN.forward(q, k, v, *bounds)
        parts = (part, *VARLEN.backward(grad_out, q, k, v, part, lse, *bounds))
        for whole, x, index in zip((out, *grads), parts, (own, own, seen, seen), strict=True):
            whole.index_add_(0, index, x.double())
    return [x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (out, *grads)]


def experts(bench: Bench) -> Iterator[Row]:
    """Yield the distances of the grouped products of experts, some of which have no tokens."""
    for what, shares in (
        ("8 experts", (1, 1, 1, 1, 1, 1, 1, 1)),
        ("8 experts, the first without tokens", (0, 2, 1, 1, 1, 1, 1, 1)),
        ("8 experts, three without tokens", (3, 0, 2, 0, 1, 1, 1, 0)),
        ("8 experts, one with all tokens", (0, 0, 8, 0, 0, 0, 0, 0)),
    ):
        yield bench.attempted({"what": what, "dtype": "bfloat16"}, _grouped, bench, shares)


def _grouped(bench: Bench, shares: Sequence[int]) -> Row:
    rows, columns, results = bench.size((128, 1024, 512), (8, 16, 32))
    sizes = torch.tensor([rows * share for share in shares], device=bench.device)
    ends_E = sizes.cumsum(0).int()
    x_RI = bench.random(rows * sum(shares), columns)
    w_EIO = bench.random(len(shares), columns, results)
    _leave_nan(x_RI, w_EIO, x_RI.new_empty(len(x_RI), results))
    ours = partial(_product_with_gradients, grouped_product, [x_RI, w_EIO], ends_E)
    exact = _product_with_gradients(_product_by_group, [x_RI.double(), w_EIO.double()], ends_E)
    return _distances(ours, exact, ("output", "grad rows", "grad matrices"))


def _leave_nan(*likes: Tensor) -> None:
    """Fill memory that is free again with NaN, so that a result that nobody writes is seen."""
    for like in likes:
        torch.full_like(like, math.nan)


def _product_with_gradients(product: Callable[..., Tensor], tensors: list[Tensor], ends_E: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out_RO = product(*leaves, ends_E)
    return [out_RO.detach(), *torch.autograd.grad(out_RO, leaves, _upstream(out_RO))]


def _product_by_group(x_RI: Tensor, w_EIO: Tensor, ends_E: Tensor) -> Tensor:
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    return torch.cat([x @ w for x, w in zip(torch.split(x_RI, sizes), w_EIO, strict=True)])


def loss(bench: Bench) -> Iterator[Row]:
    """Yield the distances of the head and its loss."""
    tokens, hidden, vocab = bench.size((4096, 2048, 128256), (64, 32, 512))
    operands = [bench.random(tokens, hidden), 0.02 * bench.random(vocab, hidden, dtype=torch.float32)]
    for what, z_loss in {"loss": 0.0, "loss, z-loss": 1e-2}.items():
        exact = _loss_and_gradients([x.double() for x in operands], z_loss)
        ours = partial(_loss_and_gradients, [x.bfloat16() for x in operands], z_loss)
        row = {"what": what, "dtype": "bfloat16"}
        yield bench.attempted(row, _distances, ours, exact, ("loss", "grad hidden", "grad weight"))


def _loss_and_gradients(operands: list[Tensor], z_loss: float) -> list[Tensor]:
    hidden_TD, weight_VD = (x.detach().requires_grad_() for x in operands)
    targets_T = torch.arange(len(hidden_TD), device=hidden_TD.device) * 31 % len(weight_VD)
    loss = linear_cross_entropy(hidden_TD, weight_VD, targets_T, z_loss=z_loss)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden_TD, weight_VD))]


def replaced_flash(bench: Bench) -> Iterator[Row]:
    """Yield the FlashAttention that replaces torch's own kernel here, and its distances if one does."""
    sizes = {"num_heads": QUERY_HEADS, "num_kv_heads": KEY_HEADS, "head_dim": HEAD_DIM}
    config = RunConfig.from_mapping(
        {"architecture": sizes, "training": {"precision": "bf16"}, "launch": {"device": bench.device.type}}
    )
    implementation = activate_flash_attention(config, bench.device)
    yield {"flash attention": implementation or "torch's own kernels stay"}
    if implementation is None:
        return
    for rows in (attention(bench), divided(bench)):
        for row in rows:
            yield row | {"what": f"{row['what']}, {implementation}"}
