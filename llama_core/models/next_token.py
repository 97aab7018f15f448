"""Builds the objective of the next token."""

from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs
from llama_core.models.loss import linear_cross_entropy


class NextToken:
    """The cross-entropy of every token's target, without ever holding the logits of all tokens."""

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over the targets."""
        return linear_cross_entropy(
            head.hidden_TD,
            head.weight_VD,
            batch.targets_BS.flatten(),
            vocab_group=head.vocab_group,
            adapter=head.adapter,
        )

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets."""
        return batch.num_targets()


def build(_: TrainingConfig) -> NextToken:
    """Return the objective, which has no settings."""
    return NextToken()
