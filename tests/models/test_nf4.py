"""NF4 is bitsandbytes', and a part of a packed matrix is that part of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.nf4 import BLOCK, BLOCK_BYTES, GROUP
from llama_core.models import nf4

seeds = st.integers(0, 2**32 - 1)
rows = st.integers(1, 5).map(lambda number: 64 * number)
blocks = st.integers(1, 6)


def drawn(seed, num_rows, num_blocks, *, zero_blocks=0):
    matrix = 0.02 * torch.randn(num_rows, num_blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    matrix.view(-1, BLOCK)[:zero_blocks] = 0
    return matrix


def codes(packed):
    """Return the codes of elements, two in a byte, and those of scales."""
    blocks = packed.bytes_OK.view(-1, BLOCK_BYTES)
    return blocks[:, :-1], blocks[:, -1].int()


@given(seeds, rows, blocks, st.integers(0, 3))
def test_codes_are_those_of_bitsandbytes(seed, num_rows, num_blocks, zero_blocks):
    assert_codes_of_bitsandbytes(drawn(seed, num_rows, num_blocks, zero_blocks=zero_blocks))


@given(seeds, st.sampled_from([1, 7, 64, 300]), st.sampled_from([3.0, 1e2, 1e3, 1e6]))
def test_codes_of_matrices_with_outliers_are_those_of_bitsandbytes(seed, num_outliers, size):
    matrix = drawn(seed, 128, 4)
    generator = torch.Generator().manual_seed(seed)
    matrix.view(-1)[torch.randint(0, matrix.numel(), (num_outliers,), generator=generator)] *= size
    assert_codes_of_bitsandbytes(matrix)


def assert_codes_of_bitsandbytes(matrix):
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs, state = functional.quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")
    packed = nf4.pack(matrix)
    pairs, scales = codes(packed)
    assert torch.equal(pairs.flatten(), theirs.flatten())
    torch.testing.assert_close(packed.scales_G[:-1], state.state2.absmax)
    torch.testing.assert_close(packed.scales_G[-1], state.offset)
    their_scales = state.absmax.int()
    same = scales == their_scales
    ours = nf4.rounded(matrix).view(-1, BLOCK)
    dequantised = functional.dequantize_4bit(theirs, state).view(-1, BLOCK)
    torch.testing.assert_close(ours[same], dequantised[same], rtol=1e-5, atol=1e-6)
    # Its CPU kernel looks the code of a scale up in a table of 2**16 steps from -1 to 1. Where two are about as near,
    # it may take the other one, and next to zero, where numbers are closer than a step, one further off: the more
    # often, the larger the largest scale of the group is beside the others.
    levels = torch.tensor(nf4.SCALE_LEVELS)
    groups_N = packed.scales_G[:-1].repeat_interleave(GROUP)[: len(scales)]
    exact = (matrix.view(-1, BLOCK).abs().amax(1) - packed.scales_G[-1]) / groups_N
    off = (levels[scales] - exact).abs()
    theirs_off = (levels[their_scales] - exact).abs()
    assert (off <= theirs_off + 1e-6).all()
    assert (theirs_off <= off + 2 * 2**-16 + 1e-6).all()


@given(seeds, rows, blocks)
def test_rounding_again_keeps_the_codes_of_elements(seed, num_rows, num_blocks):
    once = nf4.pack(drawn(seed, num_rows, num_blocks))
    again = nf4.pack(nf4.unpack_whole(once, torch.float32))
    assert torch.equal(codes(once)[0], codes(again)[0])


@given(seeds, rows, st.integers(1, 3))
def test_blocks_of_zeros_stay_zeros(seed, num_rows, zero_blocks):
    matrix = drawn(seed, num_rows, 4, zero_blocks=zero_blocks)
    assert not nf4.rounded(matrix).view(-1, BLOCK)[:zero_blocks].any()
    assert not nf4.rounded(torch.zeros_like(matrix)).any()


@given(seeds, rows, blocks, st.data())
def test_a_part_is_that_part_of_the_whole(seed, num_rows, num_blocks, data):
    whole = nf4.pack(drawn(seed, num_rows, num_blocks))
    first_row, last_row = sorted(data.draw(st.integers(0, num_rows)) for _ in range(2))
    first_block, last_block = sorted(data.draw(st.integers(0, num_blocks)) for _ in range(2))
    part = whole.bytes_OK[first_row:last_row, BLOCK_BYTES * first_block : BLOCK_BYTES * last_block]
    place = nf4.BlockPlace(first_row, first_block, num_blocks)
    ours = nf4.unpack(whole._replace(bytes_OK=part.contiguous()), place, torch.empty(0))
    expected = nf4.unpack_whole(whole, torch.float32)
    assert torch.equal(ours, expected[first_row:last_row, BLOCK * first_block : BLOCK * last_block])
