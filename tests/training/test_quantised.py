"""Folders that bitsandbytes has quantised: codes and numbers are kept, and anything malformed is one line."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_logits import TOKENS
from test_packed_base import SIZES, request, trained
from test_stored_weights import filled, lively, logits_of_transformers, save_folder
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from llama_core.config.config_json.reading import read_folder
from llama_core.config.model_weights import hugging_face_name
from llama_core.config.run import RunConfig
from llama_core.config.strategy import LoRA
from llama_core.errors import WeightsError
from llama_core.hugging_face.pretrained import check_pretrained, where_stored
from llama_core.models import nf4
from llama_core.models.llama import packed_modules
from llama_core.runs.export import export_run
from llama_core.training.stored_weights import whole_model

bitsandbytes = pytest.importorskip("bitsandbytes")

SPEC = RunConfig.from_mapping({"model": "llama3_8b", "architecture": SIZES}).spec
PACKED = replace(SPEC, lora=LoRA(base="nf4", lora_rank=4))
ADAPTED = replace(SPEC, lora=LoRA(lora_rank=4))
QUERY = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{QUERY}.quant_state.bitsandbytes__nf4"


def quantised(folder, out, dtype=torch.float32, **settings):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)
    model.save_pretrained(out)
    return out


NF4 = {"bnb_4bit_quant_type": "nf4"}
NESTED = NF4 | {"bnb_4bit_use_double_quant": True}
WRITTEN = {
    "nested": NESTED,
    "fp32 scales": NF4,
    "stored as bf16": NESTED | {"bnb_4bit_quant_storage": torch.bfloat16},
    "head too": NESTED | {"llm_int8_skip_modules": ["no module"]},
    "some left plain": NESTED | {"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp.down_proj"]},
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders that transformers and bitsandbytes have written."""
    hub = tmp_path_factory.mktemp("hub")
    plain = save_folder(hub / "plain", lively(SPEC))
    for name, settings in WRITTEN.items():
        quantised(plain, hub / name, **settings)
    quantised(plain, hub / "bf16", torch.bfloat16, **NESTED)
    return hub


@torch.no_grad()
def dequantised(folder):
    """Return transformers' model and its weights by our names, dequantised by bitsandbytes."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    by_theirs = {}
    for theirs, weight in model.named_parameters():
        state = getattr(weight, "quant_state", None)
        by_theirs[theirs] = bitsandbytes.functional.dequantize_4bit(weight.data, state) if state else weight.data
    return model, {ours: by_theirs[hugging_face_name(ours)] for ours in SPEC.parameter_shapes}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_model_has_the_numbers_and_the_logits_of_the_quantised_one(hub, name):
    theirs, weights = dequantised(hub / name)
    assert sum(hasattr(weight, "quant_state") for weight in theirs.parameters()) >= 13
    assert check_pretrained(SPEC, hub / name) == []
    ours = whole_model(SPEC, hub / name)
    for parameter, weight in ours.named_parameters():
        assert torch.equal(weight, weights[parameter]), parameter
    plain = theirs.dequantize()  # on some CPUs, bitsandbytes' kernel multiplies in bf16
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), plain(TOKENS).logits, rtol=0, atol=1e-4)


def test_a_model_has_the_numbers_of_one_in_bf16_before_they_are_rounded(hub):
    _, weights = dequantised(hub / "bf16")
    assert weights["layers.0.attention.wq.weight"].dtype == torch.bfloat16
    for parameter, weight in whole_model(SPEC, hub / "bf16").named_parameters():
        assert torch.equal(weight.to(weights[parameter].dtype), weights[parameter]), parameter


@pytest.mark.parametrize("name", ["nested", "stored as bf16", "some left plain"])
def test_a_base_in_nf4_takes_the_codes_over(hub, name):
    _, weights = dequantised(hub / name)
    modules = dict(packed_modules(filled(PACKED, hub / name)))
    assert check_pretrained(PACKED, hub / name) == []
    assert len(modules) == 14
    plain = {"layers.0.feed_forward.w2.weight"} if name == "some left plain" else set()
    for parameter, module in modules.items():
        packed = nf4.Packed(module.weight, module.get_buffer("scales"))
        expected = nf4.rounded(weights[parameter]) if parameter in plain else weights[parameter]
        assert torch.equal(nf4.unpack_whole(packed, torch.float32), expected), parameter


def test_scales_in_fp32_are_rounded_with_a_note(hub):
    (told,) = check_pretrained(PACKED, hub / "fp32 scales")
    assert "has scales in fp32, which lora.base=nf4 rounds to eight bits" in told
    assert check_pretrained(ADAPTED, hub / "fp32 scales") == []
    _, weights = dequantised(hub / "fp32 scales")
    for parameter, module in packed_modules(filled(PACKED, hub / "fp32 scales")):
        assert torch.equal(module.weight, nf4.pack(weights[parameter]).bytes_OK), parameter


def test_merged_weights_are_those_that_were_multiplied_with(hub, tmp_path):
    folder = hub / "nested"
    run = trained(folder, tmp_path)
    ours = filled(request(folder).spec, run.checkpoints / "step-00000002")
    with torch.no_grad():
        logits = ours(TOKENS)
        before = whole_model(SPEC, folder)(TOKENS)
    assert (logits - before).abs().max() > 1e-3
    out = export_run(run, tmp_path / "out", merged=True)
    torch.testing.assert_close(logits_of_transformers(out, TOKENS), logits, rtol=0, atol=1e-4)


def test_sizes_and_places_are_found_as_in_a_plain_folder(hub):
    assert replace(read_folder(str(hub / "nested")), name="") == replace(read_folder(str(hub / "plain")), name="")
    told = where_stored("layers.0.attention.wq.weight", SPEC, hub / "nested")
    assert told == f"{QUERY} in {hub / 'nested' / 'model.safetensors'}"


def with_state(tensors, **changes):
    state = json.loads(tensors[STATE].numpy().tobytes()) | changes
    tensors[STATE] = as_bytes(json.dumps(state).encode())


def as_bytes(text):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def drop(tensors, part):
    del tensors[f"{QUERY}{part}"]


def put(tensors, part, tensor):
    tensors[f"{QUERY}{part}"] = tensor


MALFORMED = [
    (lambda at: with_state(at, blocksize=128), "quant_state of {} cannot be read: blocksize=128: input should be 64"),
    (lambda at: with_state(at, nested_blocksize=64), "nested_blocksize=64: input should be 256"),
    (lambda at: with_state(at, nested_offset=float("nan")), "nested_offset: input should be a finite number"),
    (lambda at: with_state(at, nested_offset=None), "quant_state of {} lacks nested_offset or nested_blocksize"),
    (lambda at: with_state(at, shape=[128]), "quant_state of {} cannot be read: shape.1: field required"),
    (lambda at: with_state(at, shape=[-128, -128]), "shape.0=-128: input should be greater than or equal to 1"),
    (lambda at: with_state(at, shape=[127, 129]), "{} has 16,383 numbers, which are no whole blocks of 64"),
    (lambda at: with_state(at, shape=[10**9, 10**9]), "need 500,000,000,000,000,000 bytes"),
    (lambda at: with_state(at, shape=[64, 256]), "{} is [64, 256] instead of [128, 128]"),
    (lambda at: put(at, "", torch.zeros(100, 1, dtype=torch.uint8)), "{} has codes in U8 [100, 1], but its 16,384"),
    (lambda at: put(at, "", torch.zeros(8192, 1, dtype=torch.int8)), "{} has codes in I8 [8192, 1], but its 16,384"),
    (lambda at: at.update({STATE: as_bytes(b"{" * 99)}), "quant_state of {} cannot be read: invalid JSON"),
    (lambda at: at.update({STATE: as_bytes(b" " * 5000)}), "quant_state of {} is U8 [5000], not at most 4096 bytes"),
    (lambda at: at.update({STATE: torch.zeros(9)}), "quant_state of {} is F32 [9], not at most 4096 bytes"),
    (lambda at: at.pop(STATE), "quant_map of {}, but no quant_state"),
    (lambda at: at.update({STATE.replace("nf4", "fp4"): at.pop(STATE)}), "{} is quantised to 'fp4', and only nf4 can"),
    (lambda at: drop(at, ""), "of {}, but not its codes"),
    (lambda at: drop(at, ".absmax"), "{}.absmax is missing"),
    (lambda at: drop(at, ".quant_map"), "{}.quant_map is missing"),
    (lambda at: drop(at, ".nested_absmax"), "{}.nested_quant_map is unknown"),
    (lambda at: put(at, ".absmax", torch.zeros(3, dtype=torch.uint8)), "{}.absmax is U8 [3] instead of U8 [256]"),
    (lambda at: put(at, ".absmax", torch.zeros(256)), "{}.absmax is F32 [256] instead of U8 [256]"),
    (lambda at: put(at, ".nested_absmax", torch.zeros(2)), "{}.nested_absmax is F32 [2] instead of F32 [1]"),
    (lambda at: put(at, ".quant_map", torch.zeros(17)), "{}.quant_map is F32 [17] instead of F32 [16]"),
]


@pytest.fixture
def damaged(hub, tmp_path):
    """Return a folder whose tensors have been changed."""

    def damaged(change):
        tensors = load_file(hub / "nested" / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_bytes((hub / "nested" / "config.json").read_bytes())
        return tmp_path

    return damaged


@pytest.mark.parametrize(("change", "complaint"), MALFORMED)
def test_a_malformed_matrix_is_refused_before_a_job_exists(damaged, change, complaint):
    folder = damaged(change)
    with pytest.raises(WeightsError) as refused:
        check_pretrained(SPEC, folder)
    assert complaint.format(QUERY) in str(refused.value)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("spec", [SPEC, PACKED])
@pytest.mark.parametrize("part", [".quant_map", ".nested_quant_map"])
def test_codes_that_stand_for_other_numbers_are_refused_when_they_are_read(damaged, part, spec):
    folder = damaged(lambda tensors: tensors[f"{QUERY}{part}"].mul_(1.01))
    with pytest.raises(
        WeightsError, match=r"model\.safetensors holds codes that stand for other numbers than those of"
    ):
        filled(spec, folder)
