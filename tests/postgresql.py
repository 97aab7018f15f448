"""A PostgreSQL server for a test, which can be stopped and started again."""

import os
import shutil
import subprocess
import tempfile
from itertools import takewhile
from pathlib import Path

import pytest

from llama_core.launch.ports import free_port

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


class PostgreSQL:
    """A server that runs as its own user, and the URL of an empty database.

    Args:
        folder: an empty folder for it.
    """

    def __init__(self, folder):
        if "CI" not in os.environ and (not PROGRAMS or os.geteuid() != 0):
            pytest.skip("needs root, and Debian's postgresql")
        self.folder = folder
        # the server refuses to run as root, and must reach this folder, which is deeper where tests share the work
        for parent in takewhile(lambda one: one != Path(tempfile.gettempdir()), (folder, *folder.parents)):
            parent.chmod(parent.stat().st_mode | 0o111)
        shutil.chown(folder, "postgres")
        self.port = free_port()
        self.url = f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/postgres"
        self._as_postgres("initdb", "--pgdata", str(folder / "data"), "--auth=trust")
        self.start()

    def start(self):
        """Start the server, and wait until it answers."""
        self._control("--options", f"-p {self.port} -k {self.folder} -h 127.0.0.1", "start")

    def kill(self):
        """End the server without a word to its clients."""
        self._control("--mode=immediate", "stop")

    def ask(self, query):
        """Return what psql prints, one row a line."""
        command = ("psql", "--no-align", "--tuples-only", self.url.replace("+asyncpg", ""), "--command", query)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _control(self, *arguments):
        files = ("--pgdata", str(self.folder / "data"), "--log", str(self.folder / "log"))
        self._as_postgres("pg_ctl", *files, "--timeout=600", *arguments)  # a busy machine needs more than a minute

    def _as_postgres(self, program, *arguments):
        command = ("runuser", "-u", "postgres", "--", str(PROGRAMS[-1] / program), *arguments)
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder)
