"""Builds the objective of the next token."""

from torch import Tensor

from llama_core.config.settings import TrainingConfig
from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs
from llama_core.models.loss import linear_cross_entropy


class NextToken:
    """The cross-entropy of every token's target, without ever holding the logits of all tokens.

    Args:
        z_loss: how much of the squares of log Z is trained for besides.
        mtp_weight: how much the mean loss of prediction modules, if the model has some, is trained for besides.
    """

    def __init__(self, z_loss: float = 0.0, mtp_weight: float = 0.3) -> None:
        self.z_loss = z_loss
        self.mtp_weight = mtp_weight

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the cross-entropy summed over the targets; its gradient has that of ``z_loss``."""
        return linear_cross_entropy(
            head.hidden_TD,
            head.weight_VD,
            batch.targets_BS.flatten(),
            vocab_group=head.vocab_group,
            adapter=head.adapter,
            z_loss=self.z_loss,
        )

    def count(self, batch: Batch) -> Tensor:
        """Return the number of targets."""
        return batch.num_targets()


def build(training: TrainingConfig) -> NextToken:
    """Return the objective, with its settings."""
    return NextToken(training.z_loss, training.mtp_weight)
