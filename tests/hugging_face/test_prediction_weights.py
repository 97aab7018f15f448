"""Prediction modules in files, as DeepSeek-V3 has them: behind the layers, with copies of embedding and head."""

import json
from dataclasses import replace

import pytest
import torch
from hugging_face_models import model_with_large_weights, renamed, shrunk
from safetensors.torch import save_file

from llama_core.config.config_json.writing import config_json, without_unstated_modules
from llama_core.hugging_face.pretrained import check_pretrained
from llama_core.training.stored_weights import whole_model

SPEC = replace(shrunk("llama3_8b"), num_kv_heads=4, kv_rank=24, rope_dim=8, mtp_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    tensors = renamed(model_with_large_weights(SPEC))
    for block in range(SPEC.num_layers, SPEC.num_blocks):
        tensors[f"model.layers.{block}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{block}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    written = config_json(SPEC)
    assert (written["model_type"], written["num_nextn_predict_layers"]) == ("deepseek_v3", 2)
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.parametrize(
    ("mtp_layers", "note"),
    [
        (2, None),
        (
            1,
            "has prediction modules of later tokens, 1 more than are read; architecture.mtp_layers=2 reads all of them",
        ),
        (
            0,
            "has prediction modules of later tokens, 2 more than are read; architecture.mtp_layers=2 reads all of them",
        ),
        (3, "lacks 1 of architecture.mtp_layers=3, which begin at random"),
    ],
)
def test_modules_are_read_as_far_as_the_model_and_the_files_have_them(folder, mtp_layers, note):
    spec = replace(SPEC, mtp_layers=mtp_layers)
    notes = check_pretrained(spec, folder)
    assert [told.removeprefix(f"{folder} ") for told in notes] == ([note] if note else [])
    stored = dict(model_with_large_weights(SPEC).named_parameters())
    read = dict(whole_model(spec, folder).named_parameters())
    assert read.keys() == spec.parameter_shapes.keys()
    for name in read.keys() & stored.keys():
        assert torch.equal(read[name], stored[name]), name
    for name in read.keys() - stored.keys():
        assert read[name].isfinite().all()
        assert read[name].abs().max() > 0, name


def test_modules_are_left_out_of_files_of_types_without_them():
    llama = replace(shrunk("llama3_8b"), mtp_layers=1)
    assert without_unstated_modules(llama) == replace(llama, mtp_layers=0)
    assert without_unstated_modules(SPEC) == SPEC
