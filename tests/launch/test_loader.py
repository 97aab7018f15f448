import torch

from llama_core.launch.rank.loader import own_rows
from llama_core.models.batch import IGNORE_INDEX, Batch
from llama_core.planning.plan import ParallelPlan


def test_a_padded_batch_keeps_its_rows_and_what_its_objective_reads_and_adds_no_target():
    tokens, weights = torch.arange(1, 13).view(3, 4), torch.rand(3, 4) + 1
    padded = own_rows(Batch(tokens, tokens, None, per_token={"weight": weights}), ParallelPlan(), 5)
    assert torch.equal(padded.tokens_BS[:3], tokens)
    assert torch.equal(padded.per_token["weight"][:3], weights)
    assert padded.tokens_BS.shape == padded.per_token["weight"].shape == (5, 4)
    assert (padded.targets_BS[3:] == IGNORE_INDEX).all()
    assert int(padded.num_targets()) == tokens.numel()
