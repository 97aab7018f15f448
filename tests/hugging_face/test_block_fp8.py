"""Matrices in blocks of 8-bit floats have the numbers of transformers, and what is malformed is one line."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from llama_core.errors import WeightsError
from llama_core.hugging_face.block_fp8 import join_block_fp8
from llama_core.hugging_face.weight_files import read_header
from llama_core.models.block_fp8 import stored_numbers

MATRIX = "model.layers.0.self_attn.q_proj.weight"
SCALES = f"{MATRIX}_scale_inv"


def quantised(rows, columns):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(rows, columns, generator=generator).mul(100).to(torch.float8_e4m3fn)
    blocks = (-(-rows // 128), -(-columns // 128))
    return codes, torch.rand(blocks, generator=generator) + 0.5


@pytest.fixture
def file(tmp_path):
    """A file with a matrix of 2 x 3 blocks, and a norm."""
    codes, scales = quantised(256, 384)
    file = tmp_path / "model.safetensors"
    save_file({MATRIX: codes, SCALES: scales, "norm.weight": torch.ones(4)}, file)
    return file


def view_of(file):
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
    data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)

    def view(stored):
        size = torch.Size(stored.shape).numel() * dtypes[stored.dtype].itemsize
        return data[stored.start :][:size].view(dtypes[stored.dtype]).view(stored.shape)

    return view


def test_numbers_are_those_of_transformers(file):
    stored = load_file(file)
    expected = Fp8Dequantize(None)._dequantize_one(stored[MATRIX], stored[SCALES], torch.float32)
    joined = join_block_fp8(read_header(file))
    assert joined.keys() == {MATRIX, "norm.weight"}
    assert joined[MATRIX].shape == (256, 384)
    assert torch.equal(stored_numbers(joined[MATRIX], view_of(file)), expected)


def test_the_last_blocks_may_be_smaller(tmp_path):
    codes, scales = quantised(576, 200)  # the rows of DeepSeek-V3's kv_a_proj_with_mqa
    file = tmp_path / "model.safetensors"
    save_file({MATRIX: codes, SCALES: scales}, file)
    numbers = stored_numbers(join_block_fp8(read_header(file))[MATRIX], view_of(file))
    for row, column in ((0, 0), (575, 199), (511, 128), (512, 127)):
        assert numbers[row, column] == codes[row, column].float() * scales[row // 128, column // 128]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({SCALES: None}, "_scale_inv is missing"),
        ({MATRIX: None}, " is missing, but its scales are there"),
        ({MATRIX: torch.ones(256, 384)}, r" is F32 \[256, 384\], not a matrix in F8_E4M3, but has scales"),
        ({SCALES: torch.ones(1, 3)}, r"_scale_inv is F32 \[1, 3\] instead of F32 \[2, 3\], for the numbers in model"),
        ({SCALES: torch.ones(2, 3, dtype=torch.bfloat16)}, r"_scale_inv is BF16 \[2, 3\] instead of F32 \[2, 3\]"),
    ],
)
def test_what_does_not_fit_is_one_line(file, tensors, message):
    changed = load_file(file) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
    with pytest.raises(WeightsError, match=f"model.safetensors: {MATRIX}{message}.*download it again"):
        join_block_fp8(read_header(file))
