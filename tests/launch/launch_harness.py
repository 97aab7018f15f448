"""Jobs of fake workers, their processes, and the records that training would leave."""

import time
from contextlib import contextmanager
from pathlib import Path

import psutil
from step_record import record
from waiting import eventually

from llama_core.records.files import read_json

FAKE_WORKER = Path(__file__).with_name("fake_worker.py")


@contextmanager
def ending_jobs():
    """Yield a list of handles, whose jobs are killed at the end."""
    handles = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.cancel(grace_seconds=0)


def is_alive(pid):
    """Return whether a process is alive; a zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Job:
    """A job of fake workers, with the processes that belong to it."""

    def __init__(self, handle, num_ranks):
        self.handle = handle
        self.num_ranks = num_ranks

    def worker(self, rank=0):
        """Return a rank's facts about itself, once its worker handles signals."""
        path = self.handle.run.path / f"worker-{rank}.json"
        return read_json(eventually(lambda: path.exists() and path))

    def processes(self):
        """Return the ids of the controller and its descendants, once every rank is running."""
        for rank in range(self.num_ranks):
            self.worker(rank)
        controller = psutil.Process(int(self.handle.record.job_id))
        return [controller.pid, *(process.pid for process in controller.children(recursive=True))]


def step_record(step, *, at=None):
    return record(step, total_steps=3, time=time.time() if at is None else at)
