"""What a run has from the Hugging Face Hub."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HubSource:
    """A repository that a setting of a run names."""

    setting: str
    """The dotted key, such as ``training.init_from``."""
    name: str
    """As the request had it: ``org/name``, perhaps with a revision and a path."""
    commit: str
    """The hash of the commit that the files are of."""
    num_files: int
    """Files that the run takes of it."""


@dataclass(frozen=True)
class HubRecord:
    """Everything that a run has from the Hub."""

    sources: tuple[HubSource, ...]
    notes: tuple[str, ...] = ()
    """A sentence for each folder here that has the name of a repository, and for what is left out of one or ignored."""
