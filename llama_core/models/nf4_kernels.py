"""A Triton kernel that unpacks NF4: it reads each byte once and writes each number once, 2.5 bytes an element in bf16.

Import it only where it runs: it needs Triton, which torch brings along on CUDA. Separate kernels move 17 bytes an
element, for indices and fp32 numbers between them. The numbers are the same to the bit.

A block has 33 bytes, so only one in four begins where a word of four bytes does, and one in 16 where 16 bytes do. A
thread reads the two words around four bytes of codes, and shifts; a warp reads 132 bytes in a row. Four bytes become
eight numbers, which a thread writes at once: 16 bytes in bf16.
"""

# Shape suffixes: W words of codes, E elements of a word

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama_core.config.nf4 import BLOCK, BLOCK_BYTES, GROUP

WORDS = 512
"""Of four bytes of codes, of a program."""
WORD_ELEMENTS = 8
WORDS_OF_BLOCK = BLOCK // WORD_ELEMENTS
NUM_WARPS = 4


@triton.jit
def unpack_words(
    codes,
    scales,
    levels,
    scale_levels,
    out,
    num_words,
    own_blocks_of_row,
    blocks_of_row,
    first,
    num_groups,
    BLOCK_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_ELEMENTS: tl.constexpr,
    WORDS_OF_BLOCK: tl.constexpr,
):
    """Write the numbers of some words of a matrix, or of a part of one."""
    word_W = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    is_inside_W = word_W < num_words
    block_W = word_W // WORDS_OF_BLOCK
    byte_W = block_W * BLOCK_BYTES + word_W % WORDS_OF_BLOCK * 4
    words = codes.to(tl.pointer_type(tl.uint32))
    low_W = tl.load(words + byte_W // 4, mask=is_inside_W, other=0)
    high_W = tl.load(words + byte_W // 4 + 1, mask=is_inside_W, other=0)
    shift_W = (byte_W % 4 * 8).to(tl.uint32)
    codes_W = (low_W >> shift_W) | (high_W << 1 << (31 - shift_W))  # a shift by 32 is undefined

    number_W = first + block_W // own_blocks_of_row * blocks_of_row + block_W % own_blocks_of_row
    code_W = tl.load(codes + (block_W * BLOCK_BYTES + BLOCK_BYTES - 1), mask=is_inside_W, other=0)
    of_group_W = tl.load(scales + number_W // GROUP, mask=is_inside_W, other=0.0)
    scale_W = tl.load(scale_levels + code_W.to(tl.int32)) * of_group_W + tl.load(scales + num_groups)

    element_E = tl.arange(0, WORD_ELEMENTS)
    # the first of two elements is in the upper half of their byte
    code_WE = codes_W[:, None] >> ((element_E ^ 1) * 4).to(tl.uint32)[None, :] & 15
    number_WE = tl.load(levels + code_WE.to(tl.int32)) * scale_W[:, None]
    places_WE = word_W[:, None] * WORD_ELEMENTS + element_E[None, :]
    tl.store(out + places_WE, number_WE.to(out.dtype.element_ty), mask=is_inside_W[:, None])


def unpack(
    codes: Tensor,
    scales_G: Tensor,
    levels: Tensor,
    scale_levels: Tensor,
    *,
    first: int,
    own_blocks_of_row: int,
    blocks_of_row: int,
    out: Tensor,
) -> None:
    """Write the numbers of a matrix, or of a part of one, into ``out``.

    Args:
        codes: its bytes, contiguous: a multiple of four, that begin where a word does.
        scales_G: of the whole matrix.
        levels: the numbers of the codes, fp32.
        scale_levels: those of the codes of scales, fp32.
        first: the number of the part's first block in the whole matrix, rows first.
        own_blocks_of_row: of the part.
        blocks_of_row: of the whole matrix.
        out: contiguous.
    """
    num_words = out.numel() // WORD_ELEMENTS
    if not num_words:
        return
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        unpack_words[triton.cdiv(num_words, WORDS),](
            codes,
            scales_G,
            levels,
            scale_levels,
            out,
            num_words,
            own_blocks_of_row,
            blocks_of_row,
            first,
            len(scales_G) - 1,
            BLOCK_BYTES=BLOCK_BYTES,
            GROUP=GROUP,
            WORDS=WORDS,
            WORD_ELEMENTS=WORD_ELEMENTS,
            WORDS_OF_BLOCK=WORDS_OF_BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # a product and a sum in one would round once, where others round twice
        )
