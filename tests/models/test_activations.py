"""What a feed-forward makes of gate and up, and its gradients, are those of transformers."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from llama_core.models.activations import OF_BOTH, OF_GATE, gated

CONFIG = GptOssConfig()


def of_gpt_oss(gate, up):
    """Return what the experts of a GPT-OSS make of gate and up, which are interleaved there."""
    of_experts = SimpleNamespace(alpha=CONFIG.swiglu_alpha, limit=CONFIG.swiglu_limit)
    return GptOssExperts._apply_gate(of_experts, torch.stack((gate, up), dim=-1).flatten(-2))


THEIRS = {
    "silu": lambda gate, up: ACT2FN["silu"](gate) * up,
    "gelu_tanh": lambda gate, up: ACT2FN["gelu_pytorch_tanh"](gate) * up,
    "clamped_swiglu": of_gpt_oss,
}


def test_every_activation_is_compared():
    assert THEIRS.keys() == {**OF_GATE, **OF_BOTH}.keys()


@pytest.mark.parametrize(("name", "theirs"), THEIRS.items(), ids=THEIRS)
def test_it_and_its_gradients_are_those_of_transformers(name, theirs):
    generator = torch.Generator().manual_seed(0)
    drawn = 8 * torch.randn((2, 500), generator=generator, dtype=torch.float64)
    gate, up = torch.cat((drawn, torch.tensor([[7.0, -7.0, 7.0], [7.0, -7.0, 9.0]])), dim=1)  # at a limit, too
    assert all((x > 7).any() and (x < -7).any() for x in (gate, up))
    inputs = [gate.requires_grad_(), up.requires_grad_()]
    out, expected = gated(*inputs, name), theirs(*inputs)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=0)
    towards = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found, right = (torch.autograd.grad(each, inputs, towards) for each in (out, expected))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
