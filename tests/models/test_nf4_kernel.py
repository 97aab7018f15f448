"""The Triton kernel that unpacks NF4: interpreted on a CPU against the way in parts, and compiled for a Hopper GPU."""

import json
from itertools import product

import pytest
import torch
import triton_kernels

from llama_core.config.nf4 import BLOCK, BLOCK_BYTES
from llama_core.models import nf4

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = ((8, 1), (12, 3), (64, 6), (136, 64))
"""Rows and blocks of a row: less than a program's words and more, in one group of scales and in several."""
PARTS = {"all": (slice(None), slice(None)), "rows": (slice(4, 8), slice(None)), "columns": (slice(None), slice(1, 3))}


def packed_matrix(rows, blocks):
    generator = torch.Generator().manual_seed(rows)
    matrix = 0.02 * torch.randn(rows, blocks * BLOCK, generator=generator)
    matrix[0, :BLOCK] = 0
    matrix[1, 3] = 50  # an outlier, so that the scales of other blocks have small codes
    return nf4.pack(matrix)


def part_of(whole, rows, blocks):
    columns = slice(BLOCK_BYTES * (blocks.start or 0), blocks.stop and BLOCK_BYTES * blocks.stop)
    part = whole._replace(bytes_OK=whole.bytes_OK[rows, columns].contiguous())
    return part, nf4.BlockPlace(rows.start or 0, blocks.start or 0, whole.bytes_OK.shape[1] // BLOCK_BYTES)


def in_one_kernel(part, place, dtype):
    return nf4.unpack_on_cuda(*part, list(place), torch.empty(0, dtype=dtype))


def differences():
    """Return for each case the largest relative difference between both ways, and how many numbers there are."""
    found = {}
    for (rows, blocks), (name, where), dtype in product(SHAPES, PARTS.items(), DTYPES):
        part, place = part_of(packed_matrix(rows, blocks), *where)
        if not part.bytes_OK.numel() or part.bytes_OK.numel() % nf4.WORD_BYTES:
            continue
        ours = in_one_kernel(part, place, getattr(torch, dtype))
        expected = nf4.unpack_in_parts(part, place, getattr(torch, dtype))
        # Triton's interpreter cuts numbers off that it makes bf16; PTX rounds them, as a test below sees
        difference = (ours.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-30)
        found[f"{rows} x {blocks}, {name}, {dtype}"] = [float(difference.max()), int(expected.count_nonzero())]
    shifted = torch.zeros(len(part.bytes_OK) * part.bytes_OK.shape[1] + 1, dtype=torch.uint8)[1:].view_as(part.bytes_OK)
    unaligned = part._replace(bytes_OK=shifted.copy_(part.bytes_OK))
    found["bytes that begin within a word"] = [
        float((in_one_kernel(unaligned, place, ours.dtype) - ours).abs().max()),
        1,
    ]
    return found


@pytest.fixture(scope="module")
def interpreted():
    return triton_kernels.interpreted(__file__)


def test_the_kernel_gives_the_same_bits_as_the_way_in_parts(interpreted):
    assert len(interpreted) > 2 * len(SHAPES) * len(DTYPES)
    for case, (difference, num_numbers) in interpreted.items():
        assert num_numbers > 0
        assert difference <= (2**-7 if case.endswith("bfloat16") else 0), case


def test_the_kernel_compiles_for_hopper_and_writes_16_bytes_at_a_time(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from llama_core.models import nf4_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = kernels.unpack_words
    kinds = {"codes": "*u8", "scales": "*fp32", "levels": "*fp32", "scale_levels": "*fp32", "out": "*bf16"}
    kinds = dict.fromkeys(kernel.arg_names, "i32") | kinds
    sizes = ("BLOCK_BYTES", "GROUP", "WORDS", "WORD_ELEMENTS", "WORDS_OF_BLOCK")
    compiled = triton_kernels.compiled_for_hopper(
        kernel,
        kinds,
        {name: getattr(kernels, name) for name in sizes},
        multiples_of_16={"codes", "out", "num_words"},
        num_warps=kernels.NUM_WARPS,
    )
    assert compiled.asm["cubin"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert "cvt.rn.bf16" in compiled.asm["ptx"]  # to the nearest, as torch does


if __name__ == "__main__":
    print(json.dumps(differences()))
