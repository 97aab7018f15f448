"""Of a folder, only the files of the split that is asked for are read, and of a saved data set only its own."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import write_jsonl
from test_find import put

from llama_core.chain.downloads import resolve
from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig, RunConfig
from llama_core.data.check import check_data
from llama_core.data.corpus import Tally, read_documents
from llama_core.data.datasets import load_datasets
from llama_core.data.find import find_files
from llama_core.data.formats import FieldNames
from llama_core.errors import DataError

SPEC = replace(model_spec("tiny_llama3_50m"), vocab_size=300)


def found(path, **options):
    return [str(file.path.relative_to(path)) for file in find_files(path, **options).files]


FOLDERS = {
    "files": (["train.jsonl"], ["dev.jsonl", "test.jsonl"]),
    "numbered": (
        ["data/train-00000-of-00002.json", "data/train-00001-of-00002.json"],
        ["data/validation-00000-of-00001.json"],
    ),
    "folders": (["en/train/a.jsonl"], ["de/Testing/a.jsonl", "en/eval/a.jsonl", "en/val/b.jsonl"]),
    "named by the others": (["corpus.jsonl", "more/b.jsonl"], ["corpus_valid.jsonl"]),
    "longer words": (["contest.jsonl", "devices/a.jsonl", "latest.jsonl"], ["latest.evaluation.jsonl"]),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_what_a_folder_holds_for_training_and_for_others_is_told_apart(here, name):
    training, others = FOLDERS[name]
    put(*(f"in/{file}" for file in (*training, *others)))
    assert found("in") == training
    assert found("in", held_out=True) == others
    number = "1 file" if len(others) == 1 else f"{len(others)} files"
    names = ", ".join(Path(file).name for file in others)
    assert list(find_files("in").notes()) == [f"left out {number} for validation or tests ({names})"]
    [note] = find_files("in", held_out=True).notes()
    assert "for training" in note


def test_a_wildcard_is_treated_like_a_folder(here):
    put("in/train.jsonl", "in/test.jsonl", "in/more/test/a.jsonl")
    assert [str(file.path) for file in find_files("in/*").files] == ["in/train.jsonl"]
    assert [str(file.path) for file in find_files("in/te*").files] == ["in/test.jsonl"]


def test_what_is_named_is_read_whatever_its_name_says(here):
    put("test/in/a.jsonl", "test/in/b.jsonl", "val.jsonl")
    assert found("test/in") == found("test/in", held_out=True) == ["a.jsonl", "b.jsonl"]
    assert len(find_files("test/in", "val.jsonl").files) == 3


def test_one_folder_gives_the_data_of_training_and_those_held_out(here):
    texts = {name: [f"{name} number {n} " + "x" * 40 for n in range(9)] for name in ("train", "validation", "test")}
    Path("in").mkdir()
    for name, written in texts.items():
        write_jsonl(Path(f"in/{name}.jsonl"), written)
    data = DataConfig(source="in", validation="in", cache_dir="cache")
    statistics = load_datasets(data, SPEC, seq_len=32).statistics
    assert (statistics.num_documents, statistics.num_validation_documents) == (9, 18)
    assert statistics.num_shared_documents == 0
    assert check_data(data, SPEC).notes == statistics.notes


def test_a_folder_of_a_run_is_left_as_it_is_by_the_search_for_names_of_the_hub(here):
    put("org/data/train.jsonl", "org/data/test.jsonl")
    config = RunConfig.from_mapping({"model": "tiny_llama3_50m", "data": {"source": "org/data"}})
    assert resolve(config).config.data.source == "org/data"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    library = pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        library.disable_progress_bars()
        yield library


def made(datasets, name, number=5):
    return datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(number)]})


def texts_of(folder, **options):
    files = find_files(str(folder), **options).files
    return sorted(
        document.text for document in read_documents(files, FieldNames(), Tally(), render=None, max_bad_lines=0)
    )


def test_of_a_saved_data_set_the_rows_are_those_that_its_library_loads(tmp_path, datasets):
    made(datasets, "row", 50).save_to_disk(tmp_path / "saved", num_shards=3)
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    saved.map(lambda row: {"text": row["text"].upper()})
    saved.filter(lambda row: "1" in row["text"])
    assert len(list((tmp_path / "saved").glob("cache-*.arrow"))) == 2
    assert texts_of(tmp_path / "saved") == sorted(datasets.load_from_disk(str(tmp_path / "saved"))["text"])
    assert texts_of(tmp_path / "saved" / "*.arrow") == texts_of(tmp_path / "saved")
    assert "2 files that state.json does not list (cache-" in " ".join(find_files(str(tmp_path / "saved")).notes())


def test_of_saved_splits_those_for_training_are_read_and_no_older_ones(tmp_path, datasets):
    splits = {name: made(datasets, name) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    made(datasets, "older").save_to_disk(tmp_path / "saved" / "train_2020")
    assert texts_of(tmp_path / "saved") == splits["train"]["text"]
    assert texts_of(tmp_path / "saved", held_out=True) == splits["test"]["text"]
    notes = " ".join(find_files(str(tmp_path / "saved")).notes())
    assert "1 file not among the splits of dataset_dict.json (data-00000-of-00001.arrow)" in notes


def test_in_the_cache_of_the_library_results_that_it_has_computed_are_left_out(tmp_path, datasets):
    source = write_jsonl(tmp_path / "a.jsonl", [f"row {n}" for n in range(5)])
    loaded = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path / "cache"))
    loaded.map(lambda row: {"text": row["text"].upper()})
    [folder] = {file.parent for file in (tmp_path / "cache").rglob("cache-*.arrow")}
    assert texts_of(folder) == loaded["text"]
    assert "that datasets has computed from the others (cache-" in " ".join(find_files(str(folder)).notes())


def test_a_saved_data_set_that_is_not_whole_is_refused(tmp_path, datasets):
    made(datasets, "row", 50).save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"state\.json lists 'data-00001-of-00003\.arrow', which is missing; copy it"):
        find_files(str(tmp_path / "saved"))


def test_a_choice_of_rows_that_older_versions_have_saved_is_refused(tmp_path, datasets):
    made(datasets, "row").save_to_disk(tmp_path / "saved")
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(
        json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]})
    )
    with pytest.raises(DataError, match="saved as a choice of the rows of its files; save it again"):
        find_files(str(tmp_path / "saved"))


@pytest.mark.parametrize("state", ["[1]", "{", '{"_data_files": 7}', '{"_data_files": ["x"], "global_step": 5}'])
def test_a_file_of_another_program_with_the_same_name_says_nothing(here, state):
    put("in/a.arrow", "in/cache-0123456789abcdef.arrow")
    Path("in/state.json").write_text(state)
    assert found("in") == ["a.arrow", "cache-0123456789abcdef.arrow"]


def test_a_pipe_in_the_place_of_a_description_is_not_read(here):
    put("in/train/a.arrow")
    os.mkfifo("in/train/state.json")
    os.mkfifo("in/dataset_dict.json")
    assert found("in") == ["train/a.arrow"]
