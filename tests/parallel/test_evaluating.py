"""Every kind of model scores and continues texts on ranks that divide it as one process does."""

from dataclasses import replace

import pytest
import torch
from distributed import run_ranks
from parity import ADAPTED_RELATIVE, DORA, PACKED, RELATIVE, SPARSE, TIED, draw_adapters
from width import cases

from llama_core.models.batched_generation import generate_rows
from llama_core.models.llama import Llama, initialize_weights, with_adapters
from llama_core.models.scoring import Continuation, log_likelihoods
from llama_core.parallel.evaluating import EvaluatingRanks
from llama_core.planning.plan import ParallelPlan

SPECS = {
    "tied": TIED,
    "relative with adapters": ADAPTED_RELATIVE,
    "experts": SPARSE,
    "relative": RELATIVE,
    "dora": DORA,
    "nf4": PACKED,
}
PLAN = ParallelPlan(tp=2, sequence_parallel=False)
ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3], [2]]


def answers(spec, divides):
    """Return log-likelihoods, and the texts that follow some prompts, in fp64."""
    spec = replace(spec, num_layers=4)
    with torch.device("meta"):
        model = with_adapters(Llama(spec, compute_dtype=torch.float64).to(torch.float64))
    if divides:
        EvaluatingRanks(PLAN, "cpu").divide(model)
    model.to_empty(device="cpu")
    initialize_weights(model, 0)
    draw_adapters(model)
    continuations = [Continuation(tuple(row[:1]), tuple(row[1:] or row)) for row in ROWS]
    scores = log_likelihoods(model, continuations, context_length=16)
    return scores, generate_rows(model, ROWS, num_tokens=6, is_end=lambda row, tokens: len(tokens) > row + 2)


@pytest.mark.parametrize("spec", cases(SPECS, narrow=["relative with adapters"]))
def test_tensor_parallel_ranks_answer_as_one_process(spec):
    scores, texts = answers(spec, divides=False)
    assert len(set(map(tuple, texts))) == len(ROWS)
    for found, written in run_ranks(PLAN.world_size, answers, spec, True):
        assert [one.total for one in found] == pytest.approx([one.total for one in scores], rel=1e-9)
        assert [one.is_greedy for one in found] == [one.is_greedy for one in scores]
        assert written == texts
