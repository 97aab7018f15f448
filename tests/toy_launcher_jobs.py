"""The jobs of the toy launcher. ``toy_launcher_jobs.py FOLDER`` is the process of one, which starts its ranks."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from toy_launcher import DEPOT

from llama_core.launch.jobs.handle import JobHandle
from llama_core.launch.jobs.launcher import Launcher
from llama_core.launch.jobs.tasks import TaskJobs
from llama_core.launch.outcome import conclude
from llama_core.launch.ports import free_port
from llama_core.launch.rank.children import die_with_parent
from llama_core.launch.rank.supervisor import Supervisor
from llama_core.launch.rank.surroundings import RankPlace, Surroundings, export_torchrun
from llama_core.launch.scheduler import JobStatus
from llama_core.records.files import timestamp, write_json
from llama_core.records.job import JobRecord

FOLDER = "DEPOT_FOLDER"
"""Variable with the depot, in which each job is a folder."""
DIES = "DEPOT_SUBMITTER_DIES"
"""Variable by which a submitter dies before it has recorded its job."""
RANK = "import pickle, sys; pickle.load(open(sys.argv[1], 'rb'))()"


class DepotSurroundings(Surroundings):
    has_one_parent = True

    def take_place(self):
        die_with_parent(os.getppid())()
        rank, num_ranks = int(os.environ["DEPOT_RANK"]), int(os.environ["DEPOT_RANKS"])
        export_torchrun(rank, rank, num_ranks, "127.0.0.1", int(os.environ["DEPOT_PORT"]))
        return RankPlace(os.environ["DEPOT_JOB"], rank, num_ranks, num_ranks, host="a node of the depot")


class DepotHandle(JobHandle):
    kind = "job"
    listed_by = "ls"

    def __init__(self, run, record, ask):
        super().__init__(run, record)
        self._ask = ask

    def is_running(self):
        return self._ask(self.record.job_id, self.record.name).state == "RUNNING"

    def _ask_to_stop(self):
        send(self.record.job_id, signal.SIGTERM)

    def _kill(self):
        send(self.record.job_id, signal.SIGKILL)

    def _conclude(self):
        return conclude(self.run, self.record)


def queue(name, folder, tasks):
    """Put a job with these ranks into the depot, start it, and return its id."""
    depot = Path(os.environ[FOLDER])
    job = depot / f"job-{len(list(depot.iterdir()))}"
    job.mkdir()
    for rank, task in enumerate(tasks):
        (job / f"rank-{rank}.pkl").write_bytes(pickle.dumps(task))
    log = (folder / f"{job.name}_log.out").open("wb")
    process = subprocess.Popen([sys.executable, __file__, job], start_new_session=True, stdout=log, stderr=log)
    about = {"name": name, "folder": str(folder), "pid": process.pid, "num_ranks": len(tasks)}
    write_json(job / "job.json", about)
    return job.name


def about(job_id):
    return json.loads((Path(os.environ[FOLDER]) / job_id / "job.json").read_text())


def status(job_id, name):
    if (Path(os.environ[FOLDER]) / job_id / "ended").exists():
        return JobStatus("ENDED")
    with suppress(FileNotFoundError):
        command = Path(f"/proc/{about(job_id)['pid']}/cmdline").read_bytes()
        return JobStatus("RUNNING" if job_id.encode() in command else "LOST")  # a zombie has no command line
    return JobStatus("LOST")


def send(job_id, number):
    with suppress(ProcessLookupError):
        os.kill(about(job_id)["pid"], number)


def start(folder, submissions, name, lock):
    """Queue a job for each run."""
    for submission in submissions:
        launch = submission.config.launch
        run = submission.run
        supervisor = Supervisor(
            run.path,
            submission.command,
            launch.device,
            launch.hang_timeout_s,
            DepotSurroundings(),
            companion=submission.companion,
        )
        job_id = queue(run.name, folder, [supervisor] * submission.num_ranks)
        if DIES in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        write_json(run.job, recorded(job_id, folder, run.name))


def recorded(job_id, folder, name):
    return JobRecord(DEPOT.name, job_id, socket.gethostname(), timestamp(), name, folder=str(folder))


def find_unrecorded(folder, name, config):
    """Return the job that was queued from a folder."""
    for job in Path(os.environ[FOLDER]).iterdir():
        if about(job.name)["folder"] == str(folder):
            return recorded(job.name, folder, name)
    return None


def check(found, config):
    found.facts["depot"] = os.environ[FOLDER]


TASKS = TaskJobs(
    submit=lambda request: [queue(request.name, request.folder, [task]) for task in request.tasks],
    states=lambda job_ids, name: [status(job_id, name).state for job_id in job_ids],
    ended=frozenset(("ENDED", "LOST")),
    cancel=lambda job_ids: [send(job_id, signal.SIGKILL) for job_id in job_ids],
    poll_seconds=0.1,
    files_seconds=0.5,
)
LAUNCHER = Launcher(
    DEPOT,
    DepotSurroundings(),
    start,
    DepotHandle,
    out_of_sight=lambda record: "",
    find_unrecorded=find_unrecorded,
    check=check,
    ask=status,
    tasks=TASKS,
)


def main(job):
    """Start the ranks of a job, pass signals on to them, and wait for them."""
    ranks = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: [rank.send_signal(number) for rank in ranks])
    files = sorted(job.glob("rank-*.pkl"))
    port = str(free_port())
    for rank, file in enumerate(files):
        own = {"DEPOT_JOB": job.name, "DEPOT_RANK": str(rank), "DEPOT_RANKS": str(len(files)), "DEPOT_PORT": port}
        ranks.append(subprocess.Popen([sys.executable, "-c", RANK, file], env=os.environ | own))
    for rank in ranks:
        rank.wait()
    (job / "ended").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
