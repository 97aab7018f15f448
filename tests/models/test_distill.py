"""The loss and its gradients against whole logits in fp64, and what is known of the divergence."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.models.batch import IGNORE_INDEX, PLACE, Batch, with_places
from llama_core.models.distill import Distill, top_log_probabilities
from llama_core.models.head import HeadInputs
from llama_core.models.layers import LowRank
from llama_core.models.loss import linear_cross_entropy
from llama_core.objectives.distill import LOGS, REST, TOKENS

VOCAB = 50
ROWS, SEQ, WIDTH = 3, 8, 6


def drawn(*shape, seed, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def values_of(teacher_TV, top_k):
    """What a teacher with these logits says of each token, from all of its probabilities."""
    logs_TV = teacher_TV.log_softmax(-1)
    logs_TK, tokens_TK = logs_TV.topk(top_k)
    rest_T = logs_TV.scatter(-1, tokens_TK, -torch.inf).logsumexp(-1)
    return tokens_TK, logs_TK, rest_T


def batch_of(teacher_TV, top_k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens_BS = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    targets_BS = torch.randint(0, VOCAB, (ROWS, SEQ), generator=generator)
    targets_BS[torch.rand(targets_BS.shape, generator=generator) < 0.2] = IGNORE_INDEX
    tokens_TK, logs_TK, rest_T = values_of(teacher_TV, top_k)
    values = {
        TOKENS: tokens_TK.double().view(ROWS, SEQ, top_k),
        LOGS: logs_TK.view(ROWS, SEQ, top_k),
        REST: rest_T.view(ROWS, SEQ),
    }
    if top_k == 1:  # a value of one number has no dim of its own
        values = {name: value.view(ROWS, SEQ) for name, value in values.items()}
    return Batch(tokens_BS, targets_BS, None, per_token=values)


def dense(logits_TV, teacher_TV, batch, top_k, weight):
    """The same loss from whole rows of probabilities: the rest's is the sum of all that are not among the k."""
    targets_T = batch.targets_BS.flatten()
    counts_T = targets_T != IGNORE_INDEX
    student_TV = logits_TV.softmax(-1)
    tokens_TK, _, _ = values_of(teacher_TV, top_k)
    is_top_TV = torch.zeros_like(student_TV).scatter(-1, tokens_TK, 1.0)

    def outcomes(probabilities_TV):
        others_T1 = (probabilities_TV * (1 - is_top_TV)).sum(-1, keepdim=True)
        return torch.cat((probabilities_TV.gather(-1, tokens_TK), others_T1), -1)

    p_TN = outcomes(teacher_TV.softmax(-1))
    q_TN = outcomes(student_TV)
    divergence = (p_TN * (p_TN.log() - q_TN.log())).sum(-1)[counts_T].sum()
    entropy = F.cross_entropy(logits_TV, targets_T, reduction="sum", ignore_index=IGNORE_INDEX)
    return (1 - weight) * entropy + weight * divergence


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("top_k", [1, 4, VOCAB - 1])
def test_loss_and_gradients_are_those_of_whole_probabilities_in_fp64(top_k, weight, has_adapter):
    teacher_TV = drawn(ROWS * SEQ, VOCAB, seed=1, scale=2)
    batch = batch_of(teacher_TV, top_k)
    hidden_TD = drawn(ROWS * SEQ, WIDTH, seed=2).requires_grad_()
    weight_VD = drawn(VOCAB, WIDTH, seed=3).requires_grad_()
    factors = [hidden_TD, weight_VD]
    adapter = None
    logits_TV = hidden_TD @ weight_VD.T
    if has_adapter:
        adapter = LowRank(drawn(ROWS * SEQ, 2, seed=4).requires_grad_(), drawn(VOCAB, 2, seed=5).requires_grad_())
        factors += adapter
        logits_TV = logits_TV + adapter.inner @ adapter.rows.T
    expected = dense(logits_TV, teacher_TV, batch, top_k, weight)
    theirs = torch.autograd.grad(3 * expected, factors)
    loss = Distill(top_k, weight).loss(HeadInputs(hidden_TD, weight_VD, adapter), batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for ours, their in zip(torch.autograd.grad(3 * loss, factors), theirs, strict=True):
        torch.testing.assert_close(ours, their, rtol=1e-10, atol=1e-11)


def test_without_weight_it_is_the_loss_of_the_next_token():
    teacher_TV = drawn(ROWS * SEQ, VOCAB, seed=1)
    batch = batch_of(teacher_TV, 4)
    head = HeadInputs(drawn(ROWS * SEQ, WIDTH, seed=2), drawn(VOCAB, WIDTH, seed=3))
    entropy = linear_cross_entropy(head.hidden_TD, head.weight_VD, batch.targets_BS.flatten())
    torch.testing.assert_close(Distill(4, 0.0).loss(head, batch), entropy, rtol=1e-12, atol=0)


def test_a_model_that_is_its_teacher_has_no_divergence_and_no_gradient():
    head = HeadInputs(drawn(ROWS * SEQ, WIDTH, seed=2).requires_grad_(), drawn(VOCAB, WIDTH, seed=3))
    batch = batch_of((head.hidden_TD @ head.weight_VD.T).detach(), 4)
    loss = Distill(4, 1.0).loss(head, batch)
    (gradient,) = torch.autograd.grad(loss, [head.hidden_TD])
    assert abs(float(loss.detach())) < 1e-12
    assert float(gradient.abs().max()) < 1e-12


@given(st.integers(0, 100), st.integers(1, VOCAB - 2))
def test_more_tokens_of_the_teacher_never_lower_the_divergence(seed, top_k):
    """Joining outcomes loses information (the data processing inequality), and all tokens give the whole divergence."""
    teacher_TV = drawn(ROWS * SEQ, VOCAB, seed=seed, scale=3)
    head = HeadInputs(drawn(ROWS * SEQ, WIDTH, seed=seed + 1), drawn(VOCAB, WIDTH, seed=seed + 2))
    fewer, more, most = (
        float(Distill(k, 1.0).loss(head, batch_of(teacher_TV, k))) for k in (top_k, top_k + 1, VOCAB - 1)
    )
    assert -1e-9 <= fewer <= more + 1e-9 <= most + 2e-9


@pytest.mark.parametrize("top_k", [1, 5])
def test_what_the_teacher_says_is_the_top_of_its_probabilities_and_the_rest(top_k):
    head = HeadInputs(drawn(ROWS * SEQ, WIDTH, seed=2), drawn(VOCAB, WIDTH, seed=3))
    tokens_TK, logs_TK, rest_T = values_of(head.hidden_TD @ head.weight_VD.T, top_k)
    expected = torch.cat((tokens_TK.double(), logs_TK, rest_T[:, None]), -1)
    torch.testing.assert_close(top_log_probabilities(head, top_k), expected, rtol=1e-10, atol=1e-12)


def test_ranks_that_cut_rows_put_their_tokens_where_they_belong():
    head = HeadInputs(drawn(2 * 4, WIDTH, seed=2), drawn(VOCAB, WIDTH, seed=3))
    rows = with_places(Batch(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), None))
    objective = Distill(3, 0.5)
    whole = objective.of_reference(head, rows)
    turned = rows.each_token(lambda value: value.flip(1))
    assert torch.equal(turned.per_token[PLACE][0], torch.tensor([3.0, 2.0, 1.0, 0.0]))
    hidden_TD = head.hidden_TD.view(2, 4, WIDTH).flip(1).flatten(0, 1)
    torch.testing.assert_close(objective.of_reference(head._replace(hidden_TD=hidden_TD), turned), whole)
    assert whole.shape == (2, objective.num_referred(4))


def test_in_bf16_the_loss_of_a_confident_teacher_is_finite():
    """The model gives nearly all of its probability to one token, so that the rest's underflows in fp32."""
    head = HeadInputs(
        torch.full((ROWS * SEQ, WIDTH), 40.0, dtype=torch.bfloat16).requires_grad_(), torch.eye(VOCAB, WIDTH)
    )
    head.weight_VD[0] = 1.0
    batch = batch_of(drawn(ROWS * SEQ, VOCAB, seed=1, scale=30), 4)
    loss = Distill(4, 0.5).loss(head, batch)
    (gradient,) = torch.autograd.grad(loss, [head.hidden_TD])
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_a_run_without_a_teacher_is_refused():
    with pytest.raises(ConfigError, match=r"training\.objective=distill needs training\.teacher"):
        RunConfig.from_mapping({"training": {"objective": "distill"}})


def test_a_teacher_of_another_objective_is_refused():
    with pytest.raises(ConfigError, match=r"training\.teacher=/weights has no effect"):
        RunConfig.from_mapping({"training": {"teacher": "/weights"}})
