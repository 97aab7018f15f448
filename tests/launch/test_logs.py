from llama_core.launch.attempts import LOG_HEADER, log_path
from llama_core.launch.logs import LogFollower


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


def test_warnings_and_errors_are_notable(run):
    follower = LogFollower(run)
    add(run, 0, "step 1/3 loss 2\nWARNING the disk is slow\n")
    add(run, 1, "INFO resuming\nERROR the run ended: no\n")
    assert list(follower.notable_lines()) == [(0, "WARNING the disk is slow"), (1, "ERROR the run ended: no")]
