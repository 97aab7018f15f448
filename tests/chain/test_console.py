"""What a run prints, seen by a real process: into a pipe and on a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])

FOLLOW = """
import sys; sys.path.append(sys.argv[1])
from pathlib import Path
from step_record import record
from llama_core.chain.console import watch
from llama_core.records.directory import RunDirectory
with watch(RunDirectory(Path("nowhere"))) as show:
    for step in range(1, 41):
        show(record(step, total_steps=40))
"""

STOP = """
from llama_core.chain.console import count_down
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


def test_a_terminal_counts_the_seconds_down():
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", STOP], stdout=theirs, env=os.environ | {"TERM": "xterm"}, check=True)
    os.close(theirs)
    told = os.read(ours, 65536).decode()
    os.close(ours)
    assert "waiting for the end of step 7" in told
    assert "297 s left" in told
