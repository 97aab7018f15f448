"""Where a run's step took longer than predicted, by part, and the command that would tell more or mend it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.planning.plan import ParallelPlan
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_typed
from llama_core.records.measurements import BenchmarkRecord, ExpectedStep
from llama_core.records.metrics import read_metrics
from llama_core.records.profiles import ProfileRecord, read_profiles
from llama_core.records.step_parts import (
    ATTENTION,
    BUBBLE,
    COMPUTING,
    DATA,
    HEAD,
    HOST,
    OPTIMIZER,
    POINTWISE,
    PRODUCTS,
    SEND,
    TRANSFERS,
    WHOLE,
    StepComparison,
    compared,
)
from llama_core.records.timelines import LaneRecord, read_lanes
from llama_core.redaction import shell_word
from llama_core.runs.loading import load_config, load_plan

CLOCKS = ("step_seconds", "forward_backward_seconds", "optimizer_seconds", "data_seconds")
"""The clocks of a training step, as ``StepRecord`` names them."""
COMMUNICATION = "communication"
WAITING = f"{BUBBLE}, {SEND} and {HOST}"
"""What a profile does not tell apart in a pipeline: a rank waits for its turn, for a message, or for Python."""
REST = "rest"
_NAMED = (PRODUCTS, ATTENTION, HEAD, OPTIMIZER)
"""Parts that a profile names."""


@dataclass(frozen=True)
class Remedy:
    """What may be done about a part that took longer, or another time, than predicted."""

    command: str
    why: str
    """What the command does, in a clause."""


def compared_step(
    expected: ExpectedStep,
    profiles: Sequence[ProfileRecord],
    timed: BenchmarkRecord | None,
    clocks: Mapping[str, float],
    lanes: Sequence[LaneRecord],
) -> StepComparison | None:
    """Return the parts of a step, predicted and measured; None if no step was timed.

    A profile counts, if there is one: that of the rank that computes longest, which is the one predicted. Otherwise the
    clocks of the training steps do.

    Args:
        expected: the prediction.
        profiles: those of the timed steps.
        timed: the timed steps.
        clocks: the mean of ``CLOCKS`` over training steps; empty if there are none.
        lanes: the timeline of a pipeline's step; empty without one.
    """
    if expected.parts and profiles and timed is not None:
        longest = max(profiles, key=_computing_seconds)
        return _by_profile(expected.parts, longest, timed)
    if expected.parts and clocks:
        return _by_clocks(expected.parts, clocks, lanes)
    whole = {WHOLE: expected.seconds}
    if clocks:
        measured = {WHOLE: clocks["step_seconds"]}
        return compared(whole, measured, {WHOLE: ()}, "mean of the training steps, without the first")
    if timed is not None:
        return compared(whole, {WHOLE: timed.median_seconds}, {WHOLE: ()}, "median of the timed steps")
    return None


def _computing_seconds(profile: ProfileRecord) -> float:
    return sum(profile.seconds.values()) - profile.communication_seconds


def _by_profile(predicted: Mapping[str, float], profile: ProfileRecord, timed: BenchmarkRecord) -> StepComparison:
    num_steps = len(timed.step_seconds)
    in_pipeline = bool(predicted.get(BUBBLE) or predicted.get(SEND))
    on_gpu = profile.span_seconds is not None
    groups: dict[str, Collection[str]] = {kind: (kind,) for kind in (*COMPUTING, OPTIMIZER)}
    transfers = [kind for kind in TRANSFERS if kind != SEND or not in_pipeline]
    if on_gpu:
        groups |= {kind: (kind,) for kind in transfers}
        measured = _on_gpu(profile)
    else:  # a thread waits for a transfer, whichever it is
        groups[COMMUNICATION] = transfers
        measured = _on_cpu(profile, sum(timed.step_seconds))
    if in_pipeline:
        groups[WAITING] = (BUBBLE, SEND, HOST, DATA)
    else:
        groups[f"{HOST} and {DATA}"] = (BUBBLE, HOST, DATA)
    of_a_step = {kind: seconds / num_steps for kind, seconds in measured.items()}
    return compared(predicted, of_a_step, groups, f"profile of {num_steps} timed steps, which it slows")


def _on_gpu(profile: ProfileRecord) -> dict[str, float]:
    """Return the seconds of the parts of all profiled steps; they add up to the profile's span."""
    measured = {kind: profile.seconds.get(kind, 0.0) for kind in _NAMED}
    measured |= {HOST: profile.idle_seconds or 0.0, **profile.exposed}
    # the other kernels: norms, activations, casts, and copies into and out of the buffers of transfers
    measured[POINTWISE] = max(0.0, (profile.span_seconds or 0.0) - sum(measured.values()))
    return measured


def _on_cpu(profile: ProfileRecord, step_seconds: float) -> dict[str, float]:
    """Return the seconds of the parts of all profiled steps, which took ``step_seconds`` together."""
    measured = {kind: profile.seconds.get(kind, 0.0) for kind in _NAMED}
    measured[COMMUNICATION] = profile.communication_seconds
    operators = sum(profile.seconds.values())
    measured[POINTWISE] = operators - sum(measured.values())
    measured[HOST] = max(0.0, step_seconds - operators)
    return measured


def _by_clocks(
    predicted: Mapping[str, float], clocks: Mapping[str, float], lanes: Sequence[LaneRecord]
) -> StepComparison:
    passes = [*COMPUTING, HOST]
    name = "computing"
    if any(predicted.get(kind) for kind in TRANSFERS):
        passes += TRANSFERS
        name = f"{name} and {COMMUNICATION}"
    waited = _waited(lanes)
    groups: dict[str, Collection[str]] = {}
    if waited:
        groups[BUBBLE] = (BUBBLE,)
    else:
        passes.append(BUBBLE)
    if predicted.get(BUBBLE) and not waited:
        name = f"{name}, with the {BUBBLE}"
    groups |= {name: passes, OPTIMIZER: (OPTIMIZER,), DATA: (DATA,), REST: ()}
    whole, both, updating, loading = (clocks[name] for name in CLOCKS)
    measured = {name: max(0.0, both - waited), BUBBLE: waited, OPTIMIZER: updating, DATA: loading}
    measured[REST] = max(0.0, whole - both - updating - loading)
    return compared(predicted, measured, groups, "mean of the training steps, without the first")


def _waited(lanes: Sequence[LaneRecord]) -> float:
    """Return how long the rank that computes most waits in a pipeline's step; 0 without a timeline."""
    busy = [sum(lane.ends) - sum(lane.begins) for lane in lanes if lane.begins]
    if not busy:
        return 0.0
    first = min(min(lane.begins) for lane in lanes if lane.begins)
    last = max(max(lane.ends) for lane in lanes if lane.ends)
    return max(0.0, last - first - max(busy))


def remedy(
    step: StepComparison, expected: ExpectedStep, config: RunConfig, plan: ParallelPlan, run: Path
) -> Remedy | None:
    """Return what may be done about a step that took another time than predicted; None if nothing is known to help.

    Args:
        step: the comparison.
        expected: the prediction.
        config: of the run.
        plan: of the run.
        run: its directory.
    """
    if step.is_as_predicted or expected.rates == "unmodelled":
        return None
    on_gpu = config.launch.device == "cuda"
    calibrate = "training-infra calibrate --device cuda" if on_gpu else "training-infra calibrate"
    if expected.rates == "data sheet":
        return Remedy(calibrate, "measures this GPU: the prediction is from its data sheet")
    if expected.rates == "assumed":
        return Remedy(f"{calibrate} --out FILE", "measures the machine it runs on, for --machine-profile")
    if expected.rates == "few rates":
        return Remedy(calibrate, "measures this machine's operations, so that every part is predicted")
    return _remedy_of_part(step, config, plan, run, calibrate)


def _remedy_of_part(
    step: StepComparison, config: RunConfig, plan: ParallelPlan, run: Path, calibrate: str
) -> Remedy | None:
    """Return what may be done about the part that explains most, if all were predicted from measured rates."""
    part = step.main.name
    like = f"--config {shell_word(run / 'config.yaml')}"
    is_slower = step.added_seconds > 0
    found = None
    if part.startswith("computing"):
        found = Remedy(f"training-infra profile {shell_word(run)}", "tells the parts of computing apart")
    elif is_slower and part == DATA:
        workers = (config.data.num_workers or 0) + 2
        found = Remedy(f"training-infra train {like} --set data.num_workers={workers}", "loads data in more processes")
    elif part in {*TRANSFERS, COMMUNICATION}:
        links = "" if config.launch.device == "cuda" else f" --ranks {plan.world_size} --only link"
        found = Remedy(f"{calibrate}{links}", "measures the links between ranks again: one may be slow")
    elif is_slower and part in COMPUTING and plan.recompute != "none":
        command = f"training-infra estimate-memory {like} --set parallel.recompute=none"
        found = Remedy(command, "tells whether the step fits without recomputation")
    elif part in {*COMPUTING, OPTIMIZER}:
        found = Remedy(calibrate, "measures again what this machine takes, which may have changed")
    return found


@dataclass(frozen=True)
class SlowerStep:
    """A step's comparison, and what may be done about it."""

    step: StepComparison
    remedy: Remedy | None
    disturbance: str | None = None
    """What the timed steps say of other programs on the machine, in a clause: the reason that no command would mend."""

    @property
    def reason(self) -> str:
        """In a sentence, what other programs had to do with it; empty if nothing."""
        if self.disturbance is None or self.step.is_as_predicted:
            return ""
        return f"In the timed steps, {self.disturbance}."

    def sentences(self) -> list[str]:
        """Return the verdict, its reason, and what may be done."""
        told = [self.step.verdict(), self.reason]
        if self.remedy is not None:
            told.append(f"{self.remedy.command} {self.remedy.why}.")
        return list(filter(None, told))

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict and the command as a record."""
        command = None if self.remedy is None else self.remedy.command
        return {"main": self.step.as_dict()["main"], "verdict": self.step.verdict(), "command": command}


def explained_step(run: RunDirectory) -> SlowerStep | None:
    """Return the comparison of a run's step with its prediction; None without a prediction, or without a timed step.

    Raises:
        RunDirectoryError: if a record is damaged.
    """
    if not run.expected.exists():
        return None
    expected = read_typed(run.expected, ExpectedStep)
    config = load_config(run)
    plan = load_plan(run)
    timed = read_typed(run.benchmark, BenchmarkRecord) if run.benchmark.exists() else None
    step = compared_step(expected, read_profiles(run), timed, _mean_clocks(run), read_lanes(run, plan.pp))
    return None if step is None else explained(step, timed, remedy(step, expected, config, plan, run.path))


def explained(step: StepComparison, timed: BenchmarkRecord | None, found: Remedy | None) -> SlowerStep:
    """Return a comparison with what may be done about it: nothing, if others had the machine in the timed steps."""
    disturbance = None if timed is None else timed.disturbance
    return SlowerStep(step, found if disturbance is None else None, disturbance)


def _mean_clocks(run: RunDirectory) -> dict[str, float]:
    """Return the mean of ``CLOCKS`` over the training steps without the first, which includes start-up."""
    table = read_metrics(run)
    rows = table.slice(1) if len(table) > 1 else table
    if not len(rows):
        return {}
    return {name: fmean(rows[name].to_pylist()) for name in CLOCKS}
