"""Hugging Face folders from anywhere: sizes, tokenizers, headers of weights, adapters."""

import json
import math
from functools import partial

import pytest
import tokenizers
from malformed import cases, changed, damaged, damaged_json, keep_the_law, naming, write

from llama_core.config.config_json.reading import read_folder
from llama_core.config.config_json.writing import config_json
from llama_core.config.run import RunConfig
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face.peft import ADAPTER_CONFIG, ADAPTERS, adapter_json, peft_name
from llama_core.hugging_face.pretrained import check_pretrained, resolve_pretrained
from llama_core.hugging_face.weight_files import INDEX, WHOLE, new_header, read_tensors
from llama_core.hugging_face.weight_names import hugging_face_shapes

SIZES = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
RUN = RunConfig.from_mapping({"model": "llama3_8b", "architecture": SIZES | {"vocab_size": 64}})
LORA = RunConfig.from_mapping({"model": "llama3_8b", "architecture": SIZES | {"vocab_size": 64}, "strategy": "lora"})


def weights(shapes):
    header, _ = new_header(shapes, dict.fromkeys(shapes, "BF16"))
    return header + bytes(2 * sum(map(math.prod, shapes.values())))


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "nested_blocksize": 256, "nested_offset": 0.5}


def quantised(shapes, damage=lambda state: state):
    """Return a file whose matrices are in bitsandbytes' nf4, all zero; ``damage`` may change their JSON."""
    tensors = {}
    for name, shape in shapes.items():
        if "_proj" not in name:
            tensors[name] = ("BF16", shape, bytes(2 * math.prod(shape)))
            continue
        state = damage(json.dumps(STATE | {"shape": shape}).encode())
        num_blocks = math.prod(shape) // 64
        tensors[name] = ("U8", (32 * num_blocks, 1), bytes(32 * num_blocks))
        tensors[f"{name}.absmax"] = ("U8", (num_blocks,), bytes(num_blocks))
        tensors[f"{name}.quant_map"] = ("F32", (16,), bytes(64))
        tensors[f"{name}.nested_absmax"] = ("F32", (1,), bytes(4))
        tensors[f"{name}.nested_quant_map"] = ("F32", (256,), bytes(1024))
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = ("U8", (len(state),), state)
    header = {}
    content = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (len(content), len(content) + len(data))}
        content += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def header_of(rng, entries):
    """Return a file with a changed header whose length field may lie."""
    text = json.dumps(changed(rng, entries)).encode()
    length = rng.choice((len(text), len(text), len(text), len(text) + 9, 2**63, 0, 2**64 - 1))
    return length.to_bytes(8, "little") + text + bytes(rng.choice((0, 100, 20_000)))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder of a model, and one of adapters over it."""
    model, adapters = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("adapters")
    write(model / "config.json", json.dumps(config_json(RUN.spec)).encode())
    write(model / WHOLE, weights(hugging_face_shapes(RUN.spec)))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(model / "tokenizer.json"))
    write(
        model / "tokenizer_config.json", b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "x"}'
    )
    write(adapters / ADAPTER_CONFIG, json.dumps(adapter_json(LORA.lora, str(model))).encode())
    write(adapters / ADAPTERS, weights({peft_name(name): shape for name, shape in LORA.spec.adapter_shapes.items()}))
    return model, adapters


def test_the_folders_are_right_before_they_are_damaged(hub):
    model, adapters = hub
    assert check_pretrained(RUN.spec, model) == []
    assert check_pretrained(LORA.spec, adapters) == []
    assert load_tokenizer(str(model)).vocab_size == 3


def test_any_folder_is_a_model_or_one_line(hub, tmp_path):
    model, adapters = hub
    for number, rng in cases("folder"):
        source = rng.choice((model, model, adapters))
        path = rng.choice(sorted(source.iterdir()))
        content = path.read_bytes()
        if path.suffix == ".json":
            new = damaged_json(rng, json.loads(content))
        elif rng.random() < 0.7:
            length = int.from_bytes(content[:8], "little")
            new = header_of(rng, json.loads(content[8 : 8 + length]))
        else:
            new = damaged(rng, content)
        path.unlink()
        write(path, None if rng.random() < 0.03 else new)
        init = {"training": {"init_from": str(source)}} | ({"strategy": "lora"} if source == adapters else {})
        run = LORA if source == adapters else RUN
        readers = [
            partial(read_folder, str(source)), partial(check_pretrained, run.spec, source),
            partial(RunConfig.from_mapping, init), partial(RunConfig.from_mapping, {"model": str(source)}),
            partial(load_tokenizer, str(source)), partial(resolve_pretrained, str(source)),
            lambda source=source: load_tokenizer(str(source)).encode_rendered(["hello </s>"]),
        ]  # fmt: skip
        try:
            with naming(number):
                keep_the_law(readers, tmp_path)
        finally:
            path.rmdir() if path.is_dir() else path.unlink()
            write(path, content)


def test_any_quantised_folder_is_a_model_or_one_line(hub, tmp_path):
    shapes = hugging_face_shapes(RUN.spec)
    folder = tmp_path / "quantised"
    write(folder / "config.json", (hub[0] / "config.json").read_bytes())
    write(folder / WHOLE, quantised(shapes))
    assert check_pretrained(RUN.spec, folder) == []
    for number, rng in cases("quantised"):
        content = quantised(shapes, lambda state, rng=rng: damaged_json(rng, json.loads(state)))
        if rng.random() < 0.3:
            content = quantised(shapes)
            length = int.from_bytes(content[:8], "little")
            text = json.dumps(changed(rng, json.loads(content[8 : 8 + length]))).encode()
            content = len(text).to_bytes(8, "little") + text + content[8 + length :]
        write(folder / WHOLE, content)
        with naming(number):
            keep_the_law([partial(check_pretrained, RUN.spec, folder)], tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "model.bin", ""])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, name):
    write(tmp_path / "secret.safetensors", weights({"x": (2,)}))
    folder = tmp_path / "model"
    write(folder / INDEX, json.dumps({"weight_map": {"x": name}}).encode())
    with pytest.raises(WeightsError, match="not the name of a safetensors file"):
        read_tensors(folder)


def test_a_wrong_setting_that_weights_bring_is_an_error_and_no_endless_search(hub, tmp_path):
    model, _ = hub
    write(tmp_path / ADAPTER_CONFIG, json.dumps(adapter_json(LORA.lora, str(model)) | {"r": -1}).encode())
    request = {"strategy": "lora", "training": {"init_from": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"lora\.lora_rank=-1"):
        RunConfig.from_mapping(request)
