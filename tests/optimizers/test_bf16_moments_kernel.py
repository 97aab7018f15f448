"""The Triton kernel of moments in bf16: interpreted on a CPU against the update in chunks, and compiled for Hopper."""

import json
import math
import sys
from itertools import product

import pytest
import torch
import triton_kernels
from operations import Operations

from llama_core.optimizers.adamw import ADAMW
from llama_core.optimizers.traits import NAMES
from llama_core.training import bf16_moments, random_bits
from llama_core.training.bf16_moments import Bf16Moments

SHAPES = {"vector": (50,), "matrix": (37, 70), "wide matrix": (3, 1500), "experts": (3, 10, 33), "nothing": (0, 16)}
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STATES = ("exp_avg", "exp_avg_sq")


def updated(shape, *, in_kernel, is_strided=False, **known):
    """Return a weight and its moments after an update, from numbers that are the same each time."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape))
    weight.grad = torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))) if is_strided else torch.randn(shape)
    kept = {"step": torch.tensor(5.0), "exp_avg": torch.randn(shape).bfloat16()}
    kept["exp_avg_sq"] = torch.randn(shape).square().bfloat16()
    moments = Bf16Moments([SETTINGS | {"params": [weight], NAMES: ["layers.0.wq.weight"]}], seed=3)
    bf16_moments.uses_kernel = lambda weight: in_kernel
    with torch.no_grad():
        moments.update([weight], {weight: kept}, SETTINGS, known.get("grad_scale"), known.get("found_inf"))
    return weight.detach(), kept


def differences():
    """Return what differs between the kernel and the chunks, by case."""
    found = {}
    known = {
        "": {},
        "scaled": {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(0.0)},
        "skipped": {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(1.0)},
    }
    for (name, shape), (what, scalars), is_strided in product(SHAPES.items(), known.items(), (False, True)):
        ours, kept = updated(shape, in_kernel=True, is_strided=is_strided, **scalars)
        theirs, expected = updated(shape, in_kernel=False, is_strided=is_strided, **scalars)
        found[f"{name} {what} {is_strided}"] = {
            "weight": float(((ours - theirs).abs() / SETTINGS["lr"]).max()) if ours.numel() else 0.0,
            "moments": sum(int((kept[state] != expected[state]).sum()) for state in STATES),
            "step": float(kept["step"] - expected["step"]),
        }
    return found


@pytest.fixture(scope="module")
def interpreted():
    """The differences."""
    return triton_kernels.interpreted(__file__)


def test_the_kernel_rounds_both_moments_to_the_same_bits_as_the_chunks(interpreted):
    assert len(interpreted) == 3 * 2 * len(SHAPES)
    assert {name: found["moments"] for name, found in interpreted.items() if found["moments"]} == {}


def test_the_kernel_changes_weights_and_counts_steps_as_the_chunks_do(interpreted):
    """A step is of the size of the learning rate, and fp32 weights near 1 are known to 1e-7."""
    for name, found in interpreted.items():
        assert found["weight"] < 1e-3, name
        assert found["step"] == 0, name


def test_the_row_of_a_cuda_run_moves_each_number_once():
    """The gradient, the weight and both moments are read, and the last three written."""
    assert ADAMW.with_bf16_moments.on(cuda=True).moved_bytes == (4 + 4 + 2 + 2) + (4 + 2 + 2)
    assert ADAMW.with_bf16_moments.on(cuda=True).workspace_bytes(2**30) == 0
    assert ADAMW.with_bf16_moments.on(cuda=False) is ADAMW.with_bf16_moments


def test_an_update_launches_one_kernel_for_each_weight_and_two_for_all_steps(monkeypatch):
    launched = []
    monkeypatch.setattr(bf16_moments, "uses_kernel", lambda weight: True)
    monkeypatch.setattr(bf16_moments, "run_in_one_kernel", launched.append)
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.ones(4, 4)
    names = ["a", "b", "c"]
    moments = Bf16Moments([SETTINGS | {"params": weights, NAMES: names}], seed=3)
    states = {weight: {} for weight in weights}
    grad_scale, found_inf = torch.tensor(8.0), torch.tensor(0.0)
    for _ in range(2):  # the first makes the states
        launched.clear()
        with torch.no_grad(), Operations() as operations:
            moments.update(weights, states, SETTINGS, grad_scale, found_inf)
    assert len(launched) == len(weights)
    assert operations.called == [torch.ops.aten._foreach_add_.Scalar, torch.ops.aten._foreach_sub_.List]
    assert [float(kept["step"]) for kept in states.values()] == [2.0] * len(weights)


def test_the_kernel_compiles_for_hopper_and_moves_16_bytes_at_a_time(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from llama_core.training import bf16_moments_kernel as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    beta1, beta2 = SETTINGS["betas"]
    constants = {
        "BETA1": beta1,
        "BETA2": beta2,
        "LOG_BETA1": math.log(beta1),
        "LOG_BETA2": math.log(beta2),
        "MIXING": random_bits.MIXING,
        "LAST_SHIFT": random_bits.LAST_SHIFT,
        "OF_COLUMNS": random_bits.OF_COLUMNS,
        "HEIGHT": 2,
        "WIDTH": 1024,
    }
    pointers = ("weights", "gradients", "firsts", "seconds")
    kinds = dict.fromkeys(kernels.adamw.arg_names, "i32") | dict.fromkeys(("firsts", "seconds"), "*i16")
    kinds |= dict.fromkeys(("weights", "gradients", "step", "grad_scale", "found_inf"), "*fp32")
    kinds |= dict.fromkeys(("lr", "decay", "epsilon"), "fp32")
    compiled = triton_kernels.compiled_for_hopper(
        kernels.adamw,
        kinds,
        constants,
        multiples_of_16={*pointers, "num_columns", "gradient_row", "gradient_expert"},
        num_warps=kernels.NUM_WARPS,
    )
    assert compiled.asm["cubin"]
    assert compiled.asm["ptx"].count("ld.global.v4.b32") == compiled.asm["ptx"].count("ld.global.v")
    assert "st.global.v4.b32" in compiled.asm["ptx"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(differences()))
