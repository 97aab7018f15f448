import json
import os
import re
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from step_record import record

from llama_core.errors import RunDirectoryError
from llama_core.records.activity import Activity, append_activities, read_activities
from llama_core.records.directory import RunDirectory
from llama_core.records.files import (
    atomic_write,
    cache_directory,
    is_disk_full,
    no_room,
    read_json,
    remove_temporaries,
    write_json,
)
from llama_core.records.metrics import (
    append_metrics,
    drop_metrics_after,
    read_heartbeat,
    read_metrics,
    set_aside,
    write_metrics_part,
)
from llama_core.records.reserve import reserve_room, write_even_on_full_disk


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def steps_of(run):
    return read_metrics(run).column("step").to_pylist()


def test_json_round_trips_without_its_schema_version(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    assert json.loads((tmp_path / "a.json").read_text())["schema_version"] == 1
    assert read_json(tmp_path / "a.json") == {"x": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 99}', "{}"])
def test_json_without_the_current_schema_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_a_missing_record_says_which_file_is_missing(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"plan\.json does not exist"):
        read_json(tmp_path / "plan.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(OSError, match="disk full"), atomic_write(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.root
def test_a_full_disk_is_named_and_leaves_room_for_the_last_words(disk_of):
    run = RunDirectory(disk_of("1m") / "run")
    run.create()
    reserve_room(run)
    with pytest.raises(OSError, match="No space left on device") as full, run.heartbeat.open("wb") as file:
        file.write(bytes(2**21))
    with pytest.raises(OSError, match=r"No space left on device: '\S+/run/plan.json'"):
        write_json(run.plan, {"tp": 1})
    with pytest.raises(OSError, match=r"No space left on device: '\S+/_tail.jsonl'"):
        append_metrics(run, record(1))
    assert is_disk_full(full.value)
    write_even_on_full_disk(run, run.outcome, {"status": "crashed"})
    assert read_json(run.outcome) == {"status": "crashed"}


@pytest.mark.root
def test_a_disk_without_inodes_is_told_from_one_without_room(disk_of):
    path = disk_of("1m,nr_inodes=20")
    with pytest.raises(OSError, match="No space left on device"):
        for number in range(20):
            (path / str(number)).touch()
    assert re.fullmatch(
        rf"the disk of {path}/run is full: all of its 20 inodes are used, [\d.]+ MiB are free", no_room(path / "run")
    )


def test_a_line_that_a_full_disk_has_cut_short_costs_only_itself(run):
    run.activities.write_text('{"doing": "cut sh')
    append_activities(run, Activity("starting", 1.0), Activity("in step 1", 2.0))
    append_activities(run, Activity("in step 2", 3.0))
    assert [activity.since for activity in read_activities(run)] == [1.0, 2.0, 3.0]


def test_a_file_that_cannot_be_written_is_named_by_its_own_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'.*/a\.json'$"), atomic_write(tmp_path / "a.json") as temporary:
        temporary.read_text()


def test_what_a_killed_process_was_writing_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    with atomic_write(tmp_path / "new.json") as new:
        new.write_text("half")
        old = new.with_name(new.name.replace("new", "old"))
        old.write_text("half")
        os.utime(old, (100, 100))
        (tmp_path / ".hidden").write_text("")
        os.utime(tmp_path / ".hidden", (100, 100))
        remove_temporaries(tmp_path, before=time.time() - 60)
        assert {path.name for path in tmp_path.iterdir()} == {new.name, ".hidden"}


def test_metrics_parts_are_read_as_one_table_in_order(run):
    write_metrics_part(run, [record(3), record(4)])
    write_metrics_part(run, [record(1), record(2, eval_loss=2.5)])
    table = read_metrics(run)
    assert table.column("step").to_pylist() == [1, 2, 3, 4]
    assert table.column("eval_loss").to_pylist() == [None, 2.5, None, None]


def test_a_run_without_metrics_has_an_empty_table(run):
    assert read_metrics(run).num_rows == 0
    assert "loss" in read_metrics(run).column_names


def test_resuming_drops_the_steps_it_will_repeat(run):
    write_metrics_part(run, [record(1), record(2)])
    write_metrics_part(run, [record(3), record(4)])
    write_metrics_part(run, [record(5)])
    drop_metrics_after(run, 3)
    write_metrics_part(run, [record(4)])
    assert steps_of(run) == [1, 2, 3, 4]


def test_resuming_reads_only_the_newest_parts(run):
    """A run of a million steps has ten thousand."""
    for step in (1, 3, 5):
        write_metrics_part(run, [record(step), record(step + 1)])
    append_metrics(run, record(7))
    parts = sorted(run.metrics.glob("part-*"))
    whole = parts[0].read_bytes()
    parts[0].write_bytes(b"not read")
    drop_metrics_after(run, 5)
    parts[0].write_bytes(whole)
    assert steps_of(run) == [1, 2, 3, 4, 5]


def test_a_part_with_more_rows_than_its_bytes_can_hold_is_damaged(run):
    part = write_metrics_part(run, [record(1)])
    row = pq.read_table(part)
    few = row.take([0] * 7000)
    pq.write_table(few, part)
    assert read_metrics(run).num_rows == 7000
    pq.write_table(row.take([0] * 200_000), part)
    assert part.stat().st_size < 100_000
    with pytest.raises(
        RunDirectoryError, match=rf"^{part} is damaged \([0-9,]+ values in .*, more than are ever written"
    ):
        read_metrics(run)


def test_a_part_with_the_steps_of_a_long_run_is_read(run):
    steps = range(1, 10_001)
    times = ({"time": step / 7, "step_seconds": 1 + 1 / step, "loss": 3 / step} for step in steps)
    write_metrics_part(run, [record(step, **measured) for step, measured in zip(steps, times, strict=True)])
    assert steps_of(run) == list(steps)


DAMAGES = (b"", b"PAR1 damaged", b'{"step": 1}\n')


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_set_aside_with_its_bytes_and_a_warning_that_names_it(run, caplog, damage):
    for step in (1, 2, 3):
        write_metrics_part(run, [record(step)])
    part = run.metrics / "part-00001.parquet"
    part.write_bytes(damage)
    with pytest.raises(RunDirectoryError, match=f"^{part} is damaged"):
        read_metrics(run)
    assert read_metrics(run, sets_aside=True).column("step").to_pylist() == [1, 3] == steps_of(run)
    (warning,) = caplog.messages
    assert re.search(rf"^{part} is damaged .*; it is now _{part.name}\.damaged$", warning)
    assert set_aside(run) == [part.with_name(f"_{part.name}.damaged")]
    assert set_aside(run)[0].read_bytes() == damage


def test_resuming_sets_damaged_metrics_aside(run):
    write_metrics_part(run, [record(1)])
    write_metrics_part(run, [record(2)]).write_bytes(b"damaged")
    run.metrics_tail.write_text("damaged\n")
    drop_metrics_after(run, 2)
    assert steps_of(run) == [1]
    assert [path.name for path in set_aside(run)] == ["_part-00001.parquet.damaged", "_tail.jsonl.damaged"]


def test_resuming_sets_aside_what_stands_in_the_place_of_the_repeated_steps(run):
    write_metrics_part(run, [record(1), record(2)])
    run.repeated_steps.mkdir(parents=True)
    drop_metrics_after(run, 1)
    assert len(run.repeated_steps.read_text().splitlines()) == 1
    assert run.repeated_steps.with_name("_repeated-steps.jsonl.damaged").is_dir()


def test_no_file_that_is_set_aside_takes_the_place_of_another(run):
    for number in range(3):
        write_metrics_part(run, [record(1)]).write_bytes(bytes([number]))
        drop_metrics_after(run, 1)
    assert [path.read_bytes() for path in set_aside(run)] == [b"\0", b"\1", b"\2"]


def test_a_part_that_cannot_be_renamed_is_left_out_all_the_same(run, monkeypatch):
    write_metrics_part(run, [record(1)]).write_bytes(b"damaged")
    write_metrics_part(run, [record(2)])
    monkeypatch.setattr(Path, "rename", lambda path, target: (path / "below a file").stat())
    assert read_metrics(run, sets_aside=True).column("step").to_pylist() == [2]


def test_the_memory_to_write_a_part_does_not_grow_with_the_parts(run):
    def peak_bytes(step):
        tracemalloc.start()
        write_metrics_part(run, [record(step)])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    write_metrics_part(run, [record(1)])  # imports, and fills caches
    with_one = peak_bytes(2)
    for number in range(2, 500):
        (run.metrics / f"part-{number:05d}.parquet").touch()
    assert peak_bytes(3) < with_one + 20_000  # a list of 500 paths takes ten times that
    assert (run.metrics / "part-00500.parquet").stat().st_size


def test_steps_that_a_killed_process_appended_are_read_once_and_survive_resuming(run):
    write_metrics_part(run, [record(1), record(2)])
    for step in (2, 3, 4, 5):  # it was killed after it had written the part, before it forgot step 2
        append_metrics(run, record(step))
    with run.metrics_tail.open("a") as tail:
        tail.write('{"step": 6, "lo')
    assert steps_of(run) == [1, 2, 3, 4, 5]
    drop_metrics_after(run, 3)
    assert steps_of(run) == [1, 2, 3]
    append_metrics(run, record(4))
    assert steps_of(run) == [1, 2, 3, 4]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot write run directory .*choose another --run-dir"):
        RunDirectory(tmp_path / "file" / "run").create()


def test_resuming_drops_the_heartbeat_of_a_step_it_will_repeat(run):
    write_json(run.heartbeat, record(5))
    drop_metrics_after(run, 5)
    assert run.heartbeat.exists()
    drop_metrics_after(run, 4)
    assert not run.heartbeat.exists()


def test_a_run_of_another_version_resumes_despite_other_step_fields(run):
    write_json(run.heartbeat, asdict(record(2)) | {"unknown": 1.0})
    drop_metrics_after(run, 1)
    assert read_heartbeat(run) is None


def test_caches_are_kept_where_the_platform_keeps_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(None) == tmp_path / "llama-training-infra"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory(None) == Path.home() / ".cache" / "llama-training-infra"
    assert cache_directory("~/elsewhere") == Path.home() / "elsewhere"
