"""A CUDA rank activates FlashAttention 3 or 4 in torch; here the package and the device are stand-ins."""

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _registry

from llama_core.config.run import RunConfig
from llama_core.training import flash

CONFIG = RunConfig.from_mapping({"training": {"precision": "bf16"}, "launch": {"device": "cuda"}})


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper device with FlashAttention 3, whose activations are counted."""
    activated = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash, "installed_flash_attention", lambda: ("FA3",))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: activated.append("FA3"))
    return activated


def test_torch_knows_the_implementations_by_these_names():
    assert {"FA3", "FA4"} <= set(attention.list_flash_attention_impls())


def test_it_is_activated_through_torchs_registry(hopper):
    assert flash.activate_flash_attention(CONFIG) == "FA3"
    assert hopper == ["FA3"]


def test_a_run_that_keeps_torchs_kernels_does_not_ask_for_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: pytest.fail("there is none"))
    assert flash.activate_flash_attention(CONFIG.with_overrides("launch.device=cpu")) is None
    assert flash.activate_flash_attention(CONFIG.with_overrides("training.deterministic=true")) is None


def test_a_package_built_for_another_torch_is_one_warning(hopper, monkeypatch, caplog):
    def broken():
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", broken)
    assert flash.activate_flash_attention(CONFIG) is None
    assert "FA3 is installed but cannot be used" in caplog.text


def test_a_torch_without_a_registry_keeps_its_kernels(hopper, monkeypatch):
    monkeypatch.delattr(attention, "list_flash_attention_impls")
    assert flash.activate_flash_attention(CONFIG) is None
    assert not hopper
