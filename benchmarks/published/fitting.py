"""Fit the efficiencies of a framework to its published throughputs, and tell how well they predict rows left out.

The time of a step is linear in the efficiencies (``planning/frameworks/step.py``). They are fitted by least squares of
the logarithm of predicted over measured seconds, and pulled towards this engine's own: a factor of e, or a tenth of a
second per step, costs as much as one row that is off by 10 %. Hence a part that no row of a framework has keeps this
engine's figure.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llama_core.planning.frameworks.step import JobTime
from llama_core.planning.frameworks.traits import Efficiencies

PULL = 0.01
"""Square of the relative error that a factor of e costs as much as."""
_SECONDS = 0.1
"""Seconds per step that cost as much as a factor of e."""
_ITERATIONS = 60
_LARGEST_CHANGE = 0.5
_SMALL = 1e-6


@dataclass(frozen=True)
class Measured:
    """A step whose time was published."""

    name: str
    configuration: Hashable
    """What rows of one configuration share."""
    source: Hashable
    """What rows of one source share."""
    seconds: float
    time: JobTime


def fit(rows: Sequence[Measured]) -> Efficiencies:
    """Return the efficiencies that fit some rows best; this engine's own if there are none."""
    parameters = np.zeros(3)
    if not rows:
        return _efficiencies(parameters)
    # Gauss-Newton with differences for derivatives: three parameters, and a total that is linear in them
    for _ in range(_ITERATIONS):
        residuals = _residuals(rows, parameters)
        columns = []
        for place in range(len(parameters)):
            moved = parameters.copy()
            moved[place] += _SMALL
            columns.append((_residuals(rows, moved) - residuals) / _SMALL)
        jacobian = np.array(columns).T
        change = np.linalg.lstsq(jacobian, -residuals, rcond=None)[0]
        parameters = parameters + np.clip(change, -_LARGEST_CHANGE, _LARGEST_CHANGE)
        parameters[2] = max(0.0, parameters[2])  # a step takes no negative time
        if np.abs(change).max() < _SMALL:
            break
    return _efficiencies(parameters)


def left_out(rows: Sequence[Measured], fold: Callable[[Measured], Hashable]) -> Mapping[str, float]:
    """Return the predicted seconds of every row, under efficiencies fitted without the rows of its fold."""
    predicted: dict[str, float] = {}
    for key in dict.fromkeys(map(fold, rows)):
        efficiencies = fit([row for row in rows if fold(row) != key])
        predicted |= {row.name: row.time.total(efficiencies) for row in rows if fold(row) == key}
    return predicted


def _efficiencies(parameters: np.ndarray) -> Efficiencies:
    products, tensor_parallel, steps = (float(number) for number in parameters)
    return Efficiencies(float(np.exp(products)), float(np.exp(tensor_parallel)), steps * _SECONDS)


def _residuals(rows: Sequence[Measured], parameters: np.ndarray) -> np.ndarray:
    efficiencies = _efficiencies(parameters)
    errors = [np.log(row.time.total(efficiencies) / row.seconds) for row in rows]
    return np.concatenate([errors, np.sqrt(PULL) * parameters])
