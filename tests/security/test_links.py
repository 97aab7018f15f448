"""A run or a folder of weights may hold links to a reader's private files: none is followed, so none gets around."""

import json
import os
import shutil
from pathlib import Path

import pytest
from inodes import opened
from synthetic_run import FAILED, write_run

from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.launch.jobs.submission import submit
from llama_core.launch.logs import LogFollower
from llama_core.records.checkpoints import STATE, find_problem, list_checkpoints, write_manifest
from llama_core.records.checksums import FileSum
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import refuse_links
from llama_core.records.files import open_file, write_json
from llama_core.records.metrics import append_metrics, read_heartbeat
from llama_core.records.profiles import ProfileRecord, write_profile
from llama_core.records.timelines import LaneRecord, write_lane
from llama_core.runs.export import _own_tokenizer, _write_tokenizer
from llama_core.sweep.directory import SweepDirectory, SweepRecord, write_record
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.steps import prepare
from llama_core.trackers.registry import folders_with_links
from training_infra import cli

COMMANDS = (["report"], ["compare", "--json"], ["doctor"], ["logs"])
PRIVATE = "the marker of a private file"


@pytest.fixture
def run(tmp_path):
    """A run with every record that a report reads."""
    run = write_run(tmp_path / "run", outcome=FAILED)
    run.trace.mkdir()
    append_metrics(run, read_heartbeat(run))
    write_profile(run, ProfileRecord(0, {"matmul": 1.0}))
    write_lane(run, 0, LaneRecord(("0F0",), (0.0,), (1.0,)))
    checkpoint = run.checkpoints / "step-00000040"
    checkpoint.mkdir()
    write_json(checkpoint / STATE, {"step": 40})
    (checkpoint / "__0_0.distcp").write_bytes(b"weights")
    write_manifest(checkpoint, {})
    return run


def look(run):
    for name, *flags in COMMANDS:
        cli.main([name, str(run.path), *flags])


def moved_away(path, to):
    """Put a link to it in the place of a file or folder of a run."""
    shutil.move(path, to)
    path.symlink_to(to)


def names(run):
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*"))


def test_no_command_opens_a_file_of_a_run_through_a_link(run, tmp_path):
    (tmp_path / "private").mkdir()
    files = [path for path in run.path.rglob("*") if path.is_file()]
    with opened(files) as before:
        look(run)
    assert len(before) > 15  # otherwise nothing is tested
    for number, path in enumerate(files):
        moved_away(path, tmp_path / "private" / str(number))
    with opened((tmp_path / "private").iterdir()) as after:
        look(run)
    assert after == []


@pytest.mark.parametrize("name", ["metrics", "logs", "checkpoints", "checkpoints/step-00000040", "trace"])
def test_no_command_opens_a_file_in_a_folder_of_a_run_that_is_a_link(run, tmp_path, name):
    moved_away(run.path / name, tmp_path / "private")
    files = [path for path in (tmp_path / "private").rglob("*") if path.is_file()]
    with opened(files) as found:
        look(run)
    assert found == []


def test_a_link_to_a_run_is_followed(run, tmp_path):
    (tmp_path / "mine").symlink_to(run.path)
    linked = type(run)(tmp_path / "mine")
    with opened([run.outcome, run.logs / "rank-00000.log"]) as found:
        look(linked)
    assert len(found) == 2


def test_a_log_that_is_a_link_is_not_on_the_page(run, tmp_path, capsys):
    (tmp_path / "id_ed25519").write_text(f"BEGIN\n{PRIVATE}\nEND\n")
    (run.logs / "rank-00000.log").unlink()
    (run.logs / "rank-00000.log").symlink_to(tmp_path / "id_ed25519")
    assert cli.main(["report", str(run.path)]) == 0
    assert PRIVATE not in run.report.read_text()
    assert cli.main(["logs", str(run.path)]) == 2
    told = capsys.readouterr()
    assert "rank-00000.log: it is a link" in told.err
    assert PRIVATE not in told.out + told.err


def test_a_log_that_becomes_a_link_after_a_look_is_not_read(run, tmp_path):
    follower = LogFollower(run)
    (tmp_path / "id_ed25519").write_text(f"{PRIVATE}\n" * 1000)
    log = run.logs / "rank-00000.log"
    log.unlink()
    log.symlink_to(tmp_path / "id_ed25519")
    with pytest.raises(RunDirectoryError, match=r"rank-00000\.log: it is a link"):
        list(follower.new_lines())


def test_a_folder_that_becomes_a_link_while_it_is_opened_leads_nowhere(tmp_path, monkeypatch):
    """Just before the last name is opened."""
    for name, text in (("run", "own"), ("private", PRIVATE)):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "rank-00000.log").write_text(text)
    really = os.open

    def swapped(path, flags, *options, **more):
        if path == "rank-00000.log" and not (tmp_path / "run" / "logs").is_symlink():
            (tmp_path / "run" / "logs").rename(tmp_path / "old")
            (tmp_path / "run" / "logs").symlink_to(tmp_path / "private" / "logs")
        return really(path, flags, *options, **more)

    monkeypatch.setattr(os, "open", swapped)
    with open_file(tmp_path / "run" / "logs" / "rank-00000.log", tmp_path / "run") as file:
        assert file.read() == b"own"
    with pytest.raises(OSError, match="it is a link"):
        open_file(tmp_path / "run" / "logs" / "rank-00000.log", tmp_path / "run")


@pytest.mark.root
def test_a_second_name_of_a_private_file_is_not_read_in_a_run_of_somebody_else(run, tmp_path):
    """Where the kernel allows such hard links."""
    (tmp_path / "id_ed25519").write_text(f"BEGIN\n{PRIVATE}\nEND\n")
    log = run.logs / "rank-00000.log"
    log.unlink()
    log.hardlink_to(tmp_path / "id_ed25519")
    os.chown(run.path, 65534, 65534)
    assert cli.main(["report", str(run.path)]) == 0
    assert PRIVATE not in run.report.read_text()


@pytest.mark.parametrize("name", ["../private", "sub/../../private", "/etc/passwd", "link"])
def test_a_manifest_leads_to_no_file_outside_its_checkpoint(run, tmp_path, name):
    (checkpoint,) = (path for path in list_checkpoints(run) if path.name == "step-00000040")
    private = run.checkpoints / "private"
    private.write_text(PRIVATE)
    (checkpoint / "sub").mkdir()
    (checkpoint / "link").symlink_to(private)
    write_json(checkpoint / "manifest.json", {"files": {name: vars(FileSum(private.stat().st_size, "00000000"))}})
    with opened([private, "/etc/passwd"]) as found:
        problem = find_problem(checkpoint)
    assert found == []
    assert name in problem


TOKENIZER = """{"version": "1.0", "added_tokens": [{"id": 0, "content": "</s>", "single_word": false, "lstrip": false,
"rstrip": false, "normalized": false, "special": true}], "model": {"type": "WordLevel", "vocab": {"</s>": 0},
"unk_token": "</s>"}}"""


def exported(folder, out):
    """Return the files of an export's tokenizer, and what it says."""
    out.mkdir()
    told = []
    config = RunConfig.from_mapping({"data": {"tokenizer": str(folder)}})
    tokenizer = _own_tokenizer(RunDirectory(out), config, told.append)
    if tokenizer is not None:
        _write_tokenizer(tokenizer, config.data, out, told.append)
    return {path.name: path.read_text() for path in out.iterdir()}, " ".join(told)


def test_an_export_holds_no_file_that_a_link_of_its_tokenizer_leads_to(tmp_path):
    (tmp_path / "id_ed25519").write_text(json.dumps({"note": PRIVATE, "hf_token": PRIVATE}))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(TOKENIZER)
    for name in ("special_tokens_map.json", "merges.txt"):
        (folder / name).symlink_to(tmp_path / "id_ed25519")
    files, told = exported(folder, tmp_path / "out")
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    assert PRIVATE not in "".join(files.values())
    assert f"left out special_tokens_map.json: it is a link to {tmp_path / 'id_ed25519'}" in told


def test_an_export_waits_for_no_pipe(tmp_path):
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    os.mkfifo(tmp_path / "merges.txt")
    files, told = exported(tmp_path, tmp_path / "out")
    assert "merges.txt" not in files
    assert "left out merges.txt: it is no regular file" in told


def test_a_tokenizer_in_the_cache_of_hugging_face_is_exported_whole(tmp_path):
    """Whose folders hold links."""
    snapshot, blobs = tmp_path / "snapshots" / "1234", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "aa").write_text(TOKENIZER)
    (blobs / "bb").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/aa")
    (snapshot / "special_tokens_map.json").symlink_to("../../blobs/bb")
    (snapshot / "added_tokens.json").symlink_to("special_tokens_map.json")
    files, _ = exported(snapshot, tmp_path / "out")
    assert files["tokenizer.json"] == TOKENIZER
    assert files["special_tokens_map.json"] == files["added_tokens.json"] == "{}"


@pytest.mark.parametrize("link", ["config", "data"])
def test_what_the_user_names_may_be_a_link(tmp_path, link, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "hello"}\n')
    (tmp_path / "data.jsonl").symlink_to("texts.jsonl")
    (tmp_path / "run.yaml").write_text(f"launch: {{device: cpu}}\ndata: {{source: {tmp_path / 'data.jsonl'}}}\n")
    (tmp_path / "config.yaml").symlink_to("run.yaml")
    assert cli.main(["estimate-memory", "--config", str(Path(tmp_path / "config.yaml"))]) == 0


@pytest.mark.parametrize(
    "name",
    [
        "logs/submit.lock",
        "logs/rank-00000.log",
        "logs/reserve",
        "logs/wandb",
        "logs/submitit",
        "logs/submitit/submission-00000",
        "metrics",
        "metrics/_tail.jsonl",
    ],
)
def test_a_run_from_an_archive_is_submitted_through_no_link(tmp_path, name):
    run = write_run(tmp_path / "run", outcome=FAILED)
    private = tmp_path / "private"
    private.mkdir()
    (private / "heartbeat.json").write_text(PRIVATE)
    link = run.path / name
    shutil.rmtree(link, ignore_errors=True)
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(private if name == "metrics" else private / "heartbeat.json")
    with pytest.raises(RunDirectoryError, match=f"{name} is a link, and a run writes through none"):
        submit(run, RunConfig.load(run.config), 1)
    assert {path.name: path.read_text() for path in private.iterdir()} == {"heartbeat.json": PRIVATE}


def test_a_run_from_an_archive_is_prepared_again_through_no_link(tmp_path):
    config = RunConfig.from_mapping({"launch": {"device": "cpu"}, "data": {"source": "dataloader"}})
    run = prepare_run(config, tmp_path / "run")
    (tmp_path / "private").write_text(PRIVATE)
    (run.logs / "submit.lock").unlink()
    (run.logs / "submit.lock").symlink_to(tmp_path / "private")
    with pytest.raises(RunDirectoryError, match=r"submit\.lock is a link, and a run writes through none"):
        prepare_run(config, run.path, resume=True)
    assert (tmp_path / "private").read_text() == PRIVATE


def test_a_sweep_from_an_archive_that_goes_on_writes_through_no_link(tmp_path):
    sweep = SweepDirectory(tmp_path / "sweep")
    config = SweepConfig(name="mine", base={}, grid={"training.batch_size": [8]})
    write_record(sweep, SweepRecord(config.model_dump(), ()))
    (tmp_path / "private").write_text(PRIVATE)
    sweep.lock.symlink_to(tmp_path / "private")
    with pytest.raises(RunDirectoryError, match=r"sweep\.lock is a link, and a run writes through none"):
        prepare(config, sweep.path, resume=True)
    assert (tmp_path / "private").read_text() == PRIVATE


@pytest.mark.root
def test_a_sweep_of_somebody_else_is_not_continued(tmp_path):
    """Its record may name programs, which an own run of it would start."""
    sweep = SweepDirectory(tmp_path / "sweep")
    config = SweepConfig(name="theirs", base={}, grid={"training.batch_size": [8]})
    write_record(sweep, SweepRecord(config.model_dump(), ()))
    os.chown(sweep.path, 65534, 65534)
    with pytest.raises(RunDirectoryError, match="belongs to nobody: only they can continue it"):
        prepare(config, sweep.path, resume=True)
    assert not sweep.lock.exists()


@pytest.mark.parametrize("place", ["logs/wandb/latest-run", "logs/submitit/submission-00000/.submission_file_1.sh"])
@pytest.mark.parametrize("element", [".", "elements/first"])
def test_links_that_wandb_and_submitit_make_keep_nothing_from_going_on(tmp_path, element, place):
    """Of a run, and of a sweep with that run as an element. submitit gives the job's script a second name."""
    whole = RunDirectory(tmp_path / "whole")
    run = write_run(whole.path / element)
    (run.path / place).parent.mkdir(parents=True)
    (run.path / place).symlink_to("1_submission.sh")
    refuse_links(whole, folders_with_links())
