"""Folders with matrices in blocks of 8-bit floats have the logits of what these stand for."""

import json
from copy import deepcopy

import torch
from safetensors.torch import load_file, save_file
from same_logits import TOKENS
from test_relatives import RELATIVES, saved
from test_stored_weights import filled
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from llama_core.config.run import RunConfig
from llama_core.hugging_face.pretrained import check_pretrained

KIND = deepcopy(RELATIVES["qwen3"])
KIND.hidden_size, KIND.intermediate_size = 128, 256  # whole blocks
KIND.num_attention_heads, KIND.num_key_value_heads, KIND.head_dim = 4, 4, 64


def quantise(folder):
    """Round the matrices of a folder's layers, each block by its largest number."""
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        matrix = stored[name]
        blocks = matrix.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = codes.view(matrix.shape), scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@torch.no_grad()
def test_logits_are_those_of_the_dequantised_model_of_transformers(tmp_path):
    unquantised = saved(KIND, tmp_path)
    quantise(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    expected = theirs.eval()(TOKENS).logits
    config = RunConfig.from_mapping({"model": str(tmp_path)})
    assert check_pretrained(config.spec, tmp_path) == []
    assert (expected - unquantised).abs().max() > 0.01
    torch.testing.assert_close(filled(config.spec, tmp_path)(TOKENS), expected, rtol=0, atol=1e-4)
