"""NF4: a frozen matrix as four-bit codes in blocks of 64, whose scales are codes of eight bits (double quantisation).

A block is 33 bytes: 32 of codes, two in a byte, and the code of its scale. A matrix is [O, I / 64 * 33] bytes, which
ranks divide by rows, or by columns of whole blocks, as they divide any matrix. A scale is its code's number times
that of its group, plus an offset: a group is 256 consecutive blocks of the whole matrix. These few numbers are on every
rank.

Numbers and codes are those of bitsandbytes, except for the scales that its CPU kernel rounds twice. Source: Dettmers et
al. 2023, arXiv:2305.14314, section 3 and appendix E.
"""

# Shape suffixes: O rows of a matrix, I its columns, K bytes of a row, N blocks, G groups of blocks

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from llama_core.config.nf4 import BLOCK, BLOCK_BYTES, GROUP, num_scales, packed_bytes
from llama_core.errors import WeightsError
from llama_core.hugging_face.nf4 import Nf4Tensor
from llama_core.hugging_face.weight_files import StoredTensor
from llama_core.machine.toolchain import can_build_kernels
from llama_core.models.layers import Linear, local_part, multiply_own_part
from llama_core.planning.program.nf4 import UNPACKED_AT_ONCE

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The numbers of the 16 codes: quantiles of a normal distribution, and zero."""


def _scale_levels() -> tuple[float, ...]:
    levels = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10.0 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        levels += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(levels))


SCALE_LEVELS = _scale_levels()
"""The numbers of the 256 codes of scales: the smaller the number, the fewer of its seven bits are fraction."""

# copied to a GPU without waiting for it, which torch.tensor(..., device="cuda") would
_OF_CODES = torch.tensor(LEVELS, dtype=torch.float32, device="cpu")
_OF_SCALES = torch.tensor(SCALE_LEVELS, dtype=torch.float32, device="cpu")
_OF_PAIRS = torch.cartesian_prod(_OF_CODES, _OF_CODES)


WORD_BYTES = 4


class Packed(NamedTuple):
    """A matrix in NF4, or a part of one."""

    bytes_OK: Tensor
    """uint8."""
    scales_G: Tensor
    """Of the whole matrix: the number of every group, and last what is added to every scale; fp32."""


def pack(matrix_OI: Tensor) -> Packed:
    """Round a matrix to NF4."""
    blocks_NB = matrix_OI.float().reshape(-1, BLOCK)
    scales_N = blocks_NB.abs().amax(1)
    codes_NB = _nearest(_divided(blocks_NB, scales_N), LEVELS)
    offset = scales_N.mean()
    groups_GN = F.pad(scales_N - offset, (0, -len(scales_N) % GROUP)).view(-1, GROUP)
    groups_G = groups_GN.abs().amax(1)
    codes_of_scales_N = _nearest(_divided(groups_GN, groups_G), SCALE_LEVELS).flatten()[: len(scales_N)]
    pairs = codes_NB[:, 0::2] << 4 | codes_NB[:, 1::2]
    packed = torch.cat([pairs, codes_of_scales_N[:, None]], dim=1)
    return Packed(packed.view(len(matrix_OI), -1), torch.cat([groups_G, offset[None]]))


def _divided(values: Tensor, by: Tensor) -> Tensor:
    """Return each row divided by its number, as bitsandbytes divides; a row of nothing but zeros stays one."""
    smallest = torch.finfo(by.dtype).tiny  # of a smaller one, the reciprocal is infinite
    return values * torch.where(by < smallest, 1, by).reciprocal()[:, None]


def _nearest(values: Tensor, levels: tuple[float, ...]) -> Tensor:
    """Return the code of the nearest level of each value."""
    numbers = torch.tensor(levels, device=values.device)
    return torch.bucketize(values, (numbers[1:] + numbers[:-1]) / 2).to(torch.uint8)


class BlockPlace(NamedTuple):
    """Where the blocks of a part lie in its whole matrix."""

    first_row: int
    first_block: int
    """Within the row."""
    blocks_of_row: int
    """Of the whole matrix."""

    def blocks(self, part_OK: Tensor) -> Tensor:
        """Return the numbers of a part's blocks in the whole matrix, rows first, [N]."""
        rows, num_bytes = part_OK.shape
        first = self.first_row * self.blocks_of_row + self.first_block
        rows_O = torch.arange(rows, device=part_OK.device, dtype=torch.int32) * self.blocks_of_row + first
        blocks_N = torch.arange(num_bytes // BLOCK_BYTES, device=part_OK.device, dtype=torch.int32)
        return (rows_O[:, None] + blocks_N).flatten()


def unpack(packed: Packed, place: BlockPlace, like: Tensor) -> Tensor:
    """Return the numbers of a matrix, or of a part of one, [rows, columns], in the dtype of ``like``.

    Args:
        packed: the matrix; of the bytes, those of the part.
        place: where the part lies.
        like: what they are multiplied with. A compiler must not take the matrix of a forward and that of a backward for
            one, which it would keep.
    """
    if packed.bytes_OK.is_cuda:
        matrix_OI: Tensor = unpack_on_cuda(*packed, list(place), like)
        return matrix_OI
    return unpack_in_parts(packed, place, like.dtype)


@torch.library.custom_op("llama_core::unpack_nf4", mutates_args=())
def unpack_on_cuda(bytes_OK: Tensor, scales_G: Tensor, place: list[int], like: Tensor) -> Tensor:
    """Return what ``unpack`` does, in one kernel; an operator, so that it is the same in eager and in compiled code."""
    if not can_build_kernels() or bytes_OK.numel() % WORD_BYTES:
        return unpack_in_parts(Packed(bytes_OK, scales_G), BlockPlace(*place), like.dtype)
    from llama_core.models import nf4_kernels  # needs Triton

    if bytes_OK.data_ptr() % WORD_BYTES:
        bytes_OK = bytes_OK.clone()
    first_row, first_block, blocks_of_row = place
    matrix_OI = _matrix_of(bytes_OK, like)
    nf4_kernels.unpack(
        bytes_OK.contiguous(),
        scales_G,
        *_tables_on(bytes_OK.device),
        first=first_row * blocks_of_row + first_block,
        own_blocks_of_row=bytes_OK.shape[1] // BLOCK_BYTES,
        blocks_of_row=blocks_of_row,
        out=matrix_OI,
    )
    return matrix_OI


@unpack_on_cuda.register_fake
def _(bytes_OK: Tensor, scales_G: Tensor, place: list[int], like: Tensor) -> Tensor:
    return _matrix_of(bytes_OK, like)


def _matrix_of(bytes_OK: Tensor, like: Tensor) -> Tensor:
    return like.new_empty((bytes_OK.shape[0], bytes_OK.shape[1] // BLOCK_BYTES * BLOCK))


@cache
def _tables_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of all codes, and of all codes of scales, on a device, where they stay."""
    return _OF_CODES.to(device), _OF_SCALES.to(device)


def unpack_in_parts(packed: Packed, place: BlockPlace, dtype: torch.dtype) -> Tensor:
    """Return what ``unpack`` does, without a kernel of its own."""
    rows, num_bytes = packed.bytes_OK.shape
    columns = num_bytes // BLOCK_BYTES * BLOCK
    scales_OB = _scales_of_part(packed, place).view(rows, columns // BLOCK)
    matrix_OI = torch.empty(rows, columns, dtype=dtype, device=packed.bytes_OK.device)
    # some rows at a time, for indices and fp32 numbers are larger than the matrix; a compiled kernel writes neither
    at_once = rows if torch.compiler.is_compiling() else max(1, UNPACKED_AT_ONCE // max(1, columns))
    parts = (torch.split(tensor, at_once) for tensor in (packed.bytes_OK, scales_OB, matrix_OI))
    for bytes_PK, scales_PB, matrix_PI in zip(*parts, strict=True):
        pairs = bytes_PK.view(-1, BLOCK_BYTES)[:, :-1]
        _numbers(pairs, scales_PB.reshape(-1), out=matrix_PI.view(-1, BLOCK))
    return matrix_OI


def _scales_of_part(packed: Packed, place: BlockPlace) -> Tensor:
    codes_N = packed.bytes_OK.view(-1, BLOCK_BYTES)[:, -1]
    return _scales(codes_N, packed.scales_G[place.blocks(packed.bytes_OK) // GROUP], packed.scales_G[-1])


def _scales(codes_N: Tensor, groups_N: Tensor, offset: Tensor) -> Tensor:
    """Return the scales of blocks, whose groups have the given numbers."""
    return _OF_SCALES.to(codes_N.device, non_blocking=True)[codes_N.int()] * groups_N + offset


def _numbers(pairs: Tensor, scales_N: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the numbers of blocks of codes, two in a byte, [N, BLOCK], computed in fp32; ``out`` takes them."""
    of_pairs = _OF_PAIRS.to(pairs.device, non_blocking=True)
    return torch.mul(of_pairs[pairs.int()].view(-1, BLOCK), scales_N[:, None], out=out)


def unpack_whole(packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a whole matrix, [rows, columns]."""
    place = BlockPlace(0, 0, packed.bytes_OK.shape[1] // BLOCK_BYTES)
    return unpack(packed, place, packed.scales_G.new_empty(0, dtype=dtype))


def rounded(matrix_OI: Tensor) -> Tensor:
    """Return a matrix as it is after it has been packed."""
    return unpack_whole(pack(matrix_OI), matrix_OI.dtype)


def stored_codes(stored: Nf4Tensor, view: Callable[[StoredTensor], Tensor]) -> Packed | None:
    """Return a matrix with the codes that bitsandbytes gave it; None without double quantisation, which these need.

    Args:
        stored: where its parts are, rows of whole blocks.
        view: returns the values of a stored tensor.

    Raises:
        WeightsError: if its codes stand for other numbers than NF4's.
    """
    if stored.nested is None:
        return None
    _check_levels(stored, view)
    rows, columns = stored.shape
    pairs = view(stored.codes).view(-1, BLOCK // 2)
    blocks = torch.cat([pairs, view(stored.scales)[:, None]], dim=1)
    offset = torch.tensor([stored.nested.offset], dtype=torch.float32)
    scales_G = torch.cat([view(stored.nested.groups), offset])
    return Packed(blocks.view(rows, packed_bytes(columns)), scales_G)


def stored_numbers(stored: Nf4Tensor, view: Callable[[StoredTensor], Tensor]) -> Tensor:
    """Return the numbers of a matrix that bitsandbytes has quantised, in fp32; see ``stored_codes``."""
    _check_levels(stored, view)
    scales_N = view(stored.scales)
    if stored.nested is not None:
        groups_N = view(stored.nested.groups).repeat_interleave(GROUP)[: len(scales_N)]
        scales_N = _scales(scales_N, groups_N, torch.tensor(stored.nested.offset, dtype=torch.float32))
    return _numbers(view(stored.codes).view(-1, BLOCK // 2), scales_N).view(stored.shape)


def _check_levels(stored: Nf4Tensor, view: Callable[[StoredTensor], Tensor]) -> None:
    expected: dict[StoredTensor, tuple[float, ...]] = {stored.levels: LEVELS}
    if stored.nested is not None:
        expected[stored.nested.levels] = SCALE_LEVELS
    for levels, numbers in expected.items():
        if not torch.allclose(view(levels), torch.tensor(numbers, dtype=torch.float32), rtol=1e-5, atol=0):
            raise WeightsError(
                f"{levels.file} holds codes that stand for other numbers than those of nf4; use the unquantised model"
            )


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bytes_OK: Tensor, scales_G: Tensor, place: BlockPlace) -> Tensor:
        # not saved: if the last product of a block saved something, recomputation would have to run that product again
        ctx.packed = Packed(bytes_OK, scales_G)
        ctx.place = place
        return x @ unpack(Packed(bytes_OK, scales_G), place, x).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ unpack(ctx.packed, ctx.place, grad), None, None, None


def keep_packed(module: Linear) -> None:
    """Make a frozen matrix hold bytes in place of its numbers, and multiply by what they stand for.

    Args:
        module: the matrix, whose numbers are lost.
    """
    rows, columns = module.weight.shape
    device = module.weight.device
    packed = torch.empty(rows, packed_bytes(columns), dtype=torch.uint8, device=device)
    module.weight = nn.Parameter(packed, requires_grad=False)
    module.scales = torch.empty(num_scales(rows * columns), device=device)
    module.multiply = multiply


def is_finite(module: Linear) -> bool:
    """Return whether no number of the whole matrix was NaN or infinite, which would have spread to its scales."""
    assert module.scales is not None
    return bool(local_part(module.scales).isfinite().all())


def multiply(x: Tensor, packed_OK: Tensor, scales_G: Tensor | None) -> Tensor:
    """Return ``x @ matrix.T`` in the dtype of ``x``: the product of a ``Linear`` that is held in NF4."""
    assert scales_G is not None
    if not isinstance(packed_OK, DTensor):
        return _multiply(BlockPlace(0, 0, packed_OK.shape[1] // BLOCK_BYTES), x, packed_OK, scales_G)
    place = _place(packed_OK)
    return multiply_own_part(partial(_multiply, place), x, packed_OK, local_part(scales_G))


def _place(packed_OK: DTensor) -> BlockPlace:
    """Return where the part lies that a tensor-parallel rank holds; torch's own function would break the graph."""
    own_OK = local_part(packed_OK)
    rank = packed_OK.device_mesh.get_local_rank()
    blocks_of_row = packed_OK.shape[1] // BLOCK_BYTES
    if packed_OK.placements[0].is_shard(0):
        return BlockPlace(rank * own_OK.shape[0], 0, blocks_of_row)
    return BlockPlace(0, rank * own_OK.shape[1] // BLOCK_BYTES, blocks_of_row)


def _multiply(place: BlockPlace, x: Tensor, packed_OK: Tensor, scales_G: Tensor | None) -> Tensor:
    out: Tensor = _PackedLinear.apply(x, packed_OK, scales_G, place)  # type: ignore[no-untyped-call]
    return out
