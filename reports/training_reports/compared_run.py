"""A run as it is compared with others: its settings, and each result as a number."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from llama_core.records.evaluations import Score
from llama_core.records.files import by_dotted_key
from training_reports.contents import RunContents, losses_by_name
from training_reports.evaluations import score_name

AVERAGED = 0.05
"""A loss at a number of tokens, or after a time, is the mean over this last share of them."""
SOFTWARE = ("commit", "torch", "python")
"""Facts of ``environment.json`` that are compared like settings."""


@dataclass(frozen=True)
class ComparedRun:
    """One run, with its records. A result is None if the run has not recorded it."""

    name: str
    """Its name as an element of a sweep, or its directory's; the path if two runs share the name."""
    path: Path
    contents: RunContents

    @property
    def settings(self) -> dict[str, Any]:
        """Its configuration, its plan below ``plan``, and its software and device, by dotted key."""
        contents = self.contents
        settings: dict[str, Any] = dict(contents.config or {})
        settings["plan"] = contents.plan or {}
        facts = (contents.environment or {}).get("facts", {})
        settings |= {name: facts[name] for name in SOFTWARE if name in facts}
        if contents.benchmark is not None:
            settings["device"] = contents.benchmark.device
        return by_dotted_key(settings)

    @property
    def is_trained(self) -> bool:
        """Whether it has completed a training step."""
        return not self.contents.steps.empty

    @property
    def tokens(self) -> "pd.Series[float]":
        """Tokens up to each step."""
        return self.contents.steps["tokens"].astype(float)

    @property
    def seconds(self) -> "pd.Series[float]":
        """Time in steps up to each step."""
        return self.contents.steps["step_seconds"].astype(float).cumsum()

    @property
    def num_steps(self) -> float | None:
        """Its last step."""
        return _last(self.contents.steps["step"])

    @property
    def num_tokens(self) -> float | None:
        """Tokens that it was trained on."""
        return _last(self.tokens)

    @property
    def num_seconds(self) -> float | None:
        """Time in all of its steps."""
        return _last(self.seconds)

    def loss_at(self, at: float, along: "pd.Series[float]") -> float | None:
        """Return the mean training loss of the last steps before ``at``.

        Args:
            at: tokens or seconds.
            along: ``tokens`` or ``seconds``.
        """
        losses = self.contents.steps["loss"]
        recent = losses[(along > (1 - AVERAGED) * at) & (along <= at)]
        if recent.empty:  # a step is longer than the share of the run that is averaged
            recent = losses[along <= at].tail(1)
        return None if recent.empty else _number(recent.mean())

    @property
    def held_out_loss(self) -> float | None:
        """The loss after the last step, or the newest one of a run that goes on."""
        if self.contents.training is not None:
            return self.contents.training.eval_loss
        return _last(self.contents.steps["eval_loss"].dropna())

    @property
    def named_losses(self) -> Mapping[str, float]:
        """``held_out_loss`` of each named part of the held-out tokens; empty if they have no names."""
        if self.contents.training is not None:
            return {name: rows.mean for name, rows in self.contents.training.named_eval_rows.items()}
        losses = losses_by_name(self.contents.steps)
        return {} if losses.empty else {str(name): float(loss) for name, loss in losses.iloc[-1].dropna().items()}

    @property
    def scores(self) -> Mapping[str, Score]:
        """The newest score of each task and metric, by ``score_name``."""
        return {score_name(score): score for score in self.contents.scores}  # in the order of their steps

    @property
    def tokens_per_second(self) -> float | None:
        """Of the timed steps, or else the median of the training steps."""
        if self.contents.benchmark is not None:
            return self.contents.benchmark.tokens_per_second
        return self._median("tokens_per_second")

    @property
    def throughput_quartiles(self) -> tuple[float, float] | None:
        """Lower and upper quartile of the tokens/s of the timed steps, or else of the training steps; None without."""
        if self.contents.benchmark is not None:
            return self.contents.benchmark.throughput_quartiles
        rates = self.contents.steps["tokens_per_second"].astype(float)
        return None if rates.empty else (float(rates.quantile(0.25)), float(rates.quantile(0.75)))

    @property
    def was_disturbed(self) -> bool:
        """Whether threads waited for cores while its steps were timed: its times are those of a shared machine."""
        timed = self.contents.benchmark
        return timed is not None and timed.disturbance is not None

    @property
    def mfu(self) -> float | None:
        """Of the timed steps, or else the median of the training steps."""
        if self.contents.benchmark is not None:
            return self.contents.benchmark.mfu
        return self._median("mfu")

    @property
    def memory_peak_bytes(self) -> float | None:
        """Most memory alive while training, or else in the timed steps."""
        measured = self.contents.training or self.contents.benchmark
        return measured.memory_peak_bytes if measured else _last(self.contents.steps["memory_peak_bytes"])

    @property
    def device_hours(self) -> float | None:
        """Time in steps on all devices, or on all processes of a CPU."""
        seconds = self.num_seconds
        num_devices = int(self.contents.number("parallel", "gpus") or 1)
        return None if seconds is None else seconds * num_devices / 3600

    @property
    def dollars(self) -> float | None:
        """The price of the time in steps at ``launch.dollars_per_gpu_hour``; None without GPUs."""
        hours = self.device_hours
        price = self.contents.number("launch", "dollars_per_gpu_hour")
        if hours is None or price is None or self.contents.setting("launch", "device") != "cuda":
            return None
        return hours * price

    @property
    def dollars_per_billion_tokens(self) -> float | None:
        """``dollars`` for as many tokens."""
        dollars = self.dollars
        tokens = self.num_tokens
        return dollars / tokens * 1e9 if dollars and tokens else None

    def _median(self, column: str) -> float | None:
        return _number(self.contents.steps[column].astype(float).median())


def _last(values: "pd.Series[Any]") -> float | None:
    return None if values.empty else _number(values.iloc[-1])


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
