"""What a run prints, seen by a real process: into a pipe and on a terminal."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from step_record import record, training_summary

from llama_core.objectives.preferences import DPO
from llama_core.records.directory import RunDirectory
from llama_core.runs.console import describe_step, say, watch
from llama_core.training.metrics import ParquetSink, format_record
from llama_core.training.reports import in_words
from llama_core.units import MIB

TESTS = str(Path(__file__).parents[1])

FOLLOW = """
import sys; sys.path.append(sys.argv[1])
from pathlib import Path
from step_record import record
from llama_core.runs.console import watch
from llama_core.records.directory import RunDirectory
with watch(RunDirectory(Path("nowhere"))) as show:
    for step in range(1, 41):
        show(record(step, total_steps=40))
"""

FOLLOW_ANSWERS = """
import sys; sys.path.append(sys.argv[1])
from pathlib import Path
from step_record import record
from llama_core.runs.console import watch
from llama_core.records.directory import RunDirectory
held_out = {4: {"eval_loss": 2.0, "eval_losses": {"code": 1.5, "wikipedia": 2.5}}}
with watch(RunDirectory(Path("nowhere"))) as show:
    for step in range(1, 31):
        show(record(step, total_steps=40, shown="margin 0.2500, accuracy 75.0%", **held_out.get(step, {})))
"""

STOP = """
from llama_core.runs.console import count_down
with count_down("waiting for the end of step 7") as on_second:
    on_second(297.4)
"""


def test_a_pipe_gets_a_line_for_the_first_step_and_each_tenth_even_with_forced_colours():
    for forced in ({}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}):
        told = subprocess.run(
            [sys.executable, "-c", FOLLOW, TESTS], env=os.environ | forced, capture_output=True, text=True, check=True
        )
        lines = [line for line in told.stdout.splitlines() if "step " in line]
        assert len(lines) == 11
        assert "step 1/40" in lines[0]
        assert "step 4/40" in lines[1]


def lines_of(run, records):
    """Return what is printed of these steps, one string for each line."""
    with say.console.capture() as told, watch(run) as show:
        for one in records:
            show(one)
    return [line.removeprefix("train").strip() for line in told.get().splitlines()]


def test_lines_tell_the_time_that_is_left_at_the_pace_since_the_line_before(tmp_path):
    times = [0.0, 100.0, *(100.0 + 30 * step for step in range(1, 9))]  # the first step after the start is slow
    steps = [record(number, total_steps=10, time=time) for number, time in enumerate(times, start=1)]
    lines = lines_of(RunDirectory(tmp_path), steps)
    assert len(lines) == 10
    assert "left" not in lines[0], "nothing is known yet"
    assert lines[1].endswith("  about 13 min 20 s left")
    assert lines[2].endswith("  about 3 min 30 s left")
    assert lines[8].endswith("  about 30.0 s left")
    assert "left" not in lines[9], "nothing is left"


def test_a_clock_that_was_set_back_or_a_step_that_is_repeated_tells_no_time(tmp_path):
    steps = [record(3, total_steps=10, time=50.0), record(5, total_steps=10, time=20.0)]
    assert "left" not in lines_of(RunDirectory(tmp_path), steps)[1]
    steps = [record(5, total_steps=10, time=50.0), record(9, total_steps=20, time=70.0)]
    assert lines_of(RunDirectory(tmp_path), steps)[1].endswith("about 55.0 s left")
    steps = [record(9, total_steps=10, time=50.0), record(4, total_steps=20, time=70.0)]
    assert "left" not in lines_of(RunDirectory(tmp_path), steps)[-1]


def test_lines_tell_the_newest_held_out_loss_also_of_a_step_that_nobody_saw(tmp_path):
    run = RunDirectory(tmp_path)
    run.create()
    of_names = {"code": 1.5, "wiki": 2.5}
    evaluated = {
        12: {"eval_loss": 2.0, "eval_losses": of_names},
        25: {"eval_loss": 1.75, "eval_shown": "margin 0.5000, accuracy 62.5%", "measured": {"eval_reward_margin": 0.5}},
    }
    steps = [record(number, total_steps=40, **evaluated.get(number, {})) for number in range(1, 41)]
    sink = ParquetSink(run, part_size=7)
    lines = []
    with watch(run) as show:
        for one in steps:
            sink.write(one)
            with say.console.capture() as told:
                if one.step not in evaluated:  # as if the run was looked at before and after
                    show(one)
            lines += told.get().splitlines()
    of_step = {line.split()[2]: line for line in lines}
    assert "held-out" not in of_step["8/40"]
    assert "held-out loss 2.0000 (code 1.5000, wiki 2.5000) after step 12" in of_step["16/40"]
    assert "held-out loss 2.0000" in of_step["24/40"]
    assert "held-out loss 1.7500 (margin 0.5000, accuracy 62.5%) after step 25" in of_step["28/40"]
    assert "after step 25" in of_step["40/40"]


def test_a_step_that_was_evaluated_itself_names_no_other(tmp_path):
    (line,) = lines_of(RunDirectory(tmp_path), [record(1, eval_loss=0.5)])
    assert "held-out loss 0.5000  1,000 tokens/s" in line


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ({"reward_margin": 0.25, "reward_accuracy": 0.75}, "loss 1.0000  margin 0.2500, accuracy 75.0%  1,000 tokens"),
        ({"reward_margin": -1.5, "reward_accuracy": 0.0}, "loss 1.0000  margin -1.5000, accuracy 0.0%  1,000 tokens"),
        ({"reward_accuracy": 1.0, "reward_chosen": 2.0}, "loss 1.0000  accuracy 100.0%  1,000 tokens"),
        ({}, "loss 1.0000  1,000 tokens"),
    ],
)
def test_lines_of_a_run_on_answers_tell_margin_and_accuracy(rewards, told):
    of_step = record(7, measured=rewards, shown=in_words(rewards, DPO.shown))
    assert told in describe_step(of_step)
    assert told.split("  ")[1] in format_record(of_step)


def test_a_narrow_terminal_shows_all_of_a_step_and_the_held_out_losses_above_it():
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-c", FOLLOW_ANSWERS, TESTS]
    subprocess.run(command, stdout=theirs, env=environment, check=True)
    os.close(theirs)
    told = os.read(ours, 1 << 20).decode()
    os.close(ours)
    assert told.count("step 4/40  held-out loss 2.0000 (code 1.5000, wikipedia 2.5000)") == 1
    last = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told).rpartition("step 30/40")[2].split())
    for part in ("loss 1.0000", "margin 0.2500, accuracy", "75.0%", "1,000 tokens/s", ":"):  # the last: the time left
        assert part in last


def test_a_terminal_counts_the_seconds_down():
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", STOP], stdout=theirs, env=os.environ | {"TERM": "xterm"}, check=True)
    os.close(theirs)
    told = os.read(ours, 65536).decode()
    os.close(ours)
    assert "waiting for the end of step 7" in told
    assert "297 s left" in told


def test_a_step_and_the_summary_name_the_same_peak_without_what_was_alive_before_the_model():
    memory = {"memory_peak_bytes": 5 * MIB, "memory_baseline_bytes": 3 * MIB}
    assert describe_step(record(1, **memory)).endswith("peak 2.00 MiB")
    assert training_summary(**memory).summary().endswith("peak 2.00 MiB")
