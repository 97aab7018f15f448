"""wandb takes settings from the current folder, which say where the key is sent: not those of somebody else."""

import os

import pytest

from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.records.directory import RunDirectory
from llama_core.training.metrics import MetricsSinks

SETTINGS = "[default]\nbase_url = http://127.0.0.1:1\n"
CONFIG = RunConfig.from_mapping({"tracking": {"wandb": "offline"}, "launch": {"device": "cpu"}})


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.mark.root
@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
@pytest.mark.parametrize("whose", ["file", "folder", "open"])
def test_settings_of_somebody_else_are_refused(run, tmp_path, folder, whose):
    file = tmp_path / folder / "settings"
    file.parent.mkdir()
    file.write_text(SETTINGS)
    if whose == "open":
        file.chmod(0o666)
    else:
        os.chown(file if whose == "file" else file.parent, 65534, 65534)
    with pytest.raises(EnvironmentMismatchError, match=rf"{file} .*, and wandb would send your key where it says"):
        MetricsSinks.open(run, CONFIG, resumed_at=0)


@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_settings_in_a_run_are_refused_whoever_has_unpacked_it(run, folder):
    (run.logs / folder).mkdir()
    (run.logs / folder / "settings").write_text(SETTINGS)
    with pytest.raises(
        EnvironmentMismatchError, match=rf"where {run.logs}/{folder}/settings says; read it, and remove it"
    ):
        MetricsSinks.open(run, CONFIG, resumed_at=0)
