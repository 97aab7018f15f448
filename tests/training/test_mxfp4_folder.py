"""Folders of GPT-OSS with experts in MXFP4, as OpenAI publishes them, have the logits that transformers gives them."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_logits import TOKENS
from test_relatives import RELATIVES, saved
from test_stored_weights import filled
from transformers import AutoModelForCausalLM, Mxfp4Config

from llama_core.config.run import RunConfig
from llama_core.errors import WeightsError
from llama_core.hugging_face.pretrained import check_pretrained
from llama_core.models.mxfp4 import LEVELS

KIND = deepcopy(RELATIVES["gpt_oss"])
KIND.intermediate_size = 96  # whole blocks


def packed(weight_EIO):
    """Return the nearest codes in blocks of 32 inputs, and the exponents of their scales."""
    blocks = weight_EIO.mT.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6)) + 1
    scaled = blocks / 2**exponents
    codes = (scaled[..., None] - torch.tensor(LEVELS)).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents[..., 0] + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose experts are in MXFP4, in several files."""
    path = tmp_path_factory.mktemp("mxfp4")
    saved(KIND, path)
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = packed(stored.pop(name))
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.no_grad()
def test_logits_are_those_of_the_dequantised_model_of_transformers(folder):
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    expected = theirs.eval()(TOKENS).logits
    config = RunConfig.from_mapping({"model": str(folder)})
    assert check_pretrained(config.spec, folder) == []
    assert expected.std() > 0.5
    torch.testing.assert_close(filled(config.spec, folder)(TOKENS), expected, rtol=0, atol=1e-4)


def test_experts_of_another_width_are_refused(folder):
    spec = RunConfig.from_mapping({"model": str(folder)}).spec
    with pytest.raises(WeightsError, match=r"gate_up_proj is \[4, 32, 192\] instead of \[4, 32, 128\]"):
        check_pretrained(replace(spec, ffn_size=64), folder)
