import torch
from parity import SPARSE
from torch import nn

from llama_core.config.run import TrainingConfig
from llama_core.models.llama import build_llama
from llama_core.training.optimizer import build_optimizer


def training(**settings):
    return TrainingConfig(**settings)


def test_matrices_are_decayed_and_vectors_are_not():
    model = build_llama(SPARSE, device="cpu", seed=0)
    groups = build_optimizer(model, training(weight_decay=0.1)).param_groups
    assert {group["weight_decay"]: {p.ndim for p in group["params"]} for group in groups} == {0.1: {2, 3}, 0.0: {1}}


def test_decay_is_decoupled_from_the_gradient():
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, training(weight_decay=0.1, learning_rate=0.01))
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * (1 - 0.01 * 0.1))
