"""The head, and the loss of pairs of answers: each token's cross-entropy, computed twice.

Read it beside ``models/preferences.py`` and ``linear_cross_entropies`` in ``models/loss.py``.
"""

from llama_core.planning.program import ends
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES, BothWays, Product, Size

VALUES_PER_TOKEN = 4
"""Of each token: its log-probability, whether an answer begins with it, whether it counts, and its
reference."""


class Head(ends.Head):
    """The head, with each token's cross-entropy, from which the losses of answers are made."""

    def loss(self, pairs: list[tuple[int, int]]) -> int:
        """Append the cross-entropies of a sum of products, and the loss of the answers.

        Args:
            pairs: the factors of each product, of tokens and a matrix.
        """
        tokens = self.tokens
        num_chunks, held, moved = self.logits()  # the backward computes the logits a second time
        # losses again, and what each token's gradient is multiplied with
        held_back = held + 2 * tokens * FP32_BYTES
        moved_back = moved + 2 * tokens * self.vocab_size * self.itemsize
        products = []
        for factors in self.factors(pairs):
            products.append(Product(tokens, factors.width, self.vocab_size))
            held += factors.cast_bytes
            held_back += factors.cast_bytes + factors.workspace_bytes
            moved_back += 2 * num_chunks * factors.gradient.num_bytes  # every chunk adds to it
            if self.weight_itemsize != FP32_BYTES:  # accumulated in fp32, then cast
                held_back += factors.gradient.num_bytes
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
        workspace = BothWays(values, tokens * FP32_BYTES)
        return self.result("answers", [losses], Size(0, FP32_BYTES), workspace=workspace)
