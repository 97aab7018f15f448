"""Matrices of experts in MXFP4 have the numbers that transformers gives them, and what is malformed is one line."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llama_core.errors import WeightsError
from llama_core.hugging_face.mxfp4 import join_mxfp4
from llama_core.hugging_face.weight_files import read_header
from llama_core.models.mxfp4 import LEVELS, stored_numbers

MATRIX = "model.layers.0.mlp.experts.gate_up_proj"
BLOCKS, SCALES = f"{MATRIX}_blocks", f"{MATRIX}_scales"


@pytest.fixture
def file(tmp_path):
    """A file with matrices of 3 experts, 10 outputs and 64 inputs, and a norm."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 10, 2), dtype=torch.uint8, generator=generator)
    file = tmp_path / "model.safetensors"
    save_file({BLOCKS: codes, SCALES: scales, "norm.weight": torch.ones(4)}, file)
    return file


def view_of(file):
    data = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    return lambda stored: data[stored.start :][: torch.Size(stored.shape).numel()].view(stored.shape)


def test_each_code_stands_for_the_number_of_transformers(file):
    stored = load_file(file)
    expected = convert_moe_packed_tensors(stored[BLOCKS], stored[SCALES], dtype=torch.float32)
    joined = join_mxfp4(read_header(file))
    assert joined.keys() == {MATRIX, "norm.weight"}
    assert joined[MATRIX].shape == tuple(expected.shape) == (3, 64, 10)
    matrices = [stored_numbers(matrix, view_of(file)) for matrix in joined[MATRIX].matrices]
    assert torch.equal(torch.stack(matrices), expected)
    assert len(set(LEVELS)) == 15  # there are two zeros


def changed(file, **tensors):
    stored = load_file(file) | {f"{MATRIX}_{part}": tensor for part, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, file)
    return read_header(file)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"scales": None}, "_scales is missing"),
        ({"blocks": None}, "_blocks is missing"),
        ({"scales": torch.ones(3, 10, 2)}, r"_scales is F32 \[3, 10, 2\], not U8 in 3 dims"),
        ({"blocks": torch.ones(3, 10, 32, dtype=torch.uint8)}, r"_blocks is U8 \[3, 10, 32\], not U8 in 4 dims"),
        (
            {"scales": torch.ones(3, 10, 1, dtype=torch.uint8)},
            r"_blocks is \[3, 10, 2, 16\] instead of \[3, 10, 1, 16\], for the scales in model.safetensors",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(file, tensors, message):
    with pytest.raises(WeightsError, match=f"model.safetensors: {MATRIX}{message}.*download it again"):
        join_mxfp4(changed(file, **tensors))
