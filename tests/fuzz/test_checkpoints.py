"""The index of a checkpoint, from anywhere."""

import json
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from malformed import cases, damaged_json, keep_the_law, naming

from llama_core.training.index import INDEX, index_lines
from llama_core.training.reading import PlainReader


@pytest.fixture
def folder(tmp_path):
    state = {"weights": torch.zeros(4, 2), "more": torch.zeros(3, dtype=torch.bfloat16), "lr": 0.5}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_any_index_is_read_or_one_line(folder):
    lines = list(index_lines(dcp.FileSystemReader(folder).read_metadata()))
    for number, rng in cases("index", share=3):
        changed = list(lines)
        place = rng.randrange(len(lines))
        changed[place] = damaged_json(rng, json.loads(lines[place])) + b"\n"
        (folder / INDEX).write_bytes(b"".join(changed))
        with naming(number):
            keep_the_law([partial(PlainReader, folder)], folder, names=[INDEX])
