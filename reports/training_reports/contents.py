"""The records of a run directory for a report, and a sentence for each record that is missing."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, TypeVar

import pandas as pd
import pyarrow as pa

from llama_core.config.run import RunConfig
from llama_core.config.section import LARGEST
from llama_core.config.stages import TrainingStage
from llama_core.config.strict_yaml import MAX_BYTES_OF_YAML, parse_yaml
from llama_core.errors import ConfigError, RunDirectoryError, TrainingInfraError
from llama_core.launch.recoveries import Recovery, read_recoveries
from llama_core.objectives.registry import DEFAULT_OBJECTIVE, OBJECTIVES
from llama_core.planning.memory.host import FREED, HostMemory
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.plan import ParallelPlan
from llama_core.records.activity import Activity, read_activities
from llama_core.records.data_changes import DataChange, read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.evaluations import Score, read_scores
from llama_core.records.files import DAMAGE, checked_record, read_file, read_json, read_typed
from llama_core.records.goodput import COLUMNS_OF_TIMES, Goodput, read_goodput
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.measurements import BenchmarkRecord, ExpectedStep, Samples, StepRecord, TrainingSummary
from llama_core.records.metrics import read_metrics
from llama_core.records.preflight import PreflightRecord, read_preflights
from llama_core.records.profiles import ProfileRecord, read_profiles
from llama_core.records.rollbacks import Rollback, read_rollbacks
from llama_core.records.settings_changes import SettingsChange, read_settings_changes
from llama_core.records.stragglers import Straggler, read_stragglers
from llama_core.records.timelines import LaneRecord, read_lanes
from llama_core.redaction import shell_word
from llama_core.runs.step_parts import CLOCKS, SlowerStep, compared_step, explained, remedy

MEASURES = {
    "cpu": "the memory in use, as the C library counts it",
    "cuda": "the memory allocated by PyTorch on the GPU",
}
"""How the memory of a step is measured, by device."""

JsonRecord = dict[str, Any]
T = TypeVar("T")


def losses_by_name(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the named held-out losses: a row for each evaluated step, with its index, and a column for each name."""
    losses = steps["eval_losses"]
    evaluated = losses[losses.map(bool).astype(bool)]
    return pd.DataFrame(list(map(dict, evaluated)), index=evaluated.index)


@dataclass(frozen=True)
class RunContents:
    """A run's records; a record that cannot be read is None, with the reason in ``missing``."""

    steps: pd.DataFrame
    """One row for each ``StepRecord``; empty if there are none."""
    config: JsonRecord | None
    plan: JsonRecord | None
    choice: JsonRecord | None
    environment: JsonRecord | None
    estimate: JsonRecord | None
    dry_run: JsonRecord | None
    data: JsonRecord | None
    job: JobRecord | None
    heartbeat: StepRecord | None
    training: TrainingSummary | None
    benchmark: BenchmarkRecord | None
    outcome: Outcome | None
    expected: ExpectedStep | None
    samples: Samples | None
    missing: Mapping[str, str]
    """A sentence for each field above that has no record, by field name."""
    path: Path
    profiles: Sequence[ProfileRecord]
    """One for each profiled rank; empty if there are none, or one is damaged."""
    lanes: Sequence[LaneRecord]
    """One for each rank of the pipeline; empty if there is no pipeline, or one is missing or damaged."""
    data_changes: Sequence[DataChange]
    """One for each time that the run went on with other data; empty if there are none, or their record is damaged."""
    settings_changes: Sequence[SettingsChange]
    """The same for other settings."""
    preflights: Sequence[PreflightRecord]
    """The check of the machines before each attempt; empty if there was none, or their record is damaged."""
    stragglers: Sequence[Straggler]
    """The ranks that fell behind while it trained; empty if there were none, or their record is damaged."""
    scores: Sequence[Score]
    """What its checkpoints have scored; empty if none was evaluated, or a file is damaged."""
    rollbacks: Sequence[Rollback]
    """Its returns to a checkpoint; empty if there were none, or their record is damaged."""
    activities: Sequence[Activity]
    """What its first rank has done besides steps; the same."""

    @classmethod
    def read(cls, run: RunDirectory) -> Self:
        """Read all that ``run`` has written so far. A damaged file counts as missing."""
        missing: dict[str, str] = {}

        def load(field: str, what: str, path: Path, parse: Callable[[Path], T]) -> T | None:
            if not path.exists():
                missing[field] = f"No {what} yet: {path.name} has not been written."
                return None
            try:
                return parse(path)
            except _DAMAGE as error:
                missing[field] = f"No {what} to show: {path.name} is damaged ({' '.join(str(error).split())})."
                return None

        steps = load("steps", "metrics", run.metrics, lambda _: read_metrics(run).to_pandas())
        if steps is None:
            steps = pd.DataFrame(columns=[field.name for field in fields(StepRecord)])
        elif steps.empty:
            missing["steps"] = "No metrics yet: no step was completed."
        config = load("config", "configuration", run.config, _read_yaml)
        benchmark = load("benchmark", "benchmark", run.benchmark, lambda path: read_typed(path, BenchmarkRecord))
        if benchmark is None and not run.benchmark.exists() and _times_none(config):
            missing["benchmark"] = "No benchmark: benchmark.steps=0."
        plan = load("plan", "plan", run.plan, partial(_read_as, kind=ParallelPlan))
        return cls(
            steps=steps,
            config=config,
            plan=plan,
            choice=load("choice", "search for a plan", run.choice, partial(_read_as, kind=_Choice)),
            environment=load(
                "environment", "check of the environment", run.environment, partial(_read_as, kind=_Environment)
            ),
            estimate=load("estimate", "memory estimate", run.estimate, _read_profile),
            dry_run=load("dry_run", "dry run", run.dry_run, _read_profile),
            data=load("data", "statistics of the data", run.data, _read_data),
            job=load("job", "job", run.job, lambda path: read_typed(path, JobRecord)),
            heartbeat=load(
                "heartbeat", "heartbeat", run.heartbeat, lambda path: read_typed(path, StepRecord, run.path)
            ),
            training=load("training", "training summary", run.training, lambda path: read_typed(path, TrainingSummary)),
            benchmark=benchmark,
            outcome=load("outcome", "outcome", run.outcome, lambda path: read_typed(path, Outcome)),
            expected=load("expected", "expected time", run.expected, lambda path: read_typed(path, ExpectedStep)),
            samples=load("samples", "sample", run.samples, lambda path: read_typed(path, Samples)),
            missing=missing,
            path=run.path,
            profiles=_readable(lambda: read_profiles(run)),
            lanes=_readable(lambda: read_lanes(run, int((plan or {}).get("pp", 1)))),
            data_changes=_readable(lambda: read_data_changes(run).changes),
            settings_changes=_readable(lambda: read_settings_changes(run)),
            preflights=_readable(lambda: read_preflights(run)),
            stragglers=_readable(lambda: read_stragglers(run)),
            scores=_readable(lambda: read_scores(run)),
            rollbacks=_readable(lambda: read_rollbacks(run)),
            activities=_readable(lambda: read_activities(run)),
        )

    @cached_property
    def explained_step(self) -> SlowerStep | None:
        """The parts of a step, predicted and measured; None without a prediction or a measurement."""
        if self.expected is None or self.run_config is None or self.parallel_plan is None:
            return None
        rows = self.steps.iloc[1:] if len(self.steps) > 1 else self.steps
        clocks = {} if rows.empty else {name: float(rows[name].mean()) for name in CLOCKS}
        step = compared_step(self.expected, self.profiles, self.benchmark, clocks, self.lanes)
        if step is None:
            return None
        found = remedy(step, self.expected, self.run_config, self.parallel_plan, self.path)
        return explained(step, self.benchmark, found)

    @cached_property
    def goodput(self) -> Goodput | None:
        """Where its time went; None if it has taken no step, or a record is damaged."""
        if "steps" in self.missing:
            return None
        try:
            return read_goodput(RunDirectory(self.path), self._times)
        except _DAMAGE:
            return None

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """What passed before each attempt but the first; empty if a record is damaged."""
        try:
            return [] if self.goodput is None else read_recoveries(RunDirectory(self.path), self._times)
        except _DAMAGE:
            return []

    @property
    def _times(self) -> pa.Table:
        """When each step ended and how long it took; the metrics of a long run are files that are not read again."""
        return pa.Table.from_pandas(self.steps, columns=COLUMNS_OF_TIMES, preserve_index=False)

    @property
    def profile_command(self) -> str:
        """The command that profiles some steps of a new run with the same configuration."""
        return f"training-infra profile {shell_word(self.path)}"

    @property
    def loss_unit(self) -> str:
        """The unit of the loss in words; empty for an objective that another version knew."""
        name = str(self.setting("training", "objective") or DEFAULT_OBJECTIVE)
        objective = OBJECTIVES.find(name)
        return "" if objective is None else objective.unit_in_words

    def steps_of_part(self, part: str) -> pd.DataFrame:
        """Return ``steps`` with the held-out loss of a named part in place of that of all; of all if it is empty."""
        if not part:
            return self.steps
        losses = losses_by_name(self.steps)
        of_part = losses[part] if part in losses else pd.Series(dtype=float)
        return self.steps.assign(eval_loss=of_part.reindex(self.steps.index))

    @cached_property
    def parallel_plan(self) -> ParallelPlan | None:
        """The plan; None if it is unknown or not valid."""
        try:
            return None if self.plan is None else ParallelPlan.from_dict(self.plan)
        except (TrainingInfraError, LookupError, TypeError, ValueError):  # the plan of another version
            return None

    @cached_property
    def run_config(self) -> RunConfig | None:
        """The configuration; None if it is unknown or not valid."""
        try:
            return None if self.config is None else RunConfig.from_mapping(self.config)
        except TrainingInfraError:  # the configuration of another version, or of a model that cannot be had
            return None

    @property
    def stages(self) -> Sequence[TrainingStage]:
        """The stages of the data after the first; empty if there are none, or the configuration is not valid."""
        return () if self.run_config is None else self.run_config.stages

    def stage_peaks(self, field: str) -> list[int]:
        """Return the predicted peak of a rank of each pipeline stage, as ``predictions_alive``; empty if unknown.

        Args:
            field: ``estimate`` or ``dry_run``.
        """
        estimate = self.estimate or {}
        record = getattr(self, field) or {}
        peaks = [rank["peak_bytes"] for rank in record.get("ranks", ())]
        estimated = [MemoryProfile.from_dict(rank) for rank in estimate.get("ranks", ())]
        host = estimate.get("host")
        if not host or host["on_cuda"] or len(estimated) != len(peaks):
            return peaks
        memory = HostMemory.from_dict(host)
        return [peak + memory.alive_bytes(rank) - rank.peak_bytes for peak, rank in zip(peaks, estimated, strict=True)]

    @property
    def measured_bytes(self) -> int | None:
        """Peak of the memory alive in training, less that alive before the model was built."""
        return None if self.training is None else self.training.memory_added_bytes

    @property
    def measured_outside(self) -> dict[str, int]:
        """Bytes taken from the device, or by the process, beside ``measured_bytes``, by part."""
        if self.training is None or not self.training.memory_reserved_bytes:
            return {}
        process = self.training.memory_process_bytes
        alive = self.training.memory_peak_bytes if not process else process + (self.measured_bytes or 0)
        parts = {"process": process, FREED: max(0, self.training.memory_reserved_bytes - alive)}
        return {name: size for name, size in parts.items() if size}

    @property
    def estimated_outside(self) -> dict[str, int]:
        """Estimated bytes that a rank on the CPU holds beside its tensors, by part; empty on CUDA."""
        host = (self.estimate or {}).get("host") or {"on_cuda": True}
        return {} if host["on_cuda"] else {name: size for name, size in host["parts"].items() if name != "tensors"}

    @property
    def predictions_alive(self) -> Iterator[tuple[str, str, JsonRecord | None]]:
        """``predictions`` of the memory alive; on the CPU, with copies that are neither freed nor the process's own."""
        copies = {name: size for name, size in self.estimated_outside.items() if name not in {"process", FREED}}
        for how, field, profile in self.predictions:
            yield how, field, profile and _with(profile, copies)

    @property
    def predictions(self) -> Iterator[tuple[str, str, JsonRecord | None]]:
        """The predictions of the peak memory: how each was made, its field, and its profile."""
        yield "estimated", "estimate", self.estimate
        yield "rehearsed", "dry_run", self.dry_run

    @property
    def measure_of_memory(self) -> str:
        """How the memory of a step was measured, in words."""
        either = f"{MEASURES['cuda']}, or on the CPU {MEASURES['cpu']}"
        return MEASURES.get(str(self.setting("launch", "device")), either)

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the configuration, or None if it is unknown."""
        settings = (self.config or {}).get(section)
        return settings.get(key) if isinstance(settings, dict) else None

    def number(self, section: str, key: str) -> float | None:
        """Return a number of the configuration, or None if there is none."""
        value = self.setting(section, key)
        return value if isinstance(value, int | float) and abs(value) < LARGEST else None


_DAMAGE = (RunDirectoryError, ConfigError, OSError, pa.ArrowException, *DAMAGE)
"""Errors of reading a file that was cut short, edited, or written by another version."""


def _with(profile: JsonRecord, others: Mapping[str, int]) -> JsonRecord:
    """Return a profile that holds ``others`` at its peak too."""
    peak = profile["phases"][profile["peak_phase"]] | others
    phases = profile["phases"] | {profile["peak_phase"]: peak}
    return profile | {"phases": phases, "peak_bytes": sum(peak.values())}


def _times_none(config: JsonRecord | None) -> bool:
    section = (config or {}).get("benchmark")
    return isinstance(section, dict) and section.get("steps") == 0


def _read_yaml(path: Path) -> JsonRecord:
    return dict(parse_yaml(read_file(path, path.parent, MAX_BYTES_OF_YAML).decode(), path.name))


@dataclass
class _Rank:
    device: str


@dataclass
class _Environment:
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ranks: tuple[_Rank, ...] = ()


@dataclass
class _Step:
    step_seconds: float


@dataclass
class _Choice:
    step: _Step | None = None


@dataclass
class _DataSource:
    name: str
    share: float
    num_tokens: int


@dataclass
class _Data:
    summary: str
    notes: tuple[str, ...]
    num_documents: int
    num_tokens: int
    num_sequences: int
    unit: str
    num_validation_documents: int
    num_validation_tokens: int
    bad_lines: Mapping[str, int]
    bad_line_examples: tuple[str, ...]
    sources: tuple[_DataSource, ...]


@dataclass
class _Host:
    on_cuda: bool
    num_ranks: int
    node_bytes: int
    parts: Mapping[str, int]


@dataclass
class _Profile:
    phases: Mapping[str, Mapping[str, int]]
    peak_phase: str
    peak_bytes: int
    device: str = ""
    fits: bool = True
    usable_bytes: int = 0
    headroom_bytes: int = 0
    notes: tuple[str, ...] = ()
    host: _Host | None = None


def _read_as(path: Path, kind: Any) -> JsonRecord:
    """Return a record whose keys in ``kind`` have the types that a page needs."""
    record = read_json(path)
    checked_record(record, kind, path)
    return record


def _read_data(path: Path) -> JsonRecord:
    record = _read_as(path, _Data)
    return record | {"sentences": [f"{sentence}." for sentence in (record["summary"], *record["notes"])]}


def _read_profile(path: Path) -> JsonRecord:
    record = _read_as(path, _Profile)
    if sum(dict(record["phases"][record["peak_phase"]]).values()) != record["peak_bytes"]:
        raise ValueError("the categories of its peak phase do not add up to its peak")
    for rank in record.get("ranks", ()):
        MemoryProfile.from_dict(rank)
        int(rank["peak_bytes"])
    return record


def _readable(read: Callable[[], Sequence[T]]) -> Sequence[T]:
    try:
        return read()
    except _DAMAGE:
        return []
