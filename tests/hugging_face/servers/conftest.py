"""Folders as ``export-hf`` writes them, but for the weights."""

import json

import pytest

from llama_core.config.config_json.writing import config_json, without_unstated_modules
from llama_core.hugging_face.peft import ADAPTER_CONFIG, adapter_json


@pytest.fixture
def export(tmp_path):
    """Return a function that writes what ``export-hf`` writes of a model, but for the weights."""

    def write(spec, name="out", dtype="bf16", merges=("a b",), tokens=None, sentencepiece=False):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config_json(without_unstated_modules(spec), dtype)))
        if merges is not None:
            vocabulary = {str(index): index for index in range(spec.vocab_size if tokens is None else tokens)}
            model = {"type": "BPE", "vocab": vocabulary, "merges": list(merges)}
            (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": []}))
        if sentencepiece:
            (folder / "tokenizer.model").write_bytes(b"")
        return folder

    return write


@pytest.fixture
def adapters(tmp_path):
    """Return a function that writes what ``export-hf`` writes of adapters, but for the weights."""

    def write(lora, base):
        folder = tmp_path / "adapters"
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_json(lora, str(base))))
        return folder

    return write
