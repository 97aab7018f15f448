"""The index of a checkpoint, and torch's pickled metadata, from anywhere."""

import json
import pickle
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from malformed import cases, damaged, damaged_json, keep_the_law, naming

from llama_core.training.index import INDEX, index_lines
from llama_core.training.reading import PlainReader

METADATA = ".metadata"
OPCODES = [value for value in vars(pickle).values() if isinstance(value, bytes) and len(value) == 1]


@pytest.fixture
def folder(tmp_path):
    state = {"weights": torch.zeros(4, 2), "more": torch.zeros(3, dtype=torch.bfloat16), "lr": 0.5}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def with_other_opcodes(rng, content):
    """Return a pickle with opcodes replaced, added or dropped anywhere; most of it is still whole."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 2, 5))):
        begin = rng.randrange(2, len(content))
        content[begin : begin + rng.randrange(3)] = b"".join(rng.choices(OPCODES, k=rng.randrange(3)))
    return bytes(content)


def test_any_pickled_metadata_are_read_or_one_line(folder):
    content = (folder / METADATA).read_bytes()
    for number, rng in cases("pickled metadata", share=3):
        change = rng.choice((damaged, with_other_opcodes, with_other_opcodes))
        (folder / METADATA).write_bytes(change(rng, content))
        with naming(number):
            keep_the_law([partial(PlainReader, folder)], folder, names=[METADATA])


def test_any_index_is_read_or_one_line(folder):
    lines = list(index_lines(PlainReader(folder).read_metadata()))
    for number, rng in cases("index", share=3):
        changed = list(lines)
        place = rng.randrange(len(lines))
        changed[place] = damaged_json(rng, json.loads(lines[place])) + b"\n"
        (folder / INDEX).write_bytes(b"".join(changed))
        with naming(number):
            keep_the_law([partial(PlainReader, folder)], folder, names=[INDEX])
