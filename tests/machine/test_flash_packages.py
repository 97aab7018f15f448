"""FlashAttention 3 and 4 are chosen by device, packages and request."""

import sys

import pytest

from llama_core.chain.environment import validate_environment
from llama_core.config.run import RunConfig
from llama_core.machine.detect import installed_gpus
from llama_core.machine.flash import choose_flash_attention, installed_flash_attention, wants_flash_attention

AMPERE, ADA, HOPPER, BLACKWELL, BLACKWELL_ULTRA, WORKSTATION = (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)
CHOICES = [
    (HOPPER, ("FA3", "FA4"), "FA3"),
    (HOPPER, ("FA4",), "FA4"),
    (HOPPER, (), None),
    (BLACKWELL, ("FA3", "FA4"), "FA4"),
    (BLACKWELL, ("FA3",), None),
    (BLACKWELL_ULTRA, ("FA4",), "FA4"),
    (AMPERE, ("FA3", "FA4"), None),
    (ADA, ("FA3", "FA4"), None),
    (WORKSTATION, ("FA3", "FA4"), None),
]


@pytest.mark.parametrize(("capability", "installed", "chosen"), CHOICES)
def test_the_newest_kernel_that_the_device_runs_well_is_chosen(capability, installed, chosen):
    assert choose_flash_attention(capability, installed) == chosen


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("training", "deterministic", True),
        ("training", "precision", "fp32"),
        ("parallel", "attention", "math"),
        ("launch", "device", "cpu"),
        ("architecture", "head_dim", 256),
    ],
)
def test_a_run_that_needs_other_kernels_keeps_them(section, key, value):
    asked = {"training": {"precision": "bf16"}, "launch": {"device": "cuda"}}
    assert wants_flash_attention(RunConfig.from_mapping(asked))
    asked[section] = asked.get(section, {}) | {key: value}
    assert not wants_flash_attention(RunConfig.from_mapping(asked))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that puts a module of a package on the path, and a device into the machine."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(name, capability=None):
        path = (tmp_path / name.replace(".", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n")
        if capability is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(
                '#!/bin/sh\ncase "$*" in *compute_cap*) echo '
                f"{capability};; *) echo '0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 580.65';; esac\n"
            )
            program.chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    installed_gpus.cache_clear()
    yield module
    installed_gpus.cache_clear()


def test_packages_are_found_without_importing_them(install):
    assert installed_flash_attention() == ()
    (package,) = {"flash_attn"} - sys.modules.keys()
    install(f"{package}.cute.interface")
    assert installed_flash_attention() == ("FA4",)
    install("flash_attn_interface")
    assert installed_flash_attention() == ("FA3", "FA4")


def test_version_2_of_the_package_is_not_an_implementation(install):
    install("flash_attn.flash_attn_interface")
    assert installed_flash_attention() == ()


def fact(**sections):
    return validate_environment(RunConfig.from_mapping(sections) if sections else None).facts["attention"]


def test_the_environment_names_the_kernels_of_a_run(install):
    assert fact() == "torch's own kernels; neither flash-attn-3 nor flash-attn-4 is installed"
    install("flash_attn_interface")
    assert fact().startswith("FA3 (flash_attn_interface) on the devices that support it")
    install("flash_attn_interface", capability="9.0")
    installed_gpus.cache_clear()
    kernels = "FA3 (flash_attn_interface) for documents, cuDNN's kernel for causal rows"
    assert fact() == f"{kernels}, on devices of compute capability 9.0"
    assert fact(training={"deterministic": True}).endswith("this run does not use FA3 (flash_attn_interface)")
    install("flash_attn_interface", capability="8.0")
    assert fact().endswith("FA3 (flash_attn_interface) does not support devices of compute capability 8.0")
