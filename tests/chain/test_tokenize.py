"""``tokenize``: shards built by several processes, and the refusal of jobs that would wait for them."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from tiers import nightly
from waiting import eventually

import training_infra
from llama_core.chain import tokenize as module
from llama_core.chain.tokenize import refuse_long_wait, tokenize
from llama_core.config.run import RunConfig
from llama_core.data.datasets import load_datasets
from llama_core.data.shards import grouping
from llama_core.errors import ConfigError, DataError
from llama_core.launch.jobs import shard_jobs
from llama_core.units import MIB
from training_infra import cli

NUM_FILES = 6


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder of files, each of which is a shard."""
    monkeypatch.setattr(grouping, "ALONE_BYTES", 1)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(NUM_FILES):
        texts = [f"text {number} {place}, of its own words" for place in range(50)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture
def config(corpus, tmp_path):
    return RunConfig.from_mapping(
        {
            "data": {"source": str(corpus), "cache_dir": str(tmp_path / "cache")},
            "training": {"seq_len": 16, "steps": 1},
            "launch": {"device": "cpu"},
        }
    )


def digest(config):
    return load_datasets(config.data, config.spec, seq_len=16).train.digest


def on_slurm(config):
    return RunConfig.from_mapping(config.model_dump() | {"launch": {"launcher": "slurm", "device": "cpu"}})


def test_several_processes_build_the_shards_that_one_would(config, tmp_path):
    made = tokenize(config, 3)
    assert (made.num_shards, made.num_new_shards, made.num_documents) == (NUM_FILES, NUM_FILES, 50 * NUM_FILES)
    assert made.directories == (str(tmp_path / "cache"),)
    alone = config.with_overrides(f"data.cache_dir={tmp_path / 'other'}")
    assert digest(config) == digest(alone)


def test_a_second_call_builds_nothing_and_an_added_file_one_shard(config, corpus):
    tokenize(config, 2)
    assert tokenize(config, 2).num_new_shards == 0
    (corpus / "more.jsonl").write_text('{"text": "one more text"}\n')
    assert tokenize(config, 2).num_new_shards == 1


def test_held_out_sources_are_tokenised_too(config, corpus, tmp_path):
    held_out = (corpus / "0.jsonl").rename(tmp_path / "held-out.jsonl")
    made = tokenize(config.with_overrides(f"data.validation={held_out}"), 2)
    assert (made.num_shards, made.num_new_shards) == (NUM_FILES, NUM_FILES)


def test_of_a_folder_that_is_both_each_file_is_tokenised_for_its_purpose(config, corpus):
    (corpus / "0.jsonl").rename(corpus / "test.jsonl")
    made = tokenize(config.with_overrides(f"data.validation={corpus}"), 2)
    assert (made.num_new_shards, made.num_documents) == (NUM_FILES, 50 * NUM_FILES)
    alone = tokenize(config.with_overrides("data.validation_fraction=0"), 2)
    assert (alone.num_new_shards, alone.num_documents) == (0, 50 * (NUM_FILES - 1))


def test_a_file_that_cannot_be_read_is_one_line_and_the_other_shards_are_kept(config, corpus):
    (corpus / "9.json").write_text("[1, ")
    with pytest.raises(DataError, match=r"9\.json:1 .*invalid JSON") as refused:
        tokenize(config, 1)
    assert str(refused.value).isprintable()
    (corpus / "9.json").unlink()
    assert tokenize(config, 1).num_new_shards < NUM_FILES


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (signal.SIGKILL, "start again, with fewer --workers if it was killed for want of memory"),
        *((died, "the file is damaged, or was changed meanwhile") for died in (signal.SIGBUS, signal.SIGSEGV)),
    ],
)
def test_a_killed_worker_is_one_line_and_the_next_call_finishes(config, corpus, monkeypatch, number, remedy):
    code = KILLED_IN_ITS_THIRD_ORDER.replace("NUMBER", str(int(number)))
    monkeypatch.setattr("llama_core.data.shards.workers._COMMAND", (sys.executable, "-c", code))
    where = rf"while it read {corpus}/\d\.jsonl; {remedy}"
    with pytest.raises(DataError, match=rf"a process that builds shards has ended \(signal {int(number)}\) {where}"):
        tokenize(config, 1)
    monkeypatch.undo()
    monkeypatch.setattr(grouping, "ALONE_BYTES", 1)
    assert tokenize(config, 1).num_new_shards == NUM_FILES - 2


KILLED_IN_ITS_THIRD_ORDER = """
import os, sys
from llama_core.data.shards import worker as shard_worker
build, built = shard_worker.build_shard, []
def build_or_die(*arguments, **options):
    if len(built) == 2:
        os.kill(os.getpid(), NUMBER)
    built.append(build(*arguments, **options))
shard_worker.build_shard = build_or_die
sys.exit(shard_worker.main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, nightly(signal.SIGINT), nightly(signal.SIGTERM)])
def test_a_command_that_is_stopped_goes_on_with_the_missing_shards(config, corpus, tmp_path, number):
    for path in corpus.iterdir():
        path.write_text(path.read_text() * 400)
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml())
    code = "from llama_core.data.shards import grouping; grouping.ALONE_BYTES = 1;"
    code += f"from training_infra import cli; cli.main(['tokenize', '--config', {str(file)!r}, '--workers', '1'])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    eventually(lambda: process.poll() is not None or len(list((tmp_path / "cache").glob("shard-*"))) > 1, every=0.02)
    os.kill(process.pid, number)
    _, errors = process.communicate()
    assert "Traceback" not in errors
    made = tokenize(config, 2)
    assert 0 < made.num_new_shards <= NUM_FILES - 2
    assert made.num_documents == 400 * 50 * NUM_FILES
    assert not list((tmp_path / "cache").glob(".shard-*"))


def test_a_job_that_would_wait_long_for_tokens_is_refused_until_they_are_there(config, monkeypatch):
    monkeypatch.setattr(module, "SLOW_BYTES_PER_SECOND", 10)
    with pytest.raises(
        DataError, match=r"not tokenised yet, .* would wait .* min .*; first run training-infra tokenize"
    ):
        refuse_long_wait(on_slurm(config))
    tokenize(config, 2)
    refuse_long_wait(on_slurm(config))


def test_little_data_is_refused_nowhere_and_nothing_is_written(config, tmp_path):
    refuse_long_wait(on_slurm(config))
    assert not (tmp_path / "cache").exists()


def test_without_a_terminal_lines_say_how_fast_it_is_and_how_long_it_takes(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 2.0, 31.0, 60.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    lines = module._Lines()
    for done in (1, 2, 31, 60):
        lines(done * MIB, 60 * MIB)
    assert capsys.readouterr().out.splitlines() == [
        "tokenize  1.00 MiB of 60.00 MiB, 1.0 MiB/s, 59.0 s left",
        "tokenize  31.00 MiB of 60.00 MiB, 1.0 MiB/s, 29.0 s left",
        "tokenize  60.00 MiB of 60.00 MiB, 1.0 MiB/s, 0.0 s left",
    ]


def test_no_process_and_no_data_are_refused(config):
    with pytest.raises(ConfigError, match="workers=0"):
        tokenize(config, 0)


def test_a_task_of_a_job_array_builds_what_is_missing_and_leaves_its_problem(config, corpus, tmp_path):
    start = module.Start(config.data, config.spec)
    orders = tuple(order for source in module._found(start) for order in module._orders(source))
    task = shard_jobs.ShardTask(orders[:4], start, tmp_path / "problem.json")
    task()
    assert len(list((tmp_path / "cache").glob("shard-*"))) == 4
    assert not task.ending.exists()
    shard_jobs.ShardTask(orders, start, tmp_path / "problem.json")()
    assert len(list((tmp_path / "cache").glob("shard-*"))) == NUM_FILES
    (corpus / "0.jsonl").write_text("changed")
    for shard in (tmp_path / "cache").glob("shard-*"):
        shard.rename(tmp_path / shard.name)
    task()
    assert "0.jsonl changed while it was read" in shard_jobs._problem(task.ending)


def test_the_command_ends_with_one_line_and_its_json_is_what_python_returns(config, tmp_path, capsys):
    flags = ["--data", config.data.source, "--set", f"data.cache_dir={tmp_path / 'cache'}", "--seq-len", "16"]
    assert cli.main(["tokenize", *flags, "--workers", "2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        rf"tokenize  [\d,]+ tokens of 300 documents in 6 shards, 6 of them new \(.*\): {tmp_path}/cache", last
    )
    assert cli.main(["tokenize", *flags, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    again = training_infra.tokenize(
        "tiny_llama3_50m", config.data.source, cache_dir=str(tmp_path / "cache"), seq_len=16, num_workers=1
    )
    assert record | {"seconds": 0} == again | {"seconds": 0, "directories": [str(tmp_path / "cache")]}
    assert record["num_new_shards"] == 0


def test_python_refuses_no_process_in_its_own_words(config):
    with pytest.raises(ConfigError, match="workers=0"):
        training_infra.tokenize("tiny_llama3_50m", config.data.source, num_workers=0)
