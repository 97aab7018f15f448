"""The head, and the loss toward a teacher: another softmax, and the teacher's tokens.

Read it beside ``models/distill.py``. Rows of logits are widened in blocks on every device, CUDA
too.
"""

from collections.abc import Iterator

from llama_core.planning.program import ends
from llama_core.planning.program.operations import FP32_BYTES, INT64_BYTES

_NUM_STATISTICS = 3
"""Of each token, over all parts of the vocabulary: the largest logit, a sum of exponentials, the
target's logit."""


class Head(ends.Head):
    """The head, with the loss toward a teacher."""

    def logits(self) -> ends.LogitsCost:
        """Return what the logits cost, with what makes losses of them and the teacher's."""
        vocab_size = self.vocab_size
        num_chunks, chunk = self.chunks()
        block = -(-chunk // ends.LOSS_NUM_BLOCKS)
        held = chunk * vocab_size * self.itemsize
        held += block * vocab_size * FP32_BYTES  # rows in fp32
        held += block * (vocab_size + 1)  # which columns are the teacher's tokens
        held += self.tokens * (INT64_BYTES + 1)  # targets, and which of them are ignored
        held += 2 * self.tokens * FP32_BYTES  # cross-entropies and divergences, beside the losses
        held += chunk * (self.top_k * self._bytes_of_top + _NUM_STATISTICS * FP32_BYTES)
        # twice: read, widened, made exponentials in two steps, masked, and summed or scaled and
        # written
        moved = self.tokens * vocab_size * (2 * (self.itemsize + 11 * FP32_BYTES) + self.itemsize)
        return ends.LogitsCost(num_chunks, held, moved)

    def factors(self, pairs: list[tuple[int, int]]) -> Iterator[ends.LogitFactors]:
        """Yield the factors of each product whose sum is the logits."""
        for factors in super().factors(pairs):
            workspace = 0
            # on CUDA too, because this loss marks ignored tokens there
            if factors.gradient.elements:
                workspace = self.gradient_workspace(factors.tokens, factors.width)
            yield factors._replace(workspace_bytes=workspace)

    @property
    def top_k(self) -> int:
        """The teacher's tokens for each target.

        Their log-probabilities are as many values, and that of all other tokens is one.
        """
        return (self.setting.values_per_token - 1) // 2

    @property
    def _bytes_of_top(self) -> int:
        """Bytes that a chunk holds for each token of the teacher."""
        is_divided = self.setting.tp > 1
        # the token and its column, its logit alone and relative to the largest, its probabilities
        # and their gradient
        num_bytes = 2 * INT64_BYTES + 5 * FP32_BYTES
        if is_divided:  # whether this rank has it, its logit gathered of all ranks, and the largest
            num_bytes += 1 + (self.setting.tp + 1) * FP32_BYTES
        return num_bytes
