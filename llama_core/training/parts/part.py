"""A part of the training loop: something that happens between steps.

The loop takes steps and calls its parts, in the order of one list in ``trainer.py``. A part is built with the few
things that it needs, and shares with the loop and the other parts only ``RunProgress`` and the ``FinishedStep`` that
goes through them. All ranks call all parts, so a part may communicate wherever all ranks decide alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from llama_core.config.settings import UNNAMED
from llama_core.models.batch import Batch
from llama_core.records.held_out import HeldOutRows
from llama_core.training.parts.spikes import BadStep
from llama_core.training.step import StepValues


@dataclass
class RunProgress:
    """How far a run is."""

    total_steps: int = 0
    """The run's last step."""
    step: int = 0
    """The last step that the device was given."""
    tokens: int = 0
    """Tokens trained on, those of this step included."""
    ended_early: str = ""
    """Why the run ends before ``total_steps``, as a clause; empty if it does not."""

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take."""
        return self.step >= self.total_steps or self.ended_early != ""


@dataclass(frozen=True)
class HeldOutEvaluation:
    """The held-out rows of an evaluation; without any before the first one."""

    step: int = 0
    """The step that it came after."""
    rows: Mapping[str, HeldOutRows] = field(default_factory=dict)
    """By name, or as ``UNNAMED``."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What the model and the objective measured of all rows beside the loss, by the name of the same of a step."""

    @cached_property
    def joined(self) -> HeldOutRows | None:
        """All rows."""
        return HeldOutRows.joined(self.rows.values()) if self.rows else None

    @property
    def loss(self) -> float | None:
        """The mean over all rows."""
        return None if self.joined is None else self.joined.mean

    @property
    def named(self) -> dict[str, HeldOutRows]:
        """The rows that have a name."""
        return {name: rows for name, rows in self.rows.items() if name != UNNAMED}

    @property
    def named_losses(self) -> dict[str, float]:
        """The mean of each name."""
        return {name: rows.mean for name, rows in self.named.items()}


@dataclass
class FinishedStep:
    """A step whose results are known. It goes through the parts in their order, and each may add what it finds."""

    step: int
    tokens: int
    """Tokens trained on, those of this step included."""
    num_tokens: int
    """Tokens of this step, over all ranks."""
    seq_len: int
    """Tokens of each of its sequences."""
    loss_scale: float
    """Factor that its loss was scaled by."""
    seconds: Mapping[str, float]
    """Wall time of each of its phases."""
    values: StepValues
    microbatches: Sequence[Batch]
    """This rank's share of its data, on its device."""
    own_loss: Tensor
    """The sum of the losses that this rank has computed, a scalar on the device."""
    taken_again: bool
    """Whether it was taken again after the parts were told that it has begun."""
    position: Mapping[str, Any]
    """The position in the data after it."""
    is_newest: bool
    """Whether no later step has begun, so that the weights are those after this one."""
    asked_to_stop: bool
    """Whether any rank was asked to stop, when this step began or one that was read with it."""
    measured: dict[str, float | None]
    """The metrics of this step beside those that every step has, by name: what the model and the objective have
    measured, and the parts have reported. A part may add a number that the first rank knows by now. Every step has the
    same names, with None where there is no value: readers of Parquet take the columns of its first part."""

    is_sound: bool = True
    """Whether loss and gradient were finite, or overflowed only because of the loss's scale."""
    spike: str = ""
    """Which value was far above those of the steps before, and by how much; empty if none was."""
    bad: BadStep | None = None
    """Set if the step ends the run or makes it roll back."""
    mended: BadStep | None = None
    """Set if the step was bad at first, and good when it was taken again at once."""
    evaluation: HeldOutEvaluation = field(default_factory=HeldOutEvaluation)
    """The evaluation after it; without rows if there was none."""

    @property
    def total_seconds(self) -> float:
        """Wall time of the step."""
        return sum(self.seconds.values())


class LoopPart:
    """What the loop calls. A part overrides what it has something to do in.

    Between two steps the calls are: ``before_step``, the step, ``step_begun``, and, once its results are known,
    ``after_step``. On a GPU the next step may have begun by then, unless a part ``is_due``.
    """

    def begin(self) -> None:
        """Prepare for the first step of this process."""

    def before_step(self) -> None:
        """Act before the device is given the step after ``RunProgress.step``."""

    def step_begun(self) -> None:
        """Act when the device has been given step ``RunProgress.step``; its results are not known yet.

        What a part reports by then (``Reports``) becomes one of the results.
        """

    def is_due(self, step: int) -> bool:
        """Return whether ``after_step`` needs the weights of ``step``, so that no later step may begin before."""
        return False

    def after_step(self, step: FinishedStep) -> None:
        """Act on the results of a step."""

    def before_checkpoint(self) -> None:
        """Bring to the disk what a run that resumes from the checkpoint will not make again."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a run that goes on needs, as JSON: these keys become keys of a checkpoint's ``state.json``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint. ``RunProgress`` already has; ``state`` has the keys of all parts."""

    def went_back(self, bad: BadStep) -> None:
        """Act after the run has returned to a checkpoint because of a bad step. The last part is called first."""

    def end(self, error: BaseException | None) -> None:
        """Act at the end of the loop, however it ended; ``error`` is what ended it. The last part is called first."""
