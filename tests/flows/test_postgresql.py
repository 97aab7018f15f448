"""The flow on PostgreSQL, the database of a shared Prefect server."""

import os
import subprocess
import sys

import pytest
from postgresql import PostgreSQL

pytestmark = pytest.mark.wide

CONFIG = """
architecture: {hidden_size: 64, num_layers: 2, ffn_size: 128, head_dim: 16, vocab_size: 512}
training: {seq_len: 32, batch_size: 2, steps: 3, eval_sequences: 2}
launch: {device: cpu}
benchmark: {warmup_steps: 0, steps: 1}
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Run a PostgreSQL server."""
    server = PostgreSQL(tmp_path_factory.mktemp("postgresql"))
    yield server
    server.kill()


def test_the_flow_keeps_its_records_in_postgresql_if_asked(database, tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    others = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    prefect = {
        "PREFECT_HOME": str(tmp_path / "home"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database.url,
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
    assert database.ask(asked) == "Completed|9\n"
    assert not list((tmp_path / "home").glob("*.db"))
