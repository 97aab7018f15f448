"""A stream of batches that are all the same."""

import torch

from llama_core.models.batch import Batch
from llama_core.parallel.ranks import own_rank

ROWS = 4
SEQ_LEN = 16


class OneBatch:
    """Always the same rows, of which every rank has its share."""

    def __init__(self, plan):
        tokens_BS = torch.randint(0, 128, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        whole = Batch(tokens_BS[:, :-1], tokens_BS[:, 1:].clone(), None)
        self.own = whole.split(ROWS // plan.dp)[plan.dp_rank(own_rank())]

    def next_batch(self):
        return self.own

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
