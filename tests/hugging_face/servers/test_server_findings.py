"""The commands of findings, and folders that are elsewhere, refused or damaged."""

import shlex

import pytest
from served_models import LOSS, NO, PLAIN, YES, notes, verdicts

from llama_core.config.strategy import LoRA
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face.servers.findings import SERVERS, findings
from llama_core.hugging_face.servers.llama_cpp import LLAMA_CPP


@pytest.mark.parametrize(("rank", "flag"), [(1, 1), (2, 8), (16, 16), (17, 32), (129, 256), (257, 320), (512, 512)])
def test_vllm_is_given_the_smallest_of_its_ranks_that_has_room(export, adapters, rank, flag):
    vllm, *_ = findings(adapters(LoRA(lora_rank=rank), export(PLAIN)))
    (command,) = vllm.commands
    assert command.endswith(f" --max-lora-rank {flag}")


def test_commands_have_the_paths_as_a_shell_reads_them(export, adapters):
    base = export(PLAIN, "my base")
    folder = adapters(LoRA(), base)
    for finding in findings(folder):
        words = [word for command in finding.commands for word in shlex.split(command)]
        assert str(base) in words
        assert {str(folder), f"adapters={folder}"} & set(words)
    assert "my base.gguf" in words


def test_adapters_over_a_base_elsewhere_are_told_of_by_themselves(adapters, tmp_path):
    folder = adapters(LoRA(rslora=True), tmp_path / "elsewhere")
    assert verdicts(folder) == [YES, LOSS, LOSS]
    assert all("elsewhere is not on this machine" in note for note in (notes(folder, server)[-1] for server in SERVERS))


@pytest.mark.parametrize("base", ["tiny_llama3_50m", "a checkpoint"])
def test_adapters_over_what_no_server_reads_are_to_be_merged(adapters, tmp_path, base):
    (tmp_path / "a checkpoint").mkdir()
    folder = adapters(LoRA(), tmp_path / base if " " in base else base)
    assert verdicts(folder) == [NO, NO, NO]
    assert all("export-hf --merged" in notes(folder, server)[0] for server in SERVERS)


def test_a_refused_export_has_no_commands(export):
    *_, llama_cpp = findings(export(PLAIN, merges=()))
    assert (llama_cpp.verdict, llama_cpp.commands) == (NO, ())
    assert llama_cpp.lines == [f"llama.cpp {LLAMA_CPP.version}: refused", f"  {llama_cpp.notes[0]}"]


@pytest.mark.parametrize("text", ["{", "[]", b"\xff"])
def test_a_damaged_tokenizer_is_named(export, text):
    folder = export(PLAIN)
    (folder / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WeightsError, match=r"cannot read .*tokenizer\.json: .*; export the folder again"):
        findings(folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        findings(tmp_path)
