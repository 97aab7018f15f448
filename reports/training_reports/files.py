"""The files of a run that its page links to, and the end of the log that explains a failure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from llama_core.errors import RunDirectoryError
from llama_core.launch.attempts import end_of_log, log_path, submission_log
from llama_core.records.checkpoints import checkpoint_step, is_complete, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.retention import by_held_out_loss
from llama_core.redaction import redacted, shell_word
from llama_core.trackers.registry import TRACKERS

LOG_LINES = 20
"""Lines of a log on the page."""
MAX_LOGS = 8
"""Most logs of ranks with a link of their own."""

_LOG = re.compile(r"rank-([0-9]{5,9})\.log")
_RANK = re.compile(r"\brank (\d{1,9})\b")


@dataclass(frozen=True)
class Link:
    """A file or folder of the run."""

    text: str
    href: str
    """Its address, relative to the run directory, where the page is."""


@dataclass(frozen=True)
class RankOutputs:
    """The end of what ranks have printed."""

    ends: Mapping[str, str]
    """The last lines of each, by its name."""
    more: str
    """How to see the others."""


NO_OUTPUTS = RankOutputs({}, "")


def logs_of_ranks(run: RunDirectory) -> list[Path]:
    """Return the files with the output of each rank, in order of their names."""
    return sorted(run.logs.glob("rank-*.log"))


def outputs_of_ranks(run: RunDirectory) -> RankOutputs:
    """Return the last lines that the first ``MAX_LOGS`` ranks have printed in their newest attempt."""
    logs = logs_of_ranks(run)
    ends = {}
    for path in logs[:MAX_LOGS]:
        if number := _LOG.fullmatch(path.name):
            rank = int(number[1])
            ends[f"Rank {rank}"] = redacted("\n".join(end_of_log(run, rank).splitlines()[-LOG_LINES:]))
    shown = f"The first {len(ends)} of {len(logs):,} ranks. Others: " if len(logs) > len(ends) else "More lines: "
    return RankOutputs(ends, f"{shown}training-infra logs {shell_word(run.path)} --rank N --lines 200")


def run_files(run: RunDirectory, best_by: str = "") -> dict[str, list[Link]]:
    """Return the links to the run's files, by kind; a kind without a file is missing.

    Args:
        run: the run.
        best_by: the name of the held-out loss whose lowest value marks the best checkpoint.
    """
    logs = logs_of_ranks(run)
    # not those of packages, which this process need not know: the page follows from the run alone
    of_trackers = [run.tracker(kind.name) for kind in TRACKERS.built_in()]
    kinds = {
        "Logs": [_link(run, path) for path in logs[:MAX_LOGS]] + [_link(run, run.logs)],
        "Checkpoints": list(_checkpoints(run, best_by)),
        "Records": [_link(run, path) for path in sorted(run.path.glob("*.*")) if path.suffix in {".json", ".yaml"}],
        "Metrics": [_link(run, path) for path in (run.metrics, *of_trackers)],
        "Profiles": [_link(run, path) for path in sorted(run.trace.glob("*.*")) if path.suffix != ".json"],
    }
    existing = {kind: [link for link in links if link is not None] for kind, links in kinds.items()}
    return {kind: links for kind, links in existing.items() if links}


def end_of_culprits_log(run: RunDirectory, outcome: Outcome | None) -> tuple[Link | None, str] | None:
    """Return the last lines of the log that explains a failure, and a link to it; None without either.

    The log is that of the rank that the reason names, else of rank 0; if that is empty, it is the job's.
    """
    if outcome is None or outcome.status in {"finished", "cancelled"}:
        return None
    named = _RANK.search(outcome.reason)
    rank = int(named[1]) if named else 0
    log = end_of_log(run, rank).rstrip()
    link = _link(run, log_path(run, rank))
    if not log:
        try:
            log = submission_log(run, read_typed(run.job, JobRecord)).rstrip()
            link = None
        except RunDirectoryError:  # no job yet, or one of another version
            return None
    return (link, redacted("\n".join(log.splitlines()[-LOG_LINES:]))) if log else None


def _checkpoints(run: RunDirectory, best_by: str) -> Iterator[Link | None]:
    found = list_checkpoints(run)
    complete = [path for path in found if is_complete(path)]
    best = by_held_out_loss(complete, best_by)[:1]
    for path in found:
        note = "" if path in complete else " (incomplete)"
        if path in best:
            note = " (best)"
        yield _link(run, path, f"step {checkpoint_step(path)}{note}")


def _link(run: RunDirectory, path: Path, text: str | None = None) -> Link | None:
    """Return a link to a path in the run directory; None if nothing is there."""
    if not path.exists():
        return None
    name = path.relative_to(run.path).as_posix() + ("/" if path.is_dir() else "")
    return Link(text or name, quote(name))
