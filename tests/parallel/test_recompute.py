from dataclasses import replace

import pytest
import torch

from llama_core.config.models import model_spec
from llama_core.models.batch import Batch
from llama_core.models.llama import build_llama
from llama_core.parallel.recompute import apply_recompute

SPEC = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=4, head_dim=16, ffn_size=96, vocab_size=128)
TOKENS = torch.randint(0, SPEC.vocab_size, (2, 32), generator=torch.Generator().manual_seed(1))


def build(mode, compute_dtype=torch.float32):
    model = build_llama(SPEC, device="cpu", compute_dtype=compute_dtype, seed=0)
    apply_recompute(model, mode)
    return model


def loss_sum(model):
    return model(TOKENS, Batch(TOKENS, TOKENS.roll(-1, 1), torch.arange(32).expand(2, -1) % 20))


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_the_same_bit_for_bit(compute_dtype):
    plain, recomputed = build("none", compute_dtype), build("full", compute_dtype)
    losses = [loss_sum(model) for model in (plain, recomputed)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for parameter, reference in zip(recomputed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad)


def test_parameter_names_do_not_change():
    plain, recomputed = build("none"), build("full")
    assert list(recomputed.state_dict()) == list(plain.state_dict())
    assert dict(recomputed.named_parameters()).keys() == dict(plain.named_parameters()).keys()


def saved_bytes(model):
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model(TOKENS)
    assert hidden.requires_grad
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for pointer, size in storages.items() if pointer not in parameters)


def test_full_recompute_keeps_little_more_than_the_input_of_every_block():
    residual_bytes = TOKENS.numel() * SPEC.hidden_size * 4
    kept = saved_bytes(build("full"))
    assert SPEC.num_layers * residual_bytes <= kept < 2 * SPEC.num_layers * residual_bytes
    assert kept < saved_bytes(build("none")) / 4
