"""The checks that ranks make on their nodes."""

import json
import os
import resource
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed import run_ranks

from llama_core.config.run import DataConfig, RunConfig
from llama_core.data.datasets import load_datasets
from llama_core.errors import DataError, EnvironmentMismatchError
from llama_core.launch.rank.checks import (
    RankFacts,
    allow_open_files,
    check_data_agrees,
    check_own_device,
    check_ranks_agree,
    disagreements,
    find_room_for_temporary_files,
)
from llama_core.machine.node import own_host
from llama_core.parallel.ranks import own_rank
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, write_json

PLAN = ParallelPlan()
FACTS = RankFacts(0, "node1", "H100", 80, "3.11.7", "2.13.0", "2.27.5", "abc", "def")


def prepared(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    config = RunConfig.from_mapping({"launch": {"device": "cpu"}})
    run.config.write_text(config.to_yaml())
    write_json(run.plan, {"tp": 1})
    return run, config


def agree(run, config):
    check_ranks_agree(run, config)


def disagree(run, config):
    """Check a plan that differs on every rank, and return the refusal."""
    mine = RunDirectory(run.path.with_name(f"run-of-{torch.distributed.get_rank()}"))
    mine.create()
    mine.config.write_text(config.to_yaml())
    write_json(mine.plan, {"tp": torch.distributed.get_rank()})
    with pytest.raises(EnvironmentMismatchError) as refused:
        check_ranks_agree(mine, config)
    return str(refused.value)


def test_ranks_that_agree_record_their_environment_beside_the_submitters(tmp_path):
    run, config = prepared(tmp_path)
    write_json(run.environment, {"facts": {"python": "Python 3.11"}})
    run_ranks(2, agree, run, config)
    record = read_json(run.environment)
    assert record["facts"] == {"python": "Python 3.11"}
    assert [found["torch"] for found in record["ranks"]] == [torch.__version__] * 2


def test_every_rank_refuses_to_train_if_the_plans_differ(tmp_path):
    run, config = prepared(tmp_path)
    told = run_ranks(2, disagree, run, config)
    assert told[0] == told[1]
    assert told[0].startswith("the ranks differ in request: ")


def read_same_and_other_data(folder):
    """Read the same texts as the other rank, then with other documents held out; return the refusal."""
    fractions = (0.0, 0.5 * own_rank())
    source, cache = str(folder / "texts.jsonl"), str(folder / f"of-{own_rank()}")
    configs = [DataConfig(source=source, cache_dir=cache, validation_fraction=fraction) for fraction in fractions]
    same, other = (load_datasets(config, RunConfig().spec, seq_len=16) for config in configs)
    check_data_agrees(same)
    with pytest.raises(DataError) as refused:
        check_data_agrees(other)
    return str(refused.value)


def test_every_rank_refuses_to_train_if_the_data_differ(tmp_path):
    texts = (json.dumps({"text": f"text {number}"}) for number in range(20))
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    told = run_ranks(2, read_same_and_other_data, tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith("rank 1 on ")
    assert " has read other data than rank 0: " in told[0]


def test_a_difference_names_the_machines_and_their_values():
    ranks = [replace(FACTS, rank=rank, host=f"node{rank}") for rank in range(6)]
    ranks[5] = replace(ranks[5], torch="2.12.0")
    assert disagreements(ranks[:5]) == []
    assert disagreements(ranks) == [
        "the ranks differ in torch: 2.13.0 on node0, node1, node2 and 2 more (rank 0, ...), 2.12.0 on node5 (rank 5); "
        "make the nodes the same"
    ]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (12080, r"CUDA 12\.8 at most; update the driver, or pip install torch --index-url \S+/whl/cu128$"),
        (12020, r"CUDA 12\.2 at most; update the driver, or pip install torch --index-url \S+/whl/cu126$"),
        (11040, r"CUDA 11\.4 at most; update the driver$"),
    ],
)
def test_a_driver_too_old_for_torch_is_named_with_the_build_that_it_runs(monkeypatch, found, says):
    def init():
        raise RuntimeError(
            f"The NVIDIA driver on your system is too old (found version {found}). Please update your GPU driver by "
            "downloading and installing a new\nversion from the URL: http://www.nvidia.com/Download/index.aspx"
        )

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = RunConfig.from_mapping({"launch": {"device": "cuda", "launcher": "slurm"}})
    with pytest.raises(EnvironmentMismatchError, match=r"is built for CUDA 13\.0, but the node's driver runs " + says):
        check_own_device(config, PLAN)


@pytest.fixture
def gpu(monkeypatch):
    """The GPU of this machine."""
    gpu = SimpleNamespace(name="NVIDIA A40", major=8, minor=6, total_memory=10**11)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    return gpu


def test_fp8_needs_a_gpu_that_multiplies_it(gpu):
    config = RunConfig.from_mapping({"launch": {"device": "cuda"}, "training": {"precision": "fp8"}})
    with pytest.raises(EnvironmentMismatchError, match=r"fp8 needs .* 8\.9 or newer, and this is NVIDIA A40; use"):
        check_own_device(config, PLAN)
    gpu.minor = 9
    check_own_device(config, PLAN)


def test_several_nodes_need_a_torch_that_splits_all_groups_at_once(gpu, monkeypatch):
    config = RunConfig.from_mapping({"launch": {"device": "cuda", "nodes": 2}, "parallel": {"gpus": 2}})
    check_own_device(config, PLAN)
    monkeypatch.setattr("torch.distributed.split_group", lambda parent_pg=None, split_ranks=None: None)
    with pytest.raises(EnvironmentMismatchError, match=r"one by one, .*; install torch 2\.13 or newer$"):
        check_own_device(config, PLAN)
    check_own_device(config.with_overrides("launch.nodes=1"), PLAN)


def test_a_node_without_pythons_headers_is_told_before_the_ranks_meet(gpu, monkeypatch, tmp_path, caplog):
    """Triton compiles against them; without compiled blocks only the loss needs Triton, and it has another way."""
    config = RunConfig.from_mapping({"launch": {"device": "cuda"}})
    check_own_device(config, replace(PLAN, compile=True))
    check_own_device(config, PLAN)
    assert caplog.text == ""
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    with pytest.raises(EnvironmentMismatchError, match=rf"compile needs Python\.h in {tmp_path} .*compile=false$"):
        check_own_device(config, replace(PLAN, compile=True))
    check_own_device(config, PLAN)
    assert "the loss runs in blocks" in caplog.text
    assert f"lacks Python.h in {tmp_path}" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a node without CUDA")
def test_a_node_without_the_planned_device_says_so(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    config = RunConfig.from_mapping({"launch": {"device": "cuda", "launcher": "slurm"}})
    check_own_device(config.with_overrides("launch.device=cpu"), PLAN)
    with pytest.raises(EnvironmentMismatchError, match=r"^rank 3 on .*: torch .* sees no CUDA device"):
        check_own_device(config, PLAN)


@pytest.fixture
def temporary_folder(monkeypatch):
    """Return a function that sets the folder for temporary files; the test's own is back after it."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    return lambda folder: monkeypatch.setenv("TMPDIR", str(folder))


def temporary_files():
    """Return where this process keeps temporary files, and where a C program that it starts does."""
    with tempfile.NamedTemporaryFile() as own:
        made = subprocess.run(["mktemp"], capture_output=True, text=True, check=True).stdout.strip()
        Path(made).unlink()
        return {str(Path(name).parent) for name in (own.name, made)}


@pytest.mark.parametrize("fault", ["missing", pytest.param("little room", marks=pytest.mark.root)])
def test_a_rank_without_room_for_temporary_files_keeps_them_in_the_run_directory(
    fault, tmp_path, temporary_folder, caplog, request
):
    run, _ = prepared(tmp_path)
    folder = tmp_path / fault if fault == "missing" else request.getfixturevalue("disk_of")("1m")
    temporary_folder(folder)
    find_room_for_temporary_files(run)
    (where,) = temporary_files()
    assert where.startswith(str(run.logs / "tmp"))
    assert f"{folder} on" in caplog.text
    assert where in caplog.text


def test_temporary_files_in_the_run_directory_are_closed_to_others(tmp_path, temporary_folder):
    """Among them are the caches of torch's compiler, which are pickles."""
    run, _ = prepared(tmp_path)
    temporary_folder(tmp_path / "missing")
    folder = run.temporary(own_host())
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    find_room_for_temporary_files(run)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.root
def test_a_folder_for_temporary_files_that_another_user_has_made_is_refused(tmp_path, temporary_folder):
    run, _ = prepared(tmp_path)
    temporary_folder(tmp_path / "missing")
    folder = run.temporary(own_host())
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    with pytest.raises(EnvironmentMismatchError, match=f"{folder} belongs to another user"):
        find_room_for_temporary_files(run)


def test_a_rank_with_room_for_temporary_files_keeps_them_where_they_were(tmp_path, temporary_folder, caplog):
    run, _ = prepared(tmp_path)
    temporary_folder(tmp_path)
    tempfile.tempdir = None
    find_room_for_temporary_files(run)
    assert temporary_files() == {str(tmp_path)}
    assert not caplog.records


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
