"""A CUDA rank activates FlashAttention 3 or 4 in torch and tries it; here the package and the device are stand-ins.

torch's registry, and its code that calls FlashAttention 4, are the real ones.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import _fa4, _registry

from llama_core.config.run import RunConfig
from llama_core.models import attention as block_attention
from llama_core.training import flash

CONFIG = RunConfig.from_mapping({"training": {"precision": "bf16"}, "launch": {"device": "cuda"}})
CPU = torch.device("cpu")


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Return causal attention inside documents, tokens first, from matrix products."""
    index = torch.arange(len(q))
    document = (starts[1:] <= index[:, None]).sum(1)
    seen = (document[:, None] == document) & (index <= index[:, None])
    scores = torch.einsum("qnh,kih->nqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("nqk,kih->qnh", weights, v.float()).to(q.dtype)


class ThroughTorch(torch.autograd.Function):
    """Attention as torch computes it with FlashAttention 4 active."""

    @staticmethod
    def forward(ctx, q, k, v, starts):
        longest = len(q)
        where = (starts, starts, longest, longest, None, False, -1, 0)
        out, lse = _fa4._fa4_run_forward(q, k, v, *where, None)
        ctx.save_for_backward(q, k, v, out, lse, starts)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, starts = ctx.saved_tensors
        where = (starts, starts, None, False, -1, 0)
        return *_fa4._fa4_run_backward(grad, q, k, v, out, lse, *where), None


def varlen(q, k, v, starts, *_, **__):
    """Stand in for torch's varlen_attn, which needs CUDA."""
    if _registry.current_flash_attention_impl() == "FA4":
        return ThroughTorch.apply(q, k, v, starts)
    return attend(q, k, v, starts)


def package(num_results=2, factor=1.0):
    """Return a module like FlashAttention 4's, whose forward returns so many values and is off by a factor."""

    def forward(q, k, v, *, cu_seqlens_q, **_):
        out = factor * attend(q, k, v, cu_seqlens_q)
        return (out, torch.zeros(q.shape[1], len(q)), None, None, None)[:num_results]

    def backward(q, k, v, out, grad, lse, *, cu_seqlens_q, **_):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            made = attend(*leaves, cu_seqlens_q)
        return torch.autograd.grad(made, leaves, grad)

    return SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper device, and a function that installs a package as FlashAttention 4."""

    def install(module):
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash, "installed_flash_attention", lambda: ("FA4",))
    monkeypatch.setattr(block_attention, "varlen_attn", varlen)
    _fa4._fa4_import_module.cache_clear()
    yield install
    attention.restore_flash_attention_impl(_raise_warn=False)
    _fa4._fa4_import_module.cache_clear()


def test_torch_knows_the_implementations_by_these_names():
    assert {"FA3", "FA4"} <= set(attention.list_flash_attention_impls())


def test_a_package_that_agrees_with_torchs_own_kernels_is_activated(hopper):
    hopper(package())
    assert flash.activate_flash_attention(CONFIG, CPU) == "FA4"
    assert _registry.current_flash_attention_impl() == "FA4"


def test_a_run_that_keeps_torchs_kernels_does_not_ask_for_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: pytest.fail("there is none"))
    for setting in ("launch.device=cpu", "training.deterministic=true"):
        assert flash.activate_flash_attention(CONFIG.with_overrides(setting), CPU) is None


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (package(num_results=5), "ValueError: too many values to unpack (expected 2)"),
        (package(factor=1.1), "its results are 0.1 off those of torch's own kernels"),
        (package(factor=float("nan")), "its results are nan off those of torch's own kernels"),
        (SimpleNamespace(), "does not expose FA4 kernels"),
    ],
    ids=["five values", "other numbers", "not a number", "another interface"],
)
def test_a_package_that_fails_its_trial_is_one_warning_and_torchs_kernels_are_back(hopper, caplog, module, problem):
    hopper(module)
    assert flash.activate_flash_attention(CONFIG, CPU) is None
    assert _registry.current_flash_attention_impl() is None
    assert "FA4 is installed but cannot be used, so torch's own kernels run: " in caplog.text
    assert problem in caplog.text


def test_a_torch_without_a_registry_keeps_its_kernels(hopper, monkeypatch):
    hopper(package())
    monkeypatch.delattr(attention, "list_flash_attention_impls")
    assert flash.activate_flash_attention(CONFIG, CPU) is None
    assert _registry.current_flash_attention_impl() is None
