"""The head, and the loss of pairs of answers: the cross-entropy of each token, which the backward computes again.

Read it beside ``models/preferences.py`` and ``linear_cross_entropies`` in ``models/loss.py``.
"""

from llama_core.planning.program import ends
from llama_core.planning.program.ends import LOSS_NUM_BLOCKS, loss_chunk_tokens
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES, BothWays, Product, Size

VALUES_PER_TOKEN = 4
"""Of each token: its log-probability, whether an answer begins with it, whether it counts, and its reference."""


class Head(ends.Head):
    """The head, with the cross-entropy of each token, from which the losses of whole answers are made."""

    def loss(self, pairs: list[tuple[int, int]]) -> int:
        """Append the cross-entropies of the sum of some products of tokens and a matrix, and the loss of the answers.

        Args:
            pairs: the factors of each product.
        """
        vocab_size = self.spec.vocab_size // self.setting.tp
        tokens = self.tokens
        limit = loss_chunk_tokens(vocab_size, self.spec.hidden_size, self.itemsize)
        num_chunks = -(-tokens // limit)
        chunk = -(-tokens // num_chunks)
        held = chunk * vocab_size * self.itemsize
        if not self.setting.on_cuda:  # fp32 rows for the softmax; targets, and which of them are ignored
            held += -(-chunk // LOSS_NUM_BLOCKS) * vocab_size * FP32_BYTES + tokens * (INT64_BYTES + 1)
        moved = 3 * tokens * vocab_size * self.itemsize  # read for the row's sum, read again, replaced by the gradient
        held_back = held + 2 * tokens * FP32_BYTES  # losses again, and what each token's gradient is multiplied with
        moved_back = moved + 2 * tokens * vocab_size * self.itemsize
        products = []
        for left, right in pairs:
            is_trained = right in self.trained
            size = self.sizes[left]
            width = size.elements // tokens
            products.append(Product(tokens, width, vocab_size))
            if self.sizes[right].itemsize != self.itemsize:
                cast = self.sizes[right].elements * self.itemsize
                held += cast
                held_back += cast
            if not is_trained:
                continue
            of_matrix = self.sizes[right].elements * FP32_BYTES
            moved_back += 2 * num_chunks * of_matrix
            if self.weight_itemsize != FP32_BYTES:  # accumulated in fp32, then cast
                held_back += of_matrix
            if not self.setting.on_cuda:
                # tokens with the ignored ones zeroed, and rows of the matrix's gradient
                held_back += size.num_bytes + -(-vocab_size // LOSS_NUM_BLOCKS) * width * self.itemsize
        if len(pairs) > 1:
            kind = "adapted_linear_losses"
        else:
            kind = "linear_losses" if pairs[0][1] in self.trained else "frozen_linear_losses"
        losses = self.result(
            kind,
            [factor for pair in pairs for factor in pair],
            Size(tokens, FP32_BYTES),
            products=tuple(products),
            workspace=BothWays(held, held_back),
            traffic=BothWays(moved, moved_back),
        )
        # sums over answers: a number and some values of each token, and as many of each answer
        values = tokens * (INT64_BYTES + 2 * VALUES_PER_TOKEN * FP32_BYTES)
        return self.result("answers", [losses], Size(0, FP32_BYTES), workspace=BothWays(values, tokens * FP32_BYTES))
