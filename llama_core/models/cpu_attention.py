"""Attention for training on the CPU: torch's fused forward, and a backward of few large matrix products.

torch's own backward works in small tiles. Here a block of queries takes five batched products with all keys that it
sees, and a few passes over its scores. No block sees keys that the mask forbids to all of its queries.

A product in bf16 rounds its result. So the log-sum-exp, which turns scores into logarithms of probabilities, is
subtracted inside the product, as additional columns, and the logarithms that matter come out close to zero, where bf16
is fine. The gradients of the probabilities and their mean are treated alike.

Source: Dao 2023, arXiv:2307.08691, section 3.1 (the backward needs only the output and the log-sum-exp).
"""

# Shape suffixes: B batch, S queries (Q of one block), J keys (V that a block sees), N query heads, K key/value heads,
# G query heads per key head, H head dim, R rows of a block (G * Q), E head dim and additional columns

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llama_core.attention import CPU_CAUSAL, CPU_MASKED, Dtype

aten = torch.ops.aten

ACTIVATION_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""What the table of kernels calls the dtypes of activations."""

BLOCK_QUERIES = 256
"""Queries of a block; a smaller one sees fewer keys in vain, a larger one has larger products."""
NUM_PIECES = 3
"""Numbers in bf16 whose sum is an fp32 number."""
NUM_COLUMNS = 8
"""Additional columns; the last ones are zero, so that rows stay aligned."""


def is_faster(q_BNSH: Tensor, bias_B1SJ: Tensor | None) -> bool:
    """Return whether the backward in blocks is faster than torch's own, and as exact: its row of the table says so."""
    row = CPU_CAUSAL if bias_B1SJ is None else CPU_MASKED
    return row.runs_on(q_BNSH.device.type, ACTIVATION_DTYPES[q_BNSH.dtype])


@torch.library.custom_op("llama_core::cpu_attention", mutates_args=())
def cpu_attention(
    q_BNSH: Tensor, k_BKJH: Tensor, v_BKJH: Tensor, bias_B1SJ: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return softmax attention, in the dtype of ``q_BNSH``, and its log-sum-exp, [B, N, S] in fp32.

    Args:
        q_BNSH: queries.
        k_BKJH: keys; K divides N.
        v_BKJH: values.
        bias_B1SJ: is added to the scores, in the dtype of the queries; -inf if a query does not see a key.
        causal: without a bias, whether query i sees only the keys 0 to i.
    """
    if bias_B1SJ is None:
        out_BNSH, lse_BNS = aten._scaled_dot_product_flash_attention_for_cpu(q_BNSH, k_BKJH, v_BKJH, is_causal=causal)
        return out_BNSH, lse_BNS
    out_BNSH, lse_BNS = _empty_results(q_BNSH)
    for row in range(len(q_BNSH)):
        own = slice(row, row + 1)
        bias_1SJ = _of_row(bias_B1SJ, row)
        for queries, keys in _blocks(q_BNSH, k_BKJH, bias_1SJ, causal):
            out_BNSH[own, :, queries], lse_BNS[own, :, queries] = aten._scaled_dot_product_flash_attention_for_cpu(
                q_BNSH[own, :, queries],
                k_BKJH[own, :, keys],
                v_BKJH[own, :, keys],
                attn_mask=bias_1SJ[None, :, queries, keys],
            )
    return out_BNSH, lse_BNS


@torch.library.custom_op("llama_core::cpu_attention_backward", mutates_args=())
def cpu_attention_backward(  # noqa: PLR0917 - operators have positions
    grad_out_BNSH: Tensor,
    q_BNSH: Tensor,
    k_BKJH: Tensor,
    v_BKJH: Tensor,
    out_BNSH: Tensor,
    lse_BNS: Tensor,
    bias_B1SJ: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; ``out_BNSH`` and ``lse_BNS`` may cover more keys than these."""
    grad_q_BNSH, grad_k_BKJH, grad_v_BKJH = map(empty_tokens_first, (q_BNSH, k_BKJH, v_BKJH))
    if is_faster(q_BNSH, bias_B1SJ):
        for row in range(len(q_BNSH)):
            bias_1SJ = None if bias_B1SJ is None else _of_row(bias_B1SJ, row)
            one = _RowBackward(q_BNSH[row], k_BKJH[row], v_BKJH[row], bias_1SJ, causal=causal)
            for queries, keys in _blocks(q_BNSH, k_BKJH, bias_1SJ, causal):
                grad_out_NQH, out_NQH, lse_NQ = (x[row, :, queries] for x in (grad_out_BNSH, out_BNSH, lse_BNS))
                grad_q_BNSH[row, :, queries] = one.take(grad_out_NQH, out_NQH, lse_NQ, queries, keys)
            grad_k_BKJH[row], grad_v_BKJH[row] = one.grad_kv
            del one  # so that the next row takes its memory
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(grad_out_BNSH, q_BNSH, k_BKJH, v_BKJH, out_BNSH, lse_BNS, 0.0, causal), attn_mask=bias_B1SJ
        )
        for out, grad in zip((grad_q_BNSH, grad_k_BKJH, grad_v_BKJH), grads, strict=True):
            out.copy_(grad)
    return grad_q_BNSH, grad_k_BKJH, grad_v_BKJH


class _RowBackward:
    """The gradients of one row of a batch, block by block.

    Args:
        q_NSH: queries.
        k_KJH: keys.
        v_KJH: values.
        bias_1SJ: as in ``cpu_attention``.
        causal: as in ``cpu_attention``.
    """

    def __init__(self, q_NSH: Tensor, k_KJH: Tensor, v_KJH: Tensor, bias_1SJ: Tensor | None, *, causal: bool) -> None:
        num_heads, num_queries, _ = q_NSH.shape
        self.num_key_heads, num_keys, self.head_dim = k_KJH.shape
        self.scale = self.head_dim**-0.5
        self._q_NSH = q_NSH
        self._bias_1SJ = bias_1SJ
        self._causal = causal
        self._kv_2KJE = q_NSH.new_zeros((2, *k_KJH.shape[:2], self.head_dim + NUM_COLUMNS))
        self._kv_2KJE[0, ..., : self.head_dim] = k_KJH
        self._kv_2KJE[1, ..., : self.head_dim] = v_KJH
        self._kv_2KJE[..., self.head_dim : self.head_dim + NUM_PIECES] = 1
        self._grad_kv_2KJE = torch.zeros_like(self._kv_2KJE, dtype=lse_dtype(q_NSH))
        self._buffers = q_NSH.new_empty((2, num_heads * min(BLOCK_QUERIES, num_queries) * num_keys))

    @property
    def grad_kv(self) -> Tensor:
        """The gradients of keys and values, [2, K, J, H], of all blocks taken."""
        return self._grad_kv_2KJE[..., : self.head_dim]

    def take(self, grad_out_NQH: Tensor, out_NQH: Tensor, lse_NQ: Tensor, queries: slice, keys: slice) -> Tensor:
        """Add a block's share to the gradients of its keys and values, and return the gradients of its queries."""
        q_NQH = self._q_NSH[:, queries]
        k_KVE, v_KVE = self._kv_2KJE[:, :, keys].contiguous()  # oneDNN would copy both at each use
        # probabilities are multiplied by a power of two, and their factors in products are divided by it
        exponents_NQ = self._exponents(q_NQH, k_KVE, lse_NQ, queries, keys)
        grad_out_NQH = grad_out_NQH.to(lse_NQ.dtype) * torch.exp2(-exponents_NQ)[..., None]
        grad_out_KRE = self._rows(grad_out_NQH, (grad_out_NQH * out_NQH).sum(-1))
        q_KRE = self._rows(q_NQH, (lse_NQ - exponents_NQ * math.log(2)) / self.scale)

        shape = (self.num_key_heads, q_KRE.shape[1], k_KVE.shape[1])
        size = shape[0] * shape[1] * shape[2]
        probabilities_KRV, grad_scores_KRV = (buffer[:size].view(shape) for buffer in self._buffers)
        probabilities_KRV.baddbmm_(q_KRE, k_KVE.mT, beta=0, alpha=self.scale)
        self._hide_(probabilities_KRV.unflatten(1, (-1, lse_NQ.shape[1])), queries, keys)
        probabilities_KRV.exp_()
        self._grad_kv_2KJE[1, :, keys] += torch.bmm(probabilities_KRV.mT, grad_out_KRE)
        grad_scores_KRV.baddbmm_(grad_out_KRE, v_KVE.mT, beta=0).mul_(probabilities_KRV)
        self._grad_kv_2KJE[0, :, keys] += _scaled_product(grad_scores_KRV.mT, q_KRE, self.scale)
        grad_q_KRE = _scaled_product(grad_scores_KRV, k_KVE, self.scale)
        return grad_q_KRE[..., : self.head_dim].reshape(out_NQH.shape)

    def _exponents(self, q_NQH: Tensor, k_KVE: Tensor, lse_NQ: Tensor, queries: slice, keys: slice) -> Tensor:
        """Return the logarithm to base 2 of one over each row's typical probability, in whole numbers.

        If n scores are normally distributed with mean m and variance s^2, their log-sum-exp is m + s^2 / 2 + log n, and
        their mean weighted by their probabilities is m + s^2. The mean key estimates m.
        """
        if self._bias_1SJ is not None:
            num_seen_Q = (self._bias_1SJ[0, queries, keys] > -torch.inf).sum(-1).clamp(min=1)
        elif self._causal:
            num_seen_Q = torch.arange(queries.start + 1, queries.stop + 1)
        else:
            num_seen_Q = torch.full((q_NQH.shape[1],), k_KVE.shape[1])
        q_KRH = q_NQH.reshape(self.num_key_heads, -1, self.head_dim)
        means_KR1 = torch.bmm(q_KRH, k_KVE.mean(1, keepdim=True)[..., : self.head_dim].mT)
        means_NQ = self.scale * means_KR1.view(lse_NQ.shape).to(lse_NQ.dtype)
        most_Q = num_seen_Q.to(lse_NQ.dtype).log()
        typical_NQ = (2 * most_Q + means_NQ - lse_NQ).clamp(min=0).minimum(most_Q)
        return torch.round(typical_NQ / math.log(2))

    def _rows(self, x_NQH: Tensor, subtracted_NQ: Tensor) -> Tensor:
        """Return the rows of a block, with columns that subtract a number of each row's own from its products."""
        num_heads, num_queries, _ = x_NQH.shape
        x_NQE = self._kv_2KJE.new_zeros((num_heads, num_queries, self.head_dim + NUM_COLUMNS))
        x_NQE[..., : self.head_dim] = x_NQH
        rest_NQ = -subtracted_NQ
        for column in range(self.head_dim, self.head_dim + NUM_PIECES):
            x_NQE[..., column] = rest_NQ
            rest_NQ = rest_NQ - x_NQE[..., column]
        return x_NQE.view(self.num_key_heads, -1, x_NQE.shape[-1])

    def _hide_(self, scores_KGQV: Tensor, queries: slice, keys: slice) -> None:
        if self._bias_1SJ is not None:
            scores_KGQV += self._bias_1SJ[:, queries, keys]
        elif self._causal:
            own_KGQQ = scores_KGQV[..., queries.start - keys.start :]
            own_KGQQ.masked_fill_(torch.ones(own_KGQQ.shape[-2:], dtype=torch.bool).triu_(1), -torch.inf)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    out = left.new_empty((*left.shape[:-1], right.shape[-1]))
    return out.baddbmm_(left, right, beta=0, alpha=scale)


def _blocks(q_BNSH: Tensor, k_BKJH: Tensor, bias_1SJ: Tensor | None, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield every block of a row's queries, with the keys that any of them sees."""
    num_queries = q_BNSH.shape[2]
    num_keys = k_BKJH.shape[2]
    for start in range(0, num_queries, BLOCK_QUERIES):
        queries = slice(start, min(start + BLOCK_QUERIES, num_queries))
        keys = slice(0, num_keys)
        if bias_1SJ is not None:
            seen = torch.nonzero(bias_1SJ[0, queries].amax(0) > -torch.inf).flatten()
            # if no key is seen, take one: the bias hides it
            keys = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 1)
        elif causal:
            keys = slice(0, queries.stop)
        yield queries, keys


def _of_row(bias_B1SJ: Tensor, row: int) -> Tensor:
    return bias_B1SJ[row if len(bias_B1SJ) > 1 else 0]


def lse_dtype(q_BNSH: Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exp: fp32 or wider."""
    return torch.promote_types(q_BNSH.dtype, torch.float32)


def empty_tokens_first(x_BNSH: Tensor) -> Tensor:
    """Return an empty tensor of the shape of ``x_BNSH`` whose tokens come before the heads in memory."""
    return torch.empty_permuted(x_BNSH.shape, (0, 2, 1, 3), dtype=x_BNSH.dtype, device=x_BNSH.device)


def _empty_results(q_BNSH: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty output and log-sum-exp, in memory as torch's kernel returns them."""
    batch, num_heads, num_queries, _ = q_BNSH.shape
    lse_BSN = q_BNSH.new_empty((batch, num_queries, num_heads), dtype=lse_dtype(q_BNSH))
    return empty_tokens_first(q_BNSH), lse_BSN.transpose(1, 2)


@cpu_attention.register_fake
def _(q_BNSH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(q_BNSH)


@cpu_attention_backward.register_fake
def _(_: Tensor, q_BNSH: Tensor, k_BKJH: Tensor, v_BKJH: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_tokens_first(q_BNSH), empty_tokens_first(k_BKJH), empty_tokens_first(v_BKJH)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, bias_B1SJ, ctx.causal = inputs
    ctx.save_for_backward(*qkv, *output, bias_B1SJ)


def _differentiate(ctx: Any, grad_out_BNSH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *cpu_attention_backward(grad_out_BNSH, *ctx.saved_tensors, ctx.causal), None, None


cpu_attention.register_autograd(_differentiate, setup_context=_save)
