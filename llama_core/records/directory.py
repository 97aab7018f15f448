"""The layout of a run directory. Every step of the chain gets this path and nothing else."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from llama_core.errors import RunDirectoryError
from llama_core.redaction import shell_word

CHECKPOINTS = "checkpoints"
SWEEP_RECORD = "sweep.json"
"""The record in a sweep's directory."""
SWEEP_RUNS = "runs"
"""The folder in a sweep's directory that holds the runs of its elements."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths inside one run's directory."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name, which is the directory's."""
        return self.path.name

    @property
    def sweep(self) -> str:
        """The name of the sweep that has the run as an element; empty if none has."""
        folder = self.path.absolute().parent
        is_of_sweep = folder.name == SWEEP_RUNS and (folder.parent / SWEEP_RECORD).is_file()
        return folder.parent.name if is_of_sweep else ""

    @property
    def config(self) -> Path:
        """The resolved ``RunConfig`` as YAML."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """The ``ParallelPlan``."""
        return self.path / "plan.json"

    @property
    def choice(self) -> Path:
        """Why the planner chose this plan, and the alternatives; missing if the plan follows from rules."""
        return self.path / "choice.json"

    @property
    def generation_config(self) -> Path:
        """How the weights that the run began with generate, as in Hugging Face; missing if nothing says so."""
        return self.path / "generation_config.json"

    @property
    def environment(self) -> Path:
        """The result of ``validate_environment``."""
        return self.path / "environment.json"

    @property
    def estimate(self) -> Path:
        """Bytes per category, computed by arithmetic."""
        return self.path / "estimate.json"

    @property
    def dry_run(self) -> Path:
        """Bytes per category and FLOPs, counted on fake tensors."""
        return self.path / "dry_run.json"

    @property
    def data(self) -> Path:
        """Counts of the tokenised data: documents, conversations, tokens in the loss, skipped lines."""
        return self.path / "data.json"

    @property
    def hub(self) -> Path:
        """The ``HubRecord`` of what the run has from the Hugging Face Hub; missing if nothing."""
        return self.path / "hub.json"

    @property
    def job(self) -> Path:
        """The ``JobRecord`` of the current or last job; written before anyone waits for the job."""
        return self.path / "job.json"

    @property
    def flow_run(self) -> Path:
        """The Prefect flow runs that have followed the run, newest last."""
        return self.path / "flow_run.json"

    @property
    def training(self) -> Path:
        """The ``TrainingSummary``: held-out loss, tokens, entropies of the corpus."""
        return self.path / "training.json"

    @property
    def benchmark(self) -> Path:
        """The ``BenchmarkRecord``: median and spread of timed steps."""
        return self.path / "benchmark.json"

    @property
    def history(self) -> Path:
        """How the timed steps of a benchmark compare with earlier ones."""
        return self.path / "history.json"

    @property
    def outcome(self) -> Path:
        """The ``Outcome``: why the job ended."""
        return self.path / "outcome.json"

    @property
    def metrics(self) -> Path:
        """Folder of Parquet parts of ``StepRecord``, for anything that reads a folder of Parquet.

        Such readers leave out names that begin with a dot or an underscore; every file that is no part has one.
        """
        return self.path / "metrics"

    @property
    def metrics_tail(self) -> Path:
        """The steps that are in no Parquet part yet, a line of JSON each."""
        return self.path / "metrics" / "_tail.jsonl"

    @property
    def heartbeat(self) -> Path:
        """The newest ``StepRecord``, rewritten every step for monitoring."""
        return self.path / "heartbeat.json"

    @property
    def activity(self) -> Path:
        """What the first rank does while it completes no step."""
        return self.path / "logs" / "activity.json"

    @property
    def activities(self) -> Path:
        """All that the first rank has done besides steps, a line of JSON for each ``Activity``."""
        return self.path / "logs" / "activities.jsonl"

    @property
    def preflights(self) -> Path:
        """The ``PreflightRecord`` of each attempt, a line of JSON each; missing with ``launch.preflight=off``."""
        return self.path / "logs" / "preflight.jsonl"

    @property
    def stragglers(self) -> Path:
        """The ranks that fell behind while the run trained, a line of JSON for each ``Straggler``."""
        return self.path / "logs" / "stragglers.jsonl"

    @property
    def repeated_steps(self) -> Path:
        """The steps missing from the metrics because they were done again or left out, a line of JSON each."""
        return self.path / "logs" / "repeated-steps.jsonl"

    @property
    def checkpoint_interval(self) -> Path:
        """The last ``ChosenInterval``, with its reason; missing if the interval is configured."""
        return self.path / "checkpoint_interval.json"

    @property
    def length(self) -> Path:
        """The ``ChosenLength``, with its reason; missing if the number of steps follows from the settings."""
        return self.path / "length.json"

    @property
    def samples(self) -> Path:
        """What the model wrote after training; missing without ``tracking.prompts``."""
        return self.path / "samples.json"

    @property
    def expected(self) -> Path:
        """How long a step should take on this machine's CPU; missing for other runs."""
        return self.path / "expected.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of ``step-00000100`` directories and the ``latest`` pointer."""
        return self.path / CHECKPOINTS

    @property
    def logs(self) -> Path:
        """Folder of each rank's output."""
        return self.path / "logs"

    @property
    def reserve(self) -> Path:
        """A placeholder, deleted to make room for the outcome if the disk is full."""
        return self.logs / "reserve"

    def tracker(self, name: str) -> Path:
        """Folder of a tracker's files, such as TensorBoard's events, written by rank 0."""
        return self.logs / name

    @property
    def evaluations(self) -> Path:
        """Folder of what the checkpoints have scored: a Parquet file for each task and checkpoint."""
        return self.path / "evaluations"

    @property
    def trace(self) -> Path:
        """Folder of profiles: torch's traces, CUDA's memory, and a ``ProfileRecord`` for each profiled rank."""
        return self.path / "trace"

    def timeline(self, pp_rank: int) -> Path:
        """The ``LaneRecord`` of a pipeline position."""
        return self.trace / f"pipeline-{pp_rank:05d}.json"

    def temporary(self, host: str) -> Path:
        """Folder for a machine's temporary files if the machine's own has no room."""
        return self.logs / "tmp" / host

    @property
    def base(self) -> Path:
        """The ``BaseRecord`` of the weights over which the run trains adapters; missing if it trains none."""
        return self.path / "base.json"

    @property
    def rollbacks(self) -> Path:
        """The ``Rollback`` records of the run; missing if there were none."""
        return self.path / "rollbacks.json"

    @property
    def reference(self) -> Path:
        """The ``ReferenceRecord`` of the run; missing unless its objective reads a reference."""
        return self.path / "reference.json"

    @property
    def reference_values(self) -> Path:
        """What the reference makes of all rows: float32, source after source, as ``ReferenceRecord.shapes`` says."""
        return self.path / "reference.bin"

    @property
    def data_changes(self) -> Path:
        """The ``DataChanges`` of the run; missing if it has not been resumed with other data."""
        return self.path / "data_changes.json"

    @property
    def settings_changes(self) -> Path:
        """The ``SettingsChange`` records of the run; missing if it has not been resumed with other settings."""
        return self.path / "settings_changes.json"

    @property
    def mirror(self) -> Path:
        """The ``MirrorRecord`` of the run; missing without ``training.checkpoint_mirror``."""
        return self.path / "mirror.json"

    @property
    def mirrored(self) -> Path:
        """Folder of the counters and manifests of the checkpoints on the mirror."""
        return self.path / "mirrored"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def create(self) -> None:
        """Make the directory.

        Raises:
            RunDirectoryError: if it cannot be made or written.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.metrics.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise RunDirectoryError(
                f"cannot write run directory {str(self.path)!r}: {error.strerror or error}; choose another --run-dir"
            ) from None


def command_to_resume(run: RunDirectory, *, from_python: bool = False) -> str:
    """Return the command that continues a run.

    Args:
        run: the run.
        from_python: whether it trains on a caller's dataloader, and so is continued from Python.
    """
    if from_python:
        return f"launch_training(..., run_dir={str(run.path)!r}, resume=True)"
    return f"training-infra train --run-dir {shell_word(run.path)} --resume"
