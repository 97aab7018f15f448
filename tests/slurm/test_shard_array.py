"""``tokenize`` in a job array of the real cluster."""

import json

import pytest

from llama_core.chain.tokenize import tokenize
from llama_core.config.run import RunConfig
from llama_core.data.datasets import load_datasets
from llama_core.data.shards import grouping
from llama_core.errors import DataError


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "ALONE_BYTES", 1)
    (tmp_path / "corpus").mkdir()
    for number in range(5):
        texts = [f"text {number} {place}, of its own words" for place in range(50)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "corpus" / f"{number}.jsonl").write_text(lines)
    slurm = {"cpus_per_rank": 1, "memory_gb_per_node": 2, "time_limit_min": 5}
    return RunConfig.from_mapping(
        {
            "data": {"source": str(tmp_path / "corpus"), "cache_dir": str(tmp_path / "cache")},
            "training": {"seq_len": 16, "steps": 1},
            "parallel": {"gpus": 2, "tp": 2},
            "launch": {"launcher": "slurm", "device": "cpu", "slurm": slurm},
        }
    )


def test_a_job_array_builds_the_shards_that_this_machine_would(config, tmp_path):
    made = tokenize(config, 2)
    assert (made.num_shards, made.num_new_shards, made.num_documents) == (5, 5, 250)
    there = load_datasets(config.data, config.spec, seq_len=16).train.digest
    here = config.with_overrides(
        f"data.cache_dir={tmp_path / 'other'}", "launch.launcher=local", "parallel.gpus=1", "parallel.tp=1"
    )
    tokenize(here, 1)
    assert load_datasets(here.data, here.spec, seq_len=16).train.digest == there


@pytest.mark.nightly
def test_a_file_that_an_element_cannot_read_is_one_line_and_the_next_array_builds_the_rest(config, tmp_path):
    (tmp_path / "corpus" / "9.json").write_text("[1, ")
    with pytest.raises(DataError, match=r"9\.json:1 .*invalid JSON"):
        tokenize(config, 3)
    (tmp_path / "corpus" / "9.json").unlink()
    assert tokenize(config, 3).num_new_shards < 5
