"""Where submitit keeps the files of a run's jobs: the pickles that they start from, and their first output."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from llama_core.errors import RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import who_else_may_fill
from llama_core.records.files import is_same_folder

CONTROLLER_LOG = "controller.log"
"""Name of the file beside them with the output of submitit's controller, which starts the ranks of a local job."""

_PRIVATE = 0o700  # submitit starts a job from a pickle, so nobody else may write there


def private_place(logs: Path) -> Path:
    """Return a folder for the pickles that the ranks of a run load, which nobody else may open.

    Raises:
        RunDirectoryError: if there is none.
    """
    place = _place_of_submissions(logs)
    place.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    place.chmod(_PRIVATE)
    return place


def submission_folders(logs: Path) -> list[Path]:
    """Return the folders given to submitit, one for each submission, oldest first."""
    return sorted(_place_of_submissions(logs).glob("submission-*"))


def fresh_folder(logs: Path) -> Path:
    """Make the folder of the next submission.

    submitit returns the old result of a job id it has seen before, and a fresh cluster counts ids from 1 again.
    """
    folder = private_place(logs) / f"submission-{len(submission_folders(logs)):05d}"
    folder.mkdir(mode=_PRIVATE)
    return folder


class OwnSubmission(NamedTuple):
    """The folder of a submission that a run's record names, if it was made for that run."""

    folder: Path
    below: Path
    """A folder above it; no link below this one leads to it."""


def submission_of(folder: Path, run: RunDirectory) -> OwnSubmission | None:
    """Return where a folder is that was made for a submission of the run; None if it was not.

    A record of somebody else, or from an archive, can name the folder of another run of ours, or a link to it. So the
    folder must be in this run's own place, and no link may lead there.
    """
    path = run.path.resolve()
    in_run, in_home = _places(path / run.logs.name)
    if folder.parent == in_home:
        return OwnSubmission(folder, in_home)
    own = in_run / folder.name
    is_own = folder.is_absolute() and is_same_folder(folder, own, path)
    return OwnSubmission(own, path) if is_own else None


def own_submission(folder: Path, run: RunDirectory) -> OwnSubmission | None:
    """Return the same for a submission of the run, or of the sweep that it is in."""
    sweep = RunDirectory(run.path.resolve().parent.parent)
    return submission_of(folder, run) or submission_of(folder, sweep)


def _place_of_submissions(logs: Path) -> Path:
    """Return where submitit keeps its files: in the run's logs or, if others may write there, in the user's home.

    A job starts from a pickle, and anyone who can replace it decides what the job runs.

    Raises:
        RunDirectoryError: if others may write to both.
    """
    in_run, in_home = _places(logs)
    for place in (in_run, in_home):
        if not who_else_may_fill(place):
            return place
    raise RunDirectoryError(
        f"other users may write to {logs} and to {in_home.parent}, or above, and could change what a job runs; "
        "chmod go-w them, or choose another --run-dir"
    )


def _places(logs: Path) -> tuple[Path, Path]:
    digest = hashlib.sha256(os.fsencode(logs)).hexdigest()[:16]
    home = Path.home() / ".local" / "state" / "llama-training-infra" / f"submissions-{digest}"
    return logs / "submitit", home
