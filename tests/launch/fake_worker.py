"""A rank that obeys the worker's contract but computes nothing: ``fake_worker.py BEHAVIOUR RUN_DIR [--only PART]``."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for what the harness imports

from launch_harness import step_record

from llama_core.launch.attempts import RESTART_VARIABLE
from llama_core.launch.outcome import record_outcome
from llama_core.launch.verdict import STOPPED_EXIT
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json

behaviour, run_dir, *options = sys.argv[1:]
run = RunDirectory(Path(run_dir))
rank = int(os.environ["RANK"])
received = []


def take_step(step):
    if rank == 0:
        write_json(run.heartbeat, step_record(step))


def announce():
    """Write the facts that a test asks for; once the file exists, signals are handled."""
    facts = {"pid": os.getpid(), "supervisor": os.getppid(), "options": options, "environment": dict(os.environ)}
    write_json(run.path / f"worker-{rank}.json", facts)


def finish():
    sys.stdout.write("three steps to take\n")
    for step in range(1, 4):
        take_step(step)
        time.sleep(0.3)
    record_outcome(run, "finished", reason="3 steps", next_action="")


def finish_slowly():
    time.sleep(12)
    finish()


def serve():
    """Train until asked to stop, as the real worker does."""
    sys.stdout.write("at work\n")
    step = 0
    while not received:
        step += 1
        take_step(step)
        time.sleep(0.05)
    write_json(run.path / "received.json", {"signals": received})  # by all ranks at once, so whole or not at all
    record_outcome(run, "cancelled", reason="stopped by a signal", next_action="resume")
    sys.exit(STOPPED_EXIT)


def count_signals():
    """Write down every signal, and end at none."""
    while True:
        write_json(run.path / "received.json", {"signals": received})
        time.sleep(0.05)


def hang():
    """Never end, whatever the signal, and start a long-running child."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    announce()
    while True:
        time.sleep(1)


def start_slowly():
    """In the first attempt, die of any signal, like a worker that is still importing."""
    if os.environ[RESTART_VARIABLE] == "0":
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        write_json(run.path / f"starting-{rank}.json", {})
        time.sleep(600)
    finish()


def fall_silent():
    """Take a step and then wait for something that never comes."""
    faulthandler.register(signal.SIGUSR1)
    take_step(1)
    time.sleep(3)
    take_step(2)
    threading.Event().wait()


def fail():
    sys.stdout.write("about to fail\n")
    raise ValueError("the third weight is made of cheese")


def fail_on_rank_1_while_others_hang():
    fail() if rank == 1 else hang()


def run_out_of_device_memory():
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")


def run_out_of_host_memory():
    hoard = []
    while True:
        hoard.append(b"x" * 2**22)


def refuse():
    sys.stdout.write("ERROR unknown model 'llama9'\n")
    sys.exit(2)


def leave_silently():
    pass


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, lambda number, frame: received.append(number))
announce()
globals()[behaviour]()
