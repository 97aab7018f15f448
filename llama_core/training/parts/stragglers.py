"""Ranks that fall behind while the run trains are named."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from llama_core.config.run import RunConfig
from llama_core.errors import RunDirectoryError
from llama_core.machine.detect import device_label
from llama_core.machine.node import own_host
from llama_core.machine.shared_cores import own_core_wait_seconds
from llama_core.parallel.ranks import is_first_rank, num_ranks, on_first_rank
from llama_core.preflight.checks import PRODUCT
from llama_core.preflight.stragglers import CORE_WAIT, SIGNALS, StragglerJudge
from llama_core.records.directory import RunDirectory
from llama_core.records.stragglers import Straggler, append_stragglers, read_stragglers, still_behind
from llama_core.training.measure import mark, seconds_between
from llama_core.training.parts.part import FinishedStep, LoopPart, RunProgress
from llama_core.training.parts.spikes import BadStep
from llama_core.training.reports import Reports
from llama_core.training.step import SLOWEST_SECONDS

STEPS_BETWEEN_LOOKS = 10
"""Fewest steps from one look to the next."""
SHARE_OF_STEPS = 0.002
"""Most of the time that looks take: where steps are short, there are more of them between two looks."""
SLOWEST_DEVICE = "slowest_device"
"""The metric: how long a product takes on the slowest rank, as a multiple of the median."""
_SIDES = {"cuda": 2048, "cpu": 256}
"""Rows and columns of the matrices that are multiplied, by type of device: 24 MiB and 768 KiB of memory in all."""
_PRODUCTS = {"cuda": 20, "cpu": 4}
"""Products of a look: half a millisecond on an H100, one or two on a core."""

logger = logging.getLogger(__name__)


def own_place(device: torch.device) -> tuple[str, str]:
    """Return the names of this rank's node, as its scheduler knows it, and device, with the index of a GPU."""
    if device.type == "cuda":
        return own_host(), f"{torch.cuda.get_device_name(device)}, {device}"
    return own_host(), device_label(device.type)


class StragglerWatch(LoopPart):
    """Looks at all ranks every some steps, with a product that is the same on each.

    Args:
        run: where ranks that fall behind are recorded.
        config: its configuration.
        progress: how far it is.
        reports: takes what this rank has measured.
        device: this rank's device.
    """

    def __init__(
        self, run: RunDirectory, config: RunConfig, progress: RunProgress, *, reports: Reports, device: torch.device
    ) -> None:
        self._run = run
        self._progress = progress
        self._device = device
        self._probe: _Probe | None = None
        if config.launch.stragglers != "off" and num_ranks() > 1:
            self._probe = _Probe(device)
            self._report = {name: reports.declare_of_ranks(name) for name in SIGNALS[device.type]}
        self._judge = StragglerJudge(SIGNALS[device.type], num_ranks())
        self._steps_between = STEPS_BETWEEN_LOOKS
        self._next_look = 0
        self._places: list[tuple[str, str]] = []
        """The node and the device of every rank; empty on others than the first."""

    def begin(self) -> None:
        """Learn where the ranks are."""
        if self._probe is None:
            return
        self._places = on_first_rank(own_place(self._device))
        if is_first_rank():
            self._begin_anew()
        self._next_look = self._progress.step + STEPS_BETWEEN_LOOKS  # the first steps set up kernels

    def step_begun(self) -> None:
        """Measure, if it is time for it, and report what the look before has measured."""
        if self._probe is None or self._progress.step < self._next_look:
            return
        self._next_look = self._progress.step + self._steps_between
        for name, value in self._probe.look().items():
            self._report[name](value)

    def after_step(self, step: FinishedStep) -> None:
        """Name the ranks that begin or cease to fall behind."""
        if self._probe is None:
            return
        step.measured[SLOWEST_DEVICE] = None
        products = step.values.of_ranks.get(PRODUCT, ())
        if not products or not all(products):  # no look in this step, or the first one
            return
        step.measured[SLOWEST_DEVICE] = max(products) / median(products)
        seconds = _PRODUCTS[self._device.type] * max(products)
        of_steps = SHARE_OF_STEPS * step.values.reported.get(SLOWEST_SECONDS, math.inf)
        self._steps_between = max(STEPS_BETWEEN_LOOKS, math.ceil(seconds / of_steps))
        if is_first_rank():
            self._tell(step.step, step.values.of_ranks)

    def went_back(self, bad: BadStep) -> None:
        """Look at the steps that are taken again."""
        self._judge.forget()
        self._next_look = self._progress.step + self._steps_between

    def _begin_anew(self) -> None:
        """End what an earlier attempt has found: its ranks may have been on other nodes."""
        with suppress(RunDirectoryError):  # the record is damaged, as ``doctor`` says
            step = self._progress.step
            again = "the run has started again"
            found = still_behind(read_stragglers(self._run))
            self._record([replace(one, finding=again, since_step=step, step=step, is_over=True) for one in found])

    def _tell(self, step: int, values: Mapping[str, Any]) -> None:
        found = [
            Straggler(
                finding.rank,
                *self._places[finding.rank],
                signal=finding.signal,
                finding=finding.text,
                since_step=finding.since_step,
                step=step,
                is_over=finding.is_over,
            )
            for finding in self._judge.look(step, values)
        ]
        for one in found:
            logger.log(logging.INFO if one.is_over else logging.WARNING, "stragglers: %s", one)
        self._record(found)

    def _record(self, found: Sequence[Straggler]) -> None:
        try:
            append_stragglers(self._run, found)
        except OSError as error:
            logger.warning("stragglers: not recorded in %s: %s", self._run.stragglers, error.strerror or error)


class _Probe:
    """Measures this rank, without waiting for its device: each look returns what the one before has measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        side = _SIDES[device.type]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
        self._left, self._right = (
            torch.empty(side, side, dtype=dtype, device=device).normal_(generator=generator) for _ in range(2)
        )
        self._result = torch.empty_like(self._left)
        self._marks: tuple[Any, Any] | None = None
        self._waited = own_core_wait_seconds()
        self._since = time.monotonic()

    def look(self) -> dict[str, float]:
        """Return what is known of this rank since the look before, by signal; 0 for what is unknown."""
        number = _PRODUCTS[self._device.type]
        before = self._marks
        begun = self._now()
        for _ in range(number):
            torch.mm(self._left, self._right, out=self._result)
        self._marks = (begun, self._now())
        seconds = 0.0 if before is None else seconds_between(*before) / number
        return {PRODUCT: seconds, CORE_WAIT: self._core_wait()}

    def _now(self) -> Any:
        """Return a mark of this moment: on a CPU, in the time for which this thread had a core."""
        return time.thread_time() if self._device.type == "cpu" else mark(self._device)

    def _core_wait(self) -> float:
        waited = own_core_wait_seconds()
        now = time.monotonic()
        share = 0.0
        if waited is not None and self._waited is not None:
            # 0 would say that nothing is known
            share = max(1e-9, (waited - self._waited) / (now - self._since))
        self._waited = waited
        self._since = now
        return share
