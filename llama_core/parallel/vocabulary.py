"""The token embedding of a vocabulary divided over ranks; ``models.loss`` has its head and loss."""

# Shape suffixes: B batch, S sequence, D model dim, V rows of the table held here

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def vocab_parallel_embedding(tokens_BS: Tensor, weight_VD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the embeddings, [B, S, D] in the weight's dtype: zeros for other ranks' tokens.

    Rank r of ``group`` holds the rows of the tokens r * V to (r + 1) * V - 1. The caller sums the embeddings over the
    group, with a reduce-scatter or an all-reduce. Only one rank adds something for each token, so the sum is exact in
    any dtype to which all ranks round first. The weight's gradient is [V, D], of these rows only.

    Args:
        tokens_BS: token ids in the whole vocabulary, the same on every rank of ``group``.
        weight_VD: this rank's rows of the table.
        group: the ranks that divide the vocabulary, in the order of their parts.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    num_rows = weight_VD.shape[0]
    on_other_rank_BS1 = (tokens_BS // num_rows != dist.get_rank(group))[..., None]
    # other ranks' tokens may take any row; spread them out, because a row that many tokens share has a slow backward
    x_BSD = F.embedding(tokens_BS % num_rows, weight_VD)
    return x_BSD.masked_fill(on_other_rank_BS1, 0)
