"""The Triton kernels of the loss: interpreted on a CPU against the loss in blocks, and compiled for a Hopper GPU."""

import json
import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import triton_kernels

from llama_core.models import loss
from llama_core.models.layers import LowRank

IGNORED = loss.IGNORE_INDEX
DTYPES = ("float32", "bfloat16", "float16")
WIDTHS = (7, 4096, 5000)
"""Fewer logits than a block of a kernel has, exactly as many, and more."""


def rows_of_logits(width, dtype):
    """Rows of logits and their targets: an ignored one, and two in which some logits are -inf, as padding is."""
    generator = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn(6, width, generator=generator)).to(dtype)
    logits[1, 3:] = -torch.inf
    logits[2, : width - 2] = -torch.inf
    return logits, torch.tensor([0, 2, width - 1, IGNORED, 1, width - 1])


Z_LOSSES = (0.0, 0.05)


def in_blocks(logits, targets, z_loss=0.0):
    """Return losses and logit gradients as the CPU computes them, zero where ignored."""
    gradients, losses, ignored = logits.clone(), torch.empty(len(logits), 1), (targets == IGNORED)[:, None]
    block = torch.empty(4, logits.shape[1])
    loss._losses_and_logit_gradients_(gradients, targets[:, None].masked_fill(ignored, 0), losses, block, z_loss)
    return losses.masked_fill_(ignored, 0)[:, 0], gradients.masked_fill_(ignored, 0)


def in_kernels(logits, targets, z_loss=0.0):
    gradients, losses = logits.clone(), torch.empty(len(logits))
    loss.softmax_of_rows(gradients, targets, losses, IGNORED, z_loss, loss.gradient_scale(logits.dtype))
    return losses, gradients


def in_divided_kernels(logits, targets, num_parts, z_loss=0.0):
    """Do the same as ranks that divide the vocabulary, one after the other."""
    scale, width = loss.gradient_scale(logits.dtype), logits.shape[1] // num_parts
    parts = [part.contiguous() for part in logits.split(width, 1)]
    found = torch.full((num_parts, 3, len(logits)), torch.nan)
    for rank, part in enumerate(parts):
        loss.parts_of_rows(part, targets, found[rank], IGNORED, rank * width)
    combined = torch.stack(loss.combined(found))
    all_losses = torch.empty(num_parts, len(logits))
    for rank, part in enumerate(parts):
        loss.softmax_of_parts(part, targets, combined, all_losses[rank], IGNORED, rank * width, z_loss, scale)
    assert (all_losses == all_losses[0]).all()
    return all_losses[0], torch.cat(parts, 1)


def whole_loss(fused, *, adapted):
    """Return the loss of a head and all its gradients, over several chunks."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (29, 8), "weight": (70, 8)} | ({"narrow": (29, 2), "rows": (70, 2)} if adapted else {})
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes.values()]
    targets = torch.randint(0, 70, (29,), generator=generator)
    targets[::4] = IGNORED
    loss.uses_kernels = lambda hidden: fused
    hidden, weight, *adapter = leaves
    total = loss.linear_cross_entropy(
        hidden, weight, targets, chunk_tokens=8, adapter=LowRank(*adapter) if adapted else None, z_loss=Z_LOSSES[1]
    )
    return [total.detach(), *torch.autograd.grad(total, leaves)]


def difference(ours, expected):
    """Return the largest difference, relative to the largest number."""
    return max(
        float((x.double() - y.double()).abs().max() / y.double().abs().max())
        for x, y in zip(ours, expected, strict=True)
    )


def differences():
    found = {}
    for dtype, width, z_loss in product(DTYPES, WIDTHS, Z_LOSSES):
        rows = rows_of_logits(width, getattr(torch, dtype))
        expected = in_blocks(*rows, z_loss)
        parts = 7 if width == 7 else 4
        name = f"{dtype}, {width} logits, z-loss {z_loss}"
        found[name] = difference(in_kernels(*rows, z_loss), expected)
        found[f"{name}, over {parts}"] = difference(in_divided_kernels(*rows, parts, z_loss), expected)
    for adapted in (False, True):
        ours, expected = (whole_loss(fused, adapted=adapted) for fused in (True, False))
        found[f"float32, whole loss, adapter {adapted}"] = difference(ours, expected)
    logits, _ = rows_of_logits(7, torch.float32)
    outside = torch.full((6,), 7)
    found["outside"] = min(in_kernels(logits, outside)[0].min(), in_divided_kernels(logits, outside, 7)[0].min()).item()
    return found


@pytest.fixture(scope="module")
def interpreted():
    """The differences."""
    return triton_kernels.interpreted(__file__)


# Both round a gradient to the dtype of the logits, from fp32 numbers that differ in the order of their sums. So results
# may differ by a unit in the last place.
TOLERANCES = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}


def test_the_kernels_compute_what_the_blocks_do(interpreted):
    assert len(interpreted) == 2 * len(DTYPES) * len(WIDTHS) * len(Z_LOSSES) + 3
    for name, found in interpreted.items():
        assert name == "outside" or found <= TOLERANCES[name.partition(",")[0]], (name, found)


def test_a_target_outside_the_vocabulary_gives_an_infinite_loss(interpreted):
    assert interpreted["outside"] == float("inf")


@pytest.mark.parametrize("name", ["whole_rows", "parts_of_rows", "divided_rows"])
def test_the_kernels_compile_for_hopper_and_read_16_bytes_at_a_time(name, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from llama_core.models import loss_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(loss_kernels, name)
    kinds = dict.fromkeys(kernel.arg_names, "*fp32") | {"logits": "*bf16", "targets": "*i64"}
    kinds |= dict.fromkeys(("z_loss", "scale"), "fp32")
    kinds |= dict.fromkeys(("stride", "width", "ignore_index", "first"), "i32")
    compiled = triton_kernels.compiled_for_hopper(
        kernel,
        kinds,
        {"BLOCK": loss_kernels.BLOCK},
        multiples_of_16={"logits", "stride", "width"},
        num_warps=loss_kernels.NUM_WARPS,
    )
    assert compiled.asm["cubin"]
    assert "ld.global.v4.b32" in compiled.asm["ptx"]


def test_a_machine_that_cannot_build_kernels_computes_the_loss_in_blocks(monkeypatch, tmp_path):
    """Not even with uncompiled blocks would they work: Triton compiles against Python's headers."""
    on_cuda = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    loss.can_build_kernels.cache_clear()
    assert loss.uses_kernels(on_cuda)
    loss.can_build_kernels.cache_clear()
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert not loss.uses_kernels(on_cuda)
    loss.can_build_kernels.cache_clear()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(differences()))
