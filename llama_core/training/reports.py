"""Numbers that the parts of the loop report, on their way to the record of a step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llama_core.parallel.ranks import most_over_devices, num_ranks, of_every_device, own_rank, sum_over_devices

Reduction = Literal["max", "sum", "mean"]
"""What is made of the numbers that the ranks report: of all that have, for the mean."""


@dataclass
class _Reported:
    """A number of this rank since the last step was sent."""

    reduction: Reduction
    is_recorded: bool
    value: float | None = None
    """None if it has not been reported."""


class SentReports(NamedTuple):
    """What all ranks have reported for a step, on its way to host memory."""

    values: Tensor
    """fp64 on the device."""
    of_ranks: tuple[str, ...]
    """The names of those of which it holds the value of each rank, at its end."""


class Reports:
    """Reduces over all ranks what each has reported, and sends it to host memory with a step.

    A name is declared once, on every rank and in the same order, when its part is built; a rank may then report a value
    for it in some steps only. A value belongs to the step that is sent next: the one that is about to begin, in
    ``before_step``, or has begun, in ``step_begun``.
    """

    def __init__(self) -> None:
        self._own: dict[str, _Reported] = {}
        self._of_ranks: dict[str, float | Tensor | None] = {}
        self.formats: dict[str, str] = {}
        """How the console shows some of them, by name."""

    def declare(
        self, name: str, reduction: Reduction, *, shown: str = "", recorded: bool = True
    ) -> Callable[[float], None]:
        """Return the function that reports a value for the next step.

        Args:
            name: its name among the results of a step, and the column of the metrics.
            reduction: how the values of ranks become one.
            shown: how the console shows it, such as ``"wait {:.1%}"``; by default, it does not.
            recorded: whether it is a metric of its own; if not, only the loop and its parts read it.
        """
        if name in self._own:
            raise ValueError(f"two parts report {name}")
        own = _Reported(reduction, recorded)
        self._own[name] = own
        if shown:
            self.formats[name] = shown

        def report(value: float) -> None:
            own.value = value

        return report

    def declare_of_ranks(self, name: str) -> Callable[[float | Tensor], None]:
        """Return the function that reports a value for the next step, of which all ranks learn the value of each rank.

        All ranks report it for the same steps: other steps do not carry it, as it is as long as there are ranks. A
        value that only the device knows yet is reported as fp64, [].

        Args:
            name: its name in ``of_ranks``.
        """
        if name in self._of_ranks:
            raise ValueError(f"two parts report {name}")
        self._of_ranks[name] = None

        def report(value: float | Tensor) -> None:
            self._of_ranks[name] = value

        return report

    def send(self, device: torch.device) -> SentReports:
        """Return the values of all ranks on their way, to be read by ``received`` and ``of_ranks``.

        All ranks must call it together. It does not wait for the device.
        """
        largest = [_or(-math.inf, own) for own in self._own.values() if own.reduction == "max"]
        added: list[float] = []
        for own in self._own.values():
            if own.reduction != "max":
                added += (_or(0.0, own), float(own.value is not None))
        in_host: list[str] = []
        on_device: dict[str, Tensor] = {}
        for name, value in self._of_ranks.items():
            if isinstance(value, Tensor):
                on_device[name] = value
            elif value is not None:
                by_rank = [0.0] * num_ranks()
                by_rank[own_rank()] = value
                added += by_rank
                in_host.append(name)
            self._of_ranks[name] = None
        for own in self._own.values():
            own.value = None
        values = most_over_devices(device, *largest)
        if added:
            values = torch.cat((values, sum_over_devices(device, *added)))
        if on_device:
            values = torch.cat((values, of_every_device(torch.stack(list(on_device.values()))).flatten()))
        return SentReports(values, (*in_host, *on_device))

    def received(self, values: list[float]) -> dict[str, float]:
        """Return what all ranks have reported, by name, from the values in host memory."""
        names = [name for name, own in self._own.items() if own.reduction == "max"]
        largest = dict(zip(names, values[: len(names)], strict=True))
        found = {name: value for name, value in largest.items() if value > -math.inf}
        added = iter(values[len(names) :])
        for name, own in self._own.items():
            if own.reduction == "max":
                continue
            total = next(added)
            count = next(added)
            if count:
                found[name] = total / count if own.reduction == "mean" else total
        return found

    def of_ranks(self, values: list[float], names: Sequence[str]) -> dict[str, tuple[float, ...]]:
        """Return the value of every rank, by name, from the values in host memory.

        Args:
            values: those of ``SentReports``.
            names: its names.
        """
        count = num_ranks()
        first = len(values) - count * len(names)
        return {
            name: tuple(values[first + place * count : first + (place + 1) * count]) for place, name in enumerate(names)
        }

    def recorded(self, values: Mapping[str, float]) -> dict[str, float | None]:
        """Return those of what was received that are metrics of their own; None for what nobody has reported."""
        return {name: values.get(name) for name, own in self._own.items() if own.is_recorded}


def in_words(values: Mapping[str, float | None], formats: Mapping[str, str]) -> str:
    """Return the known values that have a format in one line, in the order of the formats; empty without any.

    Args:
        values: numbers by name.
        formats: texts such as ``"margin {:.4f}"``, by the name of the number that they take.
    """
    return ", ".join(text.format(values[name]) for name, text in formats.items() if values.get(name) is not None)


def _or(otherwise: float, own: _Reported) -> float:
    return otherwise if own.value is None else own.value
