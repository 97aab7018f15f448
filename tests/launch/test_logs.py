from pathlib import Path

from llama_core.launch.attempts import LOG_HEADER, log_path
from llama_core.launch.logs import LOGS_AT_ONCE, LogFollower


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
