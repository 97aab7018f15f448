"""Every kind of model scores and continues texts on ranks that divide it as one process does."""

from dataclasses import replace

import pytest
import torch
from distributed import run_ranks
from parity import ADAPTED_LATENT, ADAPTED_RELATIVE, DORA, LATENT, PACKED, RELATIVE, SPARSE, TIED, draw_adapters
from tiers import cases

from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.divided import EvaluatingRanks
from llama_core.evaluation.inference.generation import Sampling
from llama_core.evaluation.inference.row_losses import losses_of_rows
from llama_core.evaluation.inference.scoring import Continuation, log_likelihoods
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama, initialize_weights, with_adapters
from llama_core.planning.plan import ParallelPlan

SPECS = {
    "tied": TIED,
    "relative with adapters": ADAPTED_RELATIVE,
    "experts": SPARSE,
    "relative": RELATIVE,
    "dora": DORA,
    "nf4": PACKED,
    "latents": LATENT,
    "latents with adapters": ADAPTED_LATENT,
}
DIVIDED = ParallelPlan(tp=2, pp=2, sequence_parallel=False)
COPIES = ParallelPlan(pp=2, dp_replicate=2, sequence_parallel=False)
ROWS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9, 3], [2], [7, 1, 8], [2, 8, 1, 8, 2], [8, 4, 5, 9, 0], [4]]


def answers(spec, plan):
    """Return log-likelihoods, the losses of rows, and the texts that follow some prompts, in fp64."""
    spec = replace(spec, num_layers=4)
    ranks = EvaluatingRanks(plan, "cpu")
    with torch.device("meta"):
        model = Llama(spec, compute_dtype=torch.float64, layers=ranks.layers(spec)).to(torch.float64)
        model = with_adapters(model)
    ranks.divide(model)
    model.to_empty(device="cpu")
    initialize_weights(model, 0)
    draw_adapters(model)
    rows_BS = torch.tensor([(row * 9)[:9] for row in ROWS])
    restarting_BS = torch.arange(9).expand_as(rows_BS) % 4
    batches = [Batch(rows_BS, rows_BS.roll(1), positions_BS) for positions_BS in (None, restarting_BS)]
    scores = ranks.shared(ROWS, lambda rows: log_likelihoods(model, list(map(continuation, rows)), context_length=16))
    return scores, losses_of_rows(model, batches), drawn_texts(model, Sampling()), drawn_texts(model, Sampling(1.0))


def continuation(row):
    return Continuation(tuple(row[:1]), tuple(row[1:] or row))


def drawn_texts(model, sampling):
    return generate_rows(
        model,
        ROWS,
        num_tokens=6,
        is_end=lambda row, tokens: len(tokens) > row % 5 + 2,
        sampling=sampling,
        seeds=range(len(ROWS)),
    )


@pytest.mark.wide
@pytest.mark.parametrize("spec", cases(SPECS, narrow=["relative with adapters"]))
def test_ranks_that_divide_matrices_and_layers_answer_as_one_process(spec):
    check(spec, DIVIDED)


@pytest.mark.nightly
def test_copies_of_a_pipeline_answer_as_one_process():
    check(TIED, COPIES)


def check(spec, plan):
    scores, losses, *texts = answers(spec, ParallelPlan())
    assert len(set(map(tuple, texts[1]))) == len(ROWS)
    for found, found_losses, *found_texts in run_ranks(plan.world_size, answers, spec, plan):
        assert [one.total for one in found] == pytest.approx([one.total for one in scores], rel=1e-9)
        assert [one.is_greedy for one in found] == [one.is_greedy for one in scores]
        assert [loss for loss, _ in found_losses] == pytest.approx([loss for loss, _ in losses], rel=1e-9)
        assert [count for _, count in found_losses] == [count for _, count in losses]
        assert found_texts == texts
