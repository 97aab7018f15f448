"""``make serve`` in a copy of the checkout with its own Prefect home, and a second terminal."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
from waiting import PATIENCE_SECONDS, eventually

from flows.service import SERVE_VARIABLE, answers
from llama_core.launch.ports import free_port
from llama_core.records.directory import RunDirectory

ROOT = Path(__file__).parents[2]
STACKS = Path(__file__).parent / "stacks"
SECRET = "marker-of-a-secret-4711"
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Serving:
    """A running ``make serve``, and a person's commands in a second terminal; ``settings`` are of its environment."""

    def __init__(self, folder, **settings):
        self.home, self.checkout = folder / "home", folder / "checkout"
        for name in ("flows", "tasks"):
            shutil.copytree(ROOT / name, self.checkout / name)
        shutil.copy(ROOT / "prefect.yaml", self.checkout)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
        home = {"PREFECT_HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache")}
        self.other_terminal = others | home | {"COLUMNS": "500"}
        self.log_file, self.stacks = folder / "serve.log", folder / "stacks.txt"
        path = os.pathsep.join(filter(None, (str(STACKS), os.environ.get("PYTHONPATH"))))
        watched = {"PYTHONPATH": path, "STACKS": str(self.stacks)}
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flows.serve"],
                cwd=self.checkout,
                env=others
                | home
                | watched
                | {"PREFECT_SERVER_API_PORT": str(port), "WANDB_API_KEY": SECRET}
                | settings,
                stdout=log,
                stderr=log,
            )
        until(lambda: "\nnext " in self.log_file.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log_file.read_text()
        self.auth_string = tomllib.loads((self.checkout / "prefect.toml").read_text())["api"]["auth_string"]
        self.owner = httpx.Client(
            base_url=self.url, auth=tuple(self.auth_string.split(":")), timeout=PATIENCE_SECONDS, transport=Patient()
        )

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()

    def prefect(self, *command):
        """Run a Prefect command that finds the server only through files in the folder."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *command]
        return subprocess.run(
            command, cwd=self.checkout, env=self.other_terminal, capture_output=True, text=True, check=False
        )

    def run(self, config, **parameters):
        """Start a flow run of a configuration as the server's pages do, quicker than a command; return its id."""
        deployment = self.owner.get("/deployments/name/train/tiny_llama3_50m").json()["id"]
        request = {"parameters": {"config": config} | parameters}
        answer = self.owner.post(f"/deployments/{deployment}/create_flow_run", json=request)
        assert answer.is_success, answer.text
        return answer.json()["id"]

    def flow_run(self, state):
        """Make a flow run of ``train`` that is in a state, and that no process belongs to; return its id."""
        flow = self.owner.get("/flows/name/train").json()["id"]
        return self.owner.post("/flow_runs/", json={"flow_id": flow, "state": {"type": state}}).json()["id"]

    def beat(self, flow_run_id):
        """Send a heartbeat of a flow run of ``train``."""
        flow = {
            "prefect.resource.id": "prefect.flow.x",
            "prefect.resource.role": "flow",
            "prefect.resource.name": "train",
        }
        event = {
            "occurred": datetime.now(UTC).isoformat(),
            "event": "prefect.flow-run.heartbeat",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}"},
            "related": [flow],
            "id": str(uuid4()),
        }
        assert self.owner.post("/events", json=[event]).is_success

    def deploy(self, deployment, *parameters):
        """Start a flow run of a deployment from the terminal; return its id."""
        words = [word for parameter in parameters for word in ("-p", parameter)]
        told = self.prefect("deployment", "run", deployment, *words)
        assert told.returncode == 0, told.stdout + told.stderr
        return re.search(r"UUID: (\S+)", told.stdout)[1]

    def state(self, flow_run_id):
        """Return the state of a flow run, once the server answers."""
        until(lambda: answers(self.url))
        return self.owner.get(f"/flow_runs/{flow_run_id}").json()["state"]

    def pages(self, flow_run_id):
        """Return what a flow run shows first, its run, for each time that it has followed the job."""
        progress = {"artifacts": {"type": {"any_": ["progress"]}, "flow_run_id": {"any_": [flow_run_id]}}}
        return [one["description"] for one in self.owner.post("/artifacts/filter", json=progress).json()]

    def log(self, flow_run_id, last):
        """Return the messages of a flow run's log, in order, once it ends with the word ``last`` and what follows."""
        query = {"logs": {"flow_run_id": {"any_": [flow_run_id]}}, "sort": "TIMESTAMP_ASC"}

        def complete():
            lines = [one["message"] for one in self.owner.post("/logs/filter", json=query).json()]
            return lines if lines and lines[-1].startswith(last) else None

        return until(complete)

    def end(self, flow_run_id):
        """Wait for a flow run to end; return the name of its state."""
        until(lambda: self.state(flow_run_id)["type"] in ENDED)
        return self.state(flow_run_id)["name"]

    def followed(self, flow_run_id, times=1):
        """Wait until the flow run follows its job for the ``times``-th time; return its run."""
        until(lambda: len(self.pages(flow_run_id)) == times)
        run = self.submitted(flow_run_id)
        until(run.heartbeat.exists)
        return run

    def submitted(self, flow_run_id):
        """Wait until the flow run has submitted its job; return its run. A flow run that ends first fails the test.

        One that has gone silent, which was seen once, is retried as its state says, with a warning that shows where
        it was.
        """
        retried = False
        while True:
            for path in self.checkout.glob("runs/*/flow_run.json"):
                run = RunDirectory(path.parent)
                if flow_run_id in path.read_text() and run.job.exists():
                    return run
            state = self.state(flow_run_id)
            if state["type"] in ENDED:
                told = f"{state}\n{self.where(flow_run_id)}"
                assert "no heartbeat" in (state["message"] or ""), told
                assert not retried, told
                warnings.warn(told, stacklevel=2)
                retry = self.prefect("flow-run", "retry", flow_run_id)
                assert retry.returncode == 0, retry.stdout + retry.stderr
                retried = True
            time.sleep(0.1)

    def where(self, flow_run_id):
        """Return the log of a flow run, and the stacks of all processes of flow runs, which are then killed."""
        for process in self.processes("prefect.engine"):
            with suppress(psutil.NoSuchProcess):  # it ends by itself
                process.send_signal(signal.SIGUSR1)
                time.sleep(2)
                process.kill()
        stacks = self.stacks.read_text() if self.stacks.exists() else "no process of a flow run is left"
        return f"{self.prefect('flow-run', 'logs', flow_run_id).stdout}\n{stacks}"

    def processes(self, word=""):
        """Return the processes started by this ``make serve``, directly or not, with ``word`` in their command."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(SERVE_VARIABLE) == str(self.process.pid) and word in process.cmdline():
                    found.append(process)
        return found

    def kill(self, word):
        (process,) = self.processes(word)
        process.kill()


until = partial(eventually, every=0.3)
"""Waits, and asks the server not too often."""


class Patient(httpx.HTTPTransport):
    """Asks again while the server answers that its database is busy, as Prefect's own client does."""

    def handle_request(self, request):
        while (answer := super().handle_request(request)).status_code == httpx.codes.SERVICE_UNAVAILABLE:
            answer.close()
            time.sleep(0.3)
        return answer


def workers(run):
    """Return the processes of a run's ranks on this machine."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if {"llama_core.launch.rank.worker", str(run.path)} <= set(process.cmdline()):
                found.append(process)
    return found


def slowed(run):
    """Leave the processor to others while a run that never ends waits to be stopped."""
    for process in workers(run):
        process.nice(10)
    return run
