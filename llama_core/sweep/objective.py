"""What ranks the elements of a sweep, and which keys cannot change it; each key says so itself (``Key.changes``)."""

from collections.abc import Iterable, Iterator
from typing import Literal

from llama_core.config.run import RunConfig
from llama_core.config.section import Changes
from llama_core.errors import Problem

Objective = Literal["throughput", "loss"]
DONE: dict[Objective, str] = {"throughput": "timed", "loss": "trained"}
"""What has been done to an element with a result."""

_CHANGES: dict[str, Changes] = {known.name: known.key.changes for known in RunConfig.known_keys()}
UNTIMED = frozenset(name for name, changes in _CHANGES.items() if changes in {"learning", "nothing"})
"""Keys that do not change how long a step takes."""
HELD_OUT = frozenset(name for name, changes in _CHANGES.items() if changes == "held-out")
"""Keys that change the tokens which the held-out loss is a mean over."""


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
