from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.launch.attempts import LOG_HEADER, log_path
from llama_core.launch.logs import LOGS_AT_ONCE, LogFollower, start_of_last_lines


def add(run, rank, text):
    with log_path(run, rank).open("a") as file:
        file.write(text)


def test_only_new_and_complete_lines_are_returned(run):
    add(run, 0, "before\n")
    follower = LogFollower(run)
    add(run, 0, "first\nsec")
    assert list(follower.new_lines()) == [(0, "first")]
    add(run, 0, "ond\n")
    add(run, 3, "a rank that starts later\n")
    assert list(follower.new_lines()) == [(0, "second"), (3, "a rank that starts later")]
    assert list(follower.new_lines()) == []


def test_a_follower_can_start_with_the_last_lines_of_the_newest_attempt(run):
    add(run, 0, f"{LOG_HEADER}1 ===\nold\n{LOG_HEADER}2 ===\none\ntwo\nthree\n")
    assert [line for _, line in LogFollower(run, last_lines=2).new_lines()] == ["two", "three"]
    assert [line for _, line in LogFollower(run, last_lines=9).new_lines()] == [
        f"{LOG_HEADER}2 ===",
        "one",
        "two",
        "three",
    ]
    assert len(list(LogFollower(run, last_lines=None).new_lines())) == 6


@pytest.mark.parametrize(("num_lines", "first"), [(100_000, 20_001), (7, 119_994), (10**9, 1)])
def test_as_many_lines_are_shown_as_were_asked_for(run, num_lines, first):
    add(run, 0, "".join(f"line {number} of the run, long enough for megabytes\n" for number in range(1, 120_001)))
    lines = [line for _, line in LogFollower(run, last_lines=num_lines).new_lines()]
    assert len(lines) == min(num_lines, 120_000)
    assert lines[0].startswith(f"line {first} of")
    assert lines[-1].startswith("line 120000 of")


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@given(texts=st.lists(st.text("ab\r\n", max_size=9), max_size=9), num_lines=st.integers(1, 9))
def test_the_size_of_a_block_changes_no_line(block, texts, num_lines):
    content = "".join([*texts, "x" * 9, f"\n{LOG_HEADER}2 ===\n", *texts]).encode()
    newest = content[content.rindex(LOG_HEADER.encode()) :].splitlines(keepends=True)
    expected = newest[-num_lines:]
    offset = start_of_last_lines(BytesIO(content), num_lines, block=block)
    assert content[offset:] == b"".join(expected)


def test_one_rank_can_be_followed(run):
    add(run, 0, "x\n")
    add(run, 1, "y\n")
    assert list(LogFollower(run, rank=1, last_lines=None).new_lines()) == [(1, "y")]


def test_the_logs_of_many_ranks_take_turns_beside_the_first(run, monkeypatch):
    for rank in range(200):
        add(run, rank, "before\n")
    follower = LogFollower(run)
    for rank in range(200):
        add(run, rank, "new\n")
    asked, stat = [], Path.stat
    monkeypatch.setattr(Path, "stat", lambda path: asked.append(path) or stat(path))
    looks = []
    for number in range(4):
        add(run, 0, f"look {number}\n")
        looks.append(list(follower.new_lines()))
    assert len(asked) <= 4 * LOGS_AT_ONCE
    assert all((0, f"look {number}") in look for number, look in enumerate(looks))
    assert sorted(rank for look in looks for rank, line in look if line == "new") == list(range(200))


def test_every_log_is_looked_at_when_a_job_has_ended(run):
    follower = LogFollower(run)
    for rank in range(200):
        add(run, rank, "ERROR the run ended\n")
    assert [rank for rank, _ in follower.notable_lines(of_all=True)] == list(range(200))


def test_warnings_and_errors_are_notable(run):
    follower = LogFollower(run)
    add(run, 0, "step 1/3 loss 2\nWARNING the disk is slow\n")
    add(run, 1, "INFO resuming\nERROR the run ended: no\n")
    assert list(follower.notable_lines()) == [(0, "WARNING the disk is slow"), (1, "ERROR the run ended: no")]
