"""The flow on PostgreSQL, the database of a shared Prefect server."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.wide

PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
CONFIG = """
architecture: {hidden_size: 64, num_layers: 2, ffn_size: 128, head_dim: 16, vocab_size: 512}
training: {seq_len: 32, batch_size: 2, steps: 3, eval_sequences: 2}
launch: {device: cpu}
benchmark: {warmup_steps: 0, steps: 1}
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Run a PostgreSQL server and yield the URL of an empty database."""
    if "CI" not in os.environ and (not PROGRAMS or os.geteuid() != 0):
        pytest.skip("needs root, and Debian's postgresql")
    folder = tmp_path_factory.mktemp("postgresql")
    for parent in (folder, *folder.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o111)  # the server refuses to run as root, and must reach this folder
    shutil.chown(folder, "postgres")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_postgres(program, *arguments):
        command = ("runuser", "-u", "postgres", "--", str(PROGRAMS[-1] / program), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout

    as_postgres("initdb", "--pgdata", str(folder / "data"), "--auth=trust")
    server = ("--pgdata", str(folder / "data"), "--log", str(folder / "log"))
    as_postgres("pg_ctl", *server, "--options", f"-p {port} -k {folder} -h 127.0.0.1", "start")
    try:
        yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"
    finally:
        as_postgres("pg_ctl", *server, "--mode=immediate", "stop")


def test_the_flow_keeps_its_records_in_postgresql_if_asked(database, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    prefect = {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database,
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    command = (
        sys.executable,
        "-m",
        "training_infra.cli",
        "train",
        "--flow",
        "--config",
        "run.yaml",
        "--run-dir",
        "run",
    )
    ended = subprocess.run(command, cwd=tmp_path, env=others | prefect, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    asked = "select state_name, (select count(*) from task_run where state_name = 'Completed') from flow_run"
    told = subprocess.run(
        ("psql", "--no-align", "--tuples-only", database.replace("+asyncpg", ""), "--command", asked),
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "Completed|8\n"
    assert not list((tmp_path / "home").glob("*.db"))
