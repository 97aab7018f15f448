import pytest
import torch
from parity import make_batch
from toy_objective import MASKED
from weighted_objective import WEIGHTED

from llama_core.config.run import RunConfig, TrainingConfig
from llama_core.errors import ConfigError
from llama_core.models.batch import IGNORE_INDEX
from llama_core.models.head import HeadInputs
from llama_core.models.objective import build_objective
from llama_core.objectives.registry import DEFAULT_OBJECTIVE, OBJECTIVES
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.work import Work

KINDS = [*OBJECTIVES.values(), MASKED, WEIGHTED]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, request.param.name, request.param)
    return request.param


@pytest.fixture
def objective(kind):
    return build_objective(TrainingConfig(objective=kind.name))


@pytest.fixture
def batch():
    return make_batch(0, 4, documents=True)


@pytest.fixture
def head(batch):
    generator = torch.Generator().manual_seed(2)
    hidden_TD = torch.randn(batch.tokens_BS.numel(), 8, generator=generator, dtype=torch.float64)
    return HeadInputs(hidden_TD, torch.randn(64, 8, generator=generator, dtype=torch.float64))


def rows_of(head, rows, batch):
    num_tokens = batch.tokens_BS.shape[1]
    return head._replace(hidden_TD=head.hidden_TD[rows.start * num_tokens : rows.stop * num_tokens])


def test_losses_and_counts_of_microbatches_add_up_to_those_of_the_batch(objective, batch, head):
    pieces = batch.split(2)
    heads = [rows_of(head, slice(first, first + 2), batch) for first in (0, 2)]
    losses = [objective.loss(part, piece) for part, piece in zip(heads, pieces, strict=True)]
    torch.testing.assert_close(sum(losses), objective.loss(head, batch), rtol=1e-12, atol=0)
    assert sum(int(objective.count(piece)) for piece in pieces) == int(objective.count(batch)) > 0


def test_a_row_without_targets_neither_counts_nor_has_a_loss(objective, batch, head):
    batch.targets_BS.fill_(IGNORE_INDEX)
    assert float(objective.loss(head, batch)) == 0
    assert int(objective.count(batch)) == 0


def test_a_loss_is_a_scalar_in_fp32_or_wider_and_a_count_an_integer(objective, batch, head):
    narrow = HeadInputs(head.hidden_TD.bfloat16(), head.weight_VD.float())
    assert objective.loss(narrow, batch).dtype == torch.float32
    assert objective.loss(head, batch).dtype == torch.float64
    assert objective.loss(head, batch).shape == objective.count(batch).shape == ()
    assert objective.count(batch).dtype == torch.int64


def test_what_an_objective_reads_of_each_token_is_in_the_bytes_of_a_batch(kind):
    plan = ParallelPlan(num_microbatches=2)
    training = {"seq_len": 64, "batch_size": 2}
    plain, work = (
        Work.of(RunConfig.from_mapping({"model": "tiny_llama3_50m", "training": training | more}), plan)
        for more in ({}, {"objective": kind.name} | dict.fromkeys(kind.required, "/there"))
    )
    rows = 2 if kind.prepares else 1  # of the step, and before it
    numbers = sum(kind.with_settings(TrainingConfig()).values_per_token.values())
    assert work.batch_bytes == rows * (plain.batch_bytes + 4 * numbers * 2 * 64)


def test_the_default_is_the_next_token():
    assert DEFAULT_OBJECTIVE == TrainingConfig().objective == "next_token"


def test_an_unknown_objective_is_refused_with_the_names_of_the_known_ones():
    known = ", ".join(OBJECTIVES.names())
    near = "did you mean 'next_token'"
    with pytest.raises(ConfigError, match=rf"training\.objective=nxt_token is not one of {known}; {near}"):
        OBJECTIVES.named("nxt_token")
    with pytest.raises(ConfigError, match=rf"training\.objective='nxt_token': choose one of {known}; {near}"):
        RunConfig.from_mapping({"training": {"objective": "nxt_token"}})
