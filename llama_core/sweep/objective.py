"""What ranks the elements of a sweep, and which keys cannot change it; each key says so itself (``Key.changes``)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from llama_core.config.run import RunConfig
from llama_core.config.section import Changes
from llama_core.config.settings import DataConfig
from llama_core.errors import Problem, did_you_mean
from llama_core.records.measurements import NAMED_LOSS

Kind = Literal["throughput", "loss"]
_DONE: dict[Kind, str] = {"throughput": "timed", "loss": "trained"}
"""What has been done to an element with a result."""

_CHANGES: dict[str, Changes] = {known.name: known.key.changes for known in RunConfig.known_keys()}
UNTIMED = frozenset(name for name, changes in _CHANGES.items() if changes in {"learning", "nothing"})
"""Keys that do not change how long a step takes."""
HELD_OUT = frozenset(name for name, changes in _CHANGES.items() if changes == "held-out")
"""Keys that change the tokens which the held-out loss is a mean over."""


@dataclass(frozen=True)
class Objective:
    """What ranks the elements of a sweep."""

    kind: Kind
    part: str = ""
    """The name of the held-out tokens whose loss counts; empty for all of them."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the objective that a configuration spells ``throughput``, ``loss`` or ``eval_loss/NAME``.

        Raises:
            ValueError: if it is none of them.
        """
        if text == "throughput":
            return cls("throughput")
        if text == "loss":
            return cls("loss")
        if text.startswith(NAMED_LOSS) and text != NAMED_LOSS:
            return cls("loss", text.removeprefix(NAMED_LOSS))
        raise ValueError(f"choose one of throughput, loss, {NAMED_LOSS}NAME")

    @property
    def done(self) -> str:
        """What has been done to an element with a result."""
        return _DONE[self.kind]

    @property
    def loss(self) -> str:
        """The loss in words, such as ``held-out loss of code``."""
        return f"held-out loss of {self.part}" if self.part else "held-out loss"


def problems_of_part(part: str, data: DataConfig) -> Iterator[Problem]:
    """Yield a problem if no held-out tokens of the run have the name by whose loss a sweep is ranked."""
    names = data.held_out_names
    if names and part not in names:
        known = ", ".join(f"{NAMED_LOSS}{name}" for name in names)
        yield Problem(f"objective={NAMED_LOSS}{part}: choose one of {known}{did_you_mean(part, names)}")
    elif not names:
        yield Problem(
            f"objective={NAMED_LOSS}{part}: the held-out documents have no names; give a mixture as data.sources, or "
            "name them in data.validation"
        )


def problems_of_throughput(compared: Iterable[str]) -> Iterator[Problem]:
    """Yield why a sweep over some keys cannot be ranked by throughput.

    Args:
        compared: the keys that have several values.
    """
    idle = [key for key in compared if key in UNTIMED]
    if idle:
        yield Problem(
            f"grid: {', '.join(idle)} cannot change the throughput, which ranks the elements; train each "
            "element and rank the held-out losses with --objective loss (objective: loss), or leave it out"
        )


def problems_of_loss(compared: Iterable[str], base: RunConfig) -> Iterator[Problem]:
    """Yield why a sweep over some keys cannot be ranked by the held-out loss.

    Args:
        compared: the keys that have several values.
        base: the configuration that all elements share.
    """
    compared = list(compared)
    idle = [key for key in compared if _cannot_change_loss(key, base)]
    if idle:
        yield Problem(
            f"grid: {', '.join(idle)} cannot change the held-out loss, which ranks the elements; compare speeds "
            "with --objective throughput (objective: throughput), or leave it out"
        )
    elsewhere = [key for key in compared if key in HELD_OUT]
    if elsewhere:
        yield Problem(f"grid: with other {', '.join(elsewhere)}, held-out losses cannot be compared; leave it out")
    if "data.source" in compared and base.data.validation is None:
        yield Problem("grid: data.source also changes the held-out documents; set data.validation of the base")
    if base.data.validation is None and not base.data.validation_fraction:
        yield Problem(
            "objective=loss needs held-out documents: set data.validation, or a data.validation_fraction above 0"
        )


def _cannot_change_loss(key: str, base: RunConfig) -> bool:
    changes = _CHANGES.get(key)  # None for an unknown key, which the grid refuses
    if changes == "batch":
        return base.training.batch_size is not None
    return changes in {"speed", "nothing"}
