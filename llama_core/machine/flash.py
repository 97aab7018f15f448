"""FlashAttention 3 and 4: kernels from packages of their own, which torch can run in place of its own."""

import importlib.metadata
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

from llama_core.attention import chosen_kernel
from llama_core.config.run import RunConfig
from llama_core.machine.detect import compute_capability

Implementation = Literal["FA3", "FA4"]
"""A name in torch's registry, ``torch.nn.attention.list_flash_attention_impls``."""


class _Package(NamedTuple):
    name: str
    """Name of the distribution."""
    module: str
    """What torch imports."""
    architectures: frozenset[int]
    """Major compute capabilities of the devices it runs on."""


_PACKAGES: dict[Implementation, _Package] = {
    "FA3": _Package("flash-attn-3", "flash_attn_interface", frozenset({9})),
    "FA4": _Package("flash-attn-4", "flash_attn.cute.interface", frozenset({9, 10})),
}
"""In order of preference. Source: the checks in torch's ``nn/attention/_fa3.py`` and ``_fa4.py``."""

LARGEST_HEAD = 128
"""Largest head dim that all of these kernels support, forward and backward."""

PREFERS_CUDNN = frozenset({9, 10})
"""Major compute capabilities of devices where torch computes a causal row with cuDNN's kernel, whatever replaces its
flash kernel. Source: ``check_prefer_cudnn_attention`` in torch's ``sdp_utils.cpp``."""


def choose_flash_attention(capability: tuple[int, int], installed: Collection[Implementation]) -> Implementation | None:
    """Return the implementation for a device; None if torch's own kernels are all it can run.

    Args:
        capability: the device's compute capability, such as (9, 0).
        installed: the result of ``installed_flash_attention``.
    """
    suitable = (name for name, package in _PACKAGES.items() if capability[0] in package.architectures)
    return next((name for name in suitable if name in installed), None)


def installed_flash_attention() -> tuple[Implementation, ...]:
    """Return the implementations whose module is here; none is imported."""
    return tuple(name for name, package in _PACKAGES.items() if _is_here(package.module))


def wants_flash_attention(config: RunConfig) -> bool:
    """Return whether a run computes attention with a flash kernel that may be replaced.

    Deterministic runs keep torch's own kernels, whose determinism torch tests.
    """
    device = config.launch.device
    has_16_bits = config.training.precision != "fp32"
    if device == "cpu" or not has_16_bits or config.training.deterministic:
        return False
    needs = config.spec.attentions
    # bf16 and fp16 have the same kernels
    kernel = chosen_kernel(needs, device=device, dtype="bf16", asked=config.parallel.attention)
    return not kernel.holds_scores and all(layer.head_dim <= LARGEST_HEAD for layer in needs)


def describe_flash_attention(config: RunConfig | None) -> str:
    """Return which implementation a run on this machine's devices uses, and what else is installed.

    A rank tries the implementation before it trains, and keeps torch's own kernels if that fails.
    """
    installed = installed_flash_attention()
    capability = compute_capability()
    if not installed:
        return "torch's own kernels; neither flash-attn-3 nor flash-attn-4 is installed"
    named = " and ".join(_named(name) for name in installed)
    if config is not None and not wants_flash_attention(config):
        return f"torch's own kernels; this run does not use {named}"
    if capability is None:
        return f"{named} on the devices that support it, else torch's own kernels; there is no device here"
    chosen = choose_flash_attention(capability, installed)
    device = f"devices of compute capability {capability[0]}.{capability[1]}"
    if chosen is None:
        return f"torch's own kernels; {named} does not support {device}"
    of_causal_rows = " for documents, cuDNN's kernel for causal rows" if capability[0] in PREFERS_CUDNN else ""
    return f"{_named(chosen)}{of_causal_rows}, on {device}"


def _named(name: Implementation) -> str:
    package = _PACKAGES[name].name
    try:
        return f"{name} ({package} {importlib.metadata.version(package)})"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} ({_PACKAGES[name].module})"


def _is_here(module: str) -> bool:
    # find_spec of a submodule would import its package, which in version 2 loads CUDA code
    package, *inner = module.split(".")
    found = importlib.util.find_spec(package)
    if found is None or not inner:
        return found is not None
    places = found.submodule_search_locations or ()
    return any(Path(place, *inner).with_suffix(".py").exists() for place in places)
