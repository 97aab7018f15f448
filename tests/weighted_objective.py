"""Cross-entropy with a weight for each token, from whole logits: an objective with a program of its own."""

import torch
import torch.nn.functional as F

from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.head import logits
from llama_core.objectives.traits import ObjectiveType
from llama_core.planning.program import ends
from llama_core.planning.program.operations import FP32_BYTES, Size

WEIGHTED = ObjectiveType(
    "weighted", module="weighted_objective", program="weighted_objective", per_token=("mask",), unit="weighted nats"
)


class Weighted:
    def loss(self, head, batch):
        logits_TV = logits(head)
        wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        targets_T = batch.targets_BS.flatten()
        losses_T = F.cross_entropy(wide_TV, targets_T, reduction="none", ignore_index=IGNORE_INDEX)
        return losses_T @ batch.per_token["mask"].flatten().to(losses_T.dtype)

    def count(self, batch):
        return batch.num_targets()


def build(training):
    return Weighted()


class Head(ends.Head):
    def loss(self, pairs):
        ((hidden, weight),) = pairs
        out = self.product(hidden, weight, self.spec.vocab_size // self.setting.tp)
        if self.setting.tp > 1:
            whole = Size(self.sizes[out].elements * self.setting.tp, self.itemsize)
            sends = self.tensor_parallel("all_gather", None, whole.num_bytes)
            out = self.result("gather", [out], whole, sends=sends)
        wide = self.cast(out, FP32_BYTES)
        log_probabilities = self.result("softmax", [wide], self.sizes[wide])
        loss = self.result("pick", [log_probabilities], Size(0, FP32_BYTES))
        self.end(out, wide)
        return loss
