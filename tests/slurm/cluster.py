"""The Slurm cluster of this machine: starting it, reading its queue, and failing its nodes."""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from waiting import PATIENCE_SECONDS, eventually

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm-dev-cluster"
NUM_NODES = 8


def why_not_here():
    """Return why this machine cannot run a cluster, or an empty string if it can."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is None:
        return "a Slurm cluster needs slurmctld and slurmd, or Debian's apt-get to install them with"
    return ""


@contextmanager
def brought_up():
    """Provide a cluster shared with other test processes; the last one takes it down if a test brought it up."""
    with Path(tempfile.gettempdir(), "slurm-dev-cluster.users").open("w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with to_itself(wanted=False):  # not while a test has stopped the controller
            if not _is_up() and "already up" not in _script("up"):
                _mark().touch()
        yield
        if _is_last(users) and _mark().exists():
            _script("down")


def all_but(*numbers):
    """Return the names of all other nodes, as ``--exclude`` takes them."""
    return ",".join(f"node{number}" for number in range(1, NUM_NODES + 1) if number not in numbers)


def _is_up():
    """Return whether a cluster answers; ``up`` would also start the nodes that a test of another process has killed."""
    if shutil.which("scontrol") is None:
        return False
    return subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0


def _mark():
    """Return the file that marks a cluster brought up by a test; it is deleted with the cluster."""
    return Path("/etc/slurm/slurm.conf").resolve().with_name("brought-up-by-a-test")


def _is_last(users):
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gives up this process's shared lock if others hold one
    except BlockingIOError:
        return False
    return True


def states():
    """Return the state of every job in the queue by its id."""
    lines = _ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
    return dict(line.split() for line in lines)


def jobs_named(beginning):
    """Return the ids of the jobs in the queue whose names start with ``beginning``."""
    lines = _ask("squeue", "--noheader", "--format=%i %j").splitlines()
    return [job_id for job_id, name in map(str.split, lines) if name.startswith(beginning)]


def job_fields(job_id):
    """Return Slurm's fields of a job, such as ``{"JobState": "RUNNING", "NumNodes": "2"}``."""
    return dict(re.findall(r"(?<!\S)([\w/]+)=(\S*)", _ask("scontrol", "--oneliner", "show", "job", job_id)))


def hosts(abbreviated):
    """Return the names of the nodes that Slurm abbreviates so."""
    return _ask("scontrol", "show", "hostnames", abbreviated).split()


def wait_for_state(job_id, *expected):
    """Return Slurm's fields of a job once it is in one of the states."""

    def reached():
        fields = job_fields(job_id)
        return fields if fields["JobState"] in expected else None

    return eventually(reached)


def cancel(job_id):
    """Cancel a job from outside, as its owner would."""
    _ask("scancel", job_id)


def requeue(job_id):
    """Requeue a running job."""
    _ask("scontrol", "requeue", job_id)


def suspend(job_id):
    """Stop the processes of a running job, which stays as it is until it is cancelled."""
    wait_for_state(job_id, "RUNNING")
    _ask("scontrol", "suspend", job_id)


def send_signal(job_id, name):
    """Send a signal to every rank of a job, as Slurm does ahead of a time limit."""
    _ask("scancel", f"--signal={name}", job_id)


def preempt(nodes, *, seconds=5):
    """Submit a job that takes ``nodes`` (such as ``"node1,node2"``) from those of lower priority; return its id."""
    options = ("--parsable", "--partition=urgent", "--exclusive", "--mem=100", "--output=/dev/null")
    return _ask("sbatch", *options, f"--nodelist={nodes}", f"--wrap=sleep {seconds}").strip()


def kill_node(number):
    """Kill the node's daemon and every job process on it, as a power loss would; check whose jobs these are."""
    _script("kill-node", str(number))


def kill_slurmd(number):
    """Kill the node's daemon; its job processes live on."""
    _script("kill-slurmd", str(number))


def declare_down(number):
    """Tell the controller that the daemon of a node is dead, as an administrator would who need not wait for it."""
    _ask("scontrol", "update", f"NodeName=node{number}", "State=DOWN", "Reason=killed by a test")


def start_node(number):
    """Start the node's daemon again, and wait until the node takes jobs."""
    _script("start-node", str(number))
    eventually(lambda: _node_state(number) in {"idle", "mixed"})


@contextmanager
def without_controller():
    """Stop Slurm's controller for the time of the block."""
    _script("stop-controller")
    try:
        yield
    finally:
        _script("start-controller")


def wait_until_idle(*numbers):
    """Wait until no job is on these nodes."""
    eventually(lambda: all(_node_state(number) == "idle" for number in numbers))


@contextmanager
def to_itself(*, wanted):
    """Keep other test processes off the cluster if ``wanted``, or else only those that want it to themselves."""
    with Path(tempfile.gettempdir(), "slurm-dev-cluster.tests").open("w") as tests:
        fcntl.flock(tests, fcntl.LOCK_EX if wanted else fcntl.LOCK_SH)
        yield


@contextmanager
def held_node():
    """Keep jobs off one node, so that a job of all nodes waits in the queue while smaller ones run on the others.

    Every test process holds a different node, so that none releases a node that another still needs.
    """
    number = NUM_NODES - int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_NODES
    _ask("scontrol", "update", f"NodeName=node{number}", "State=DRAIN", "Reason=held by a test")
    try:
        yield
    finally:
        _ask("scontrol", "update", f"NodeName=node{number}", "State=RESUME")


def _node_state(number):
    return _ask("sinfo", "--noheader", "--partition=train", f"--nodes=node{number}", "--format=%T").strip()


def _script(*arguments):
    return _ask(str(SCRIPT), *arguments)


def _ask(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout
