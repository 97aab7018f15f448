"""Tells a bad step from a good one: a loss or gradient that is not finite, or far above those of the steps before."""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from llama_core.config.settings import DATALOADER, DataSource, OnBadStep, TrainingConfig
from llama_core.errors import BadStepError, LossSpikeError, NonFiniteError, WrongDeviceError
from llama_core.records.directory import RunDirectory
from llama_core.records.rollbacks import Suspect
from llama_core.redaction import shell_word

MIN_DEVIATION = 0.01
"""Least median absolute deviation, as a fraction of the median, so that a loss that hardly varies has no spikes."""


@dataclass(frozen=True)
class BadStep:
    """A bad step that ends the run or makes it roll back."""

    step: int
    reason: str
    """What was bad about it, with the values that show it."""
    is_finite: bool
    """Whether loss and gradient were finite; if so, the update was made."""
    data: Mapping[str, Any] | None
    """The position in the data after this step's; None if the data are not at fault."""
    suspects: tuple[Suspect, ...] = ()
    """The ranks that may hold wrong values, if replicas differ."""

    def ends(self, run: RunDirectory, source: DataSource | None, why: str, *remedies: OnBadStep) -> BadStepError:
        """Return the error that ends the run at this step.

        Args:
            run: the run.
            source: its data source; a run on a caller's dataloader is continued from Python.
            why: the setting or fact that makes it end.
            remedies: policies that the run can go on with.
        """
        if self.suspects:
            hosts = dict.fromkeys(suspect.host for suspect in self.suspects)
            return WrongDeviceError(f"step {self.step}: {self.reason}; {why}", list(hosts))
        command = f"training-infra train --run-dir {shell_word(run.path)} --resume --set training."
        if source == DATALOADER:
            command = "launch_training(..., resume=True) after configure with "
        effects = {"rollback": "leaves out the data up to this step", "skip": "trains on with them"}
        go_on = " or ".join(f"{command}on_bad_step={policy} ({effects[policy]})" for policy in remedies)
        error = LossSpikeError if self.is_finite else NonFiniteError
        return error(f"step {self.step}: {self.reason}; {why}", f"look at the data of the steps before it; {go_on}")


class Spikes:
    """Watches losses and gradient norms for values far above the median of the last steps.

    A value is a spike if it is more than a threshold of median absolute deviations above the median. Neither statistic
    moves much for a few outliers, so a spike does not hide the next one. Ranks that see the same values judge alike.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._thresholds = {"loss": training.loss_spike_threshold, "grad_norm": training.grad_norm_spike_threshold}
        self._recent = {name: deque[float](maxlen=training.spike_window) for name in self._thresholds}

    def find(self, loss: float, grad_norm: float) -> str:
        """Return which finite value of the next step is a spike, and by how much; empty if none is."""
        found = [self._spike(name, value) for name, value in (("loss", loss), ("grad_norm", grad_norm))]
        return " and ".join(clause for clause in found if clause)

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the last steps, as JSON."""
        return {name: list(values) for name, values in self._recent.items()}

    def load_state_dict(self, state: Mapping[str, Iterable[float]]) -> None:
        """Go back to what ``state_dict`` returned; an empty mapping forgets all steps."""
        for name, values in self._recent.items():
            values.clear()
            values.extend(state.get(name, ()))

    def _spike(self, name: str, value: float) -> str:
        recent = self._recent[name]
        threshold = self._thresholds[name]
        if not math.isfinite(value):
            return ""
        clause = ""
        if threshold is not None and len(recent) == recent.maxlen:
            usual = median(recent)
            deviation = max(median(abs(other - usual) for other in recent), MIN_DEVIATION * abs(usual))
            if value > usual + threshold * deviation:
                clause = (
                    f"{name} {value:.4g} is more than {threshold:g} median absolute deviations above the median "
                    f"{usual:.4g} of the last {len(recent)} steps"
                )
        recent.append(value)
        return clause
