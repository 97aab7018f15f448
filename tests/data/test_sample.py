import json
import sysconfig
from pathlib import Path

import pytest

from llama_core.data.corpus import Document, Tally, read_documents
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames
from llama_core.data.sample import SAMPLE_VOCABULARY, sample_file, sample_tokenizer
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError


def test_the_sample_is_the_source_of_the_standard_library(tmp_path):
    sample = sample_file(tmp_path)
    tally = Tally()
    read = read_documents(find_files(str(sample)).files, FieldNames(), tally, render=Document, max_bad_lines=0)
    documents = [document.text for document in read]
    assert tally.bad_lines.total == 0
    assert Path(sysconfig.get_path("stdlib"), "argparse.py").read_text() in documents
    assert sum(map(len, documents)) > 5e6


def test_the_sample_is_the_same_each_time_it_is_written(tmp_path):
    one, other = sample_file(tmp_path / "one"), sample_file(tmp_path / "other")
    assert one.name == other.name
    assert one.read_bytes() == other.read_bytes()


def test_the_sample_is_written_once(tmp_path):
    sample = sample_file(tmp_path)
    written = sample.stat().st_mtime_ns
    assert sample_file(tmp_path) == sample
    assert sample.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [sample]


def test_another_standard_library_gives_another_sample(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "only.py").write_text("'''Text.'''\n")
    sample = sample_file(tmp_path, tmp_path / "library")
    assert sample != sample_file(tmp_path)
    assert json.loads(sample.read_text()) == {"text": "'''Text.'''\n"}


def test_installed_packages_tests_and_undecodable_modules_are_left_out(tmp_path):
    library = tmp_path / "library"
    for name in ("site-packages/other.py", "json/tests/test_it.py", "json/decoder.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"name = {name!r}\n")
    (library / "latin.py").write_bytes(b"'\xe9'\n")
    lines = sample_file(tmp_path, library).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "name = 'json/decoder.py'\n"}]


def test_a_python_without_its_source_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no module source in .* give your own data\.source"):
        sample_file(tmp_path, tmp_path / "nothing")


def test_a_sample_that_another_node_makes_meanwhile_stays_as_it_is(tmp_path, monkeypatch):
    """Its ranks may read it already; they would take a file that is replaced for one that somebody writes."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "module.py").write_text("pass")
    made_elsewhere = sample_file(tmp_path / "elsewhere", library)
    ours = tmp_path / "cache" / made_elsewhere.name

    def dumps(record):
        ours.hardlink_to(made_elsewhere)
        return "{}"

    monkeypatch.setattr("llama_core.data.sample.json.dumps", dumps)
    assert sample_file(ours.parent, library) == ours
    assert ours.samefile(made_elsewhere)
    assert [path.name for path in ours.parent.iterdir()] == [ours.name]


def test_the_tokenizer_of_the_sample_is_trained_once_and_gives_text_back(tmp_path, monkeypatch):
    monkeypatch.setattr("llama_core.data.sample._modules", lambda library: sorted(library.glob("a*.py")))
    file = sample_tokenizer(tmp_path)
    written = file.stat().st_mtime_ns
    assert sample_tokenizer(tmp_path) == file
    assert file.stat().st_mtime_ns == written
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.vocab_size == SAMPLE_VOCABULARY
    text = "import argparse\n\n\ndef main() -> None:\n    print('naïve ☃')\n"
    (ids,) = tokenizer.encode_documents([text])
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(ids.tolist()) == text
    assert len(ids) < len(text) / 2
