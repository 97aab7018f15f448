"""The digest of a base tells other weights from its own, wherever they differ, and not the same in other files."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import save, save_file

from llama_core.hugging_face.bases import base_digest
from llama_core.hugging_face.weight_files import INDEX, WHOLE, read_tensors

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SMALL = (48, 64)
LARGE = (512, 320)


def drawn(shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(dtype=torch.float32):
    """Two matrices of which only blocks are read, and some tensors that are read whole."""
    shapes = {"a": LARGE, "b": SMALL, "norm": (32,), "z": LARGE, "empty": (0, 4)}
    return {name: drawn(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}


def write(folder, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WHOLE)
    return folder


def swap_bytes(folder, offset, length):
    """Change all of some bytes of a folder's file."""
    with (folder / WHOLE).open("r+b") as file:
        file.seek(offset)
        before = file.read(length)
        file.seek(offset)
        file.write(bytes(byte ^ 0xFF for byte in before))


@pytest.fixture(scope="module", params=DTYPES)
def base(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp(request.param) / "base", weights(DTYPES[request.param]))


@given(name=some.sampled_from(["a", "z"]), place=some.floats(0, 1))
def test_any_change_of_an_eighth_of_a_large_tensor_is_found(base, name, place):
    before = base_digest(base)
    stored = read_tensors(base)[name]
    num_bytes = math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
    piece = stored.start + int(place * num_bytes * 7 / 8), num_bytes // 8
    swap_bytes(base, *piece)
    after = base_digest(base)
    swap_bytes(base, *piece)
    assert after != before == base_digest(base)


@given(name=some.sampled_from(["b", "norm"]), place=some.floats(0, 1))
def test_any_changed_byte_of_a_small_tensor_is_found(base, name, place):
    before = base_digest(base)
    stored = read_tensors(base)[name]
    byte = stored.start + int(place * (math.prod(stored.shape) * DTYPES[stored.dtype].itemsize - 1))
    swap_bytes(base, byte, 1)
    after = base_digest(base)
    swap_bytes(base, byte, 1)
    assert after != before == base_digest(base)


def rename(file, names):
    """Let the header of a file of safetensors call tensors of one shape by each other's names, which moves them."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    renamed = json.dumps({names.get(name, name): entry for name, entry in header.items()}).encode()
    file.write_bytes(len(renamed).to_bytes(8, "little") + renamed + content[8 + length :])


def test_the_same_weights_have_one_digest_in_any_order_and_any_files(tmp_path):
    own = weights()
    expected = base_digest(write(tmp_path / "whole", own))
    swapped = {"a": "z", "z": "a"}
    reordered = write(tmp_path / "reordered", {swapped.get(name, name): tensor for name, tensor in own.items()})
    rename(reordered / WHOLE, swapped)
    starts = [tuple(read_tensors(folder)[name].start for name in "az") for folder in (tmp_path / "whole", reordered)]
    assert starts[0][0] < starts[0][1]
    assert starts[1][0] > starts[1][1]
    assert base_digest(reordered) == expected

    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for name, tensor in own.items():
        (sharded / f"{name}.safetensors").write_bytes(save({name: tensor}))
    (sharded / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in own}}))
    assert base_digest(sharded) == expected


def test_other_dtypes_and_names_of_the_same_bytes_are_other_weights(tmp_path):
    one = write(tmp_path / "one", {"a": drawn(SMALL, torch.bfloat16)})
    other_dtype = write(tmp_path / "dtype", {"a": drawn(SMALL, torch.bfloat16).view(torch.float16)})
    other_name = write(tmp_path / "name", {"b": drawn(SMALL, torch.bfloat16)})
    assert len({base_digest(folder) for folder in (one, other_dtype, other_name)}) == 3
