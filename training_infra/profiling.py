"""The ``profile`` command: some steps of a run under torch's profiler."""

from pathlib import Path

from llama_core.chain.chain import run_chain
from llama_core.chain.console import say
from llama_core.chain.runs import load_config
from llama_core.config.run import RunConfig
from llama_core.records.directory import RunDirectory
from llama_core.records.profiles import read_profiles
from training_infra.local import local_steps


def configured_like(run: RunDirectory) -> Path:
    """Return the file with the configuration of ``run``.

    Raises:
        RunDirectoryError: if the directory holds no run.
    """
    load_config(run)
    return run.config


def profile_from_terminal(config: RunConfig, run_dir: Path | None, *, quiet: bool) -> RunDirectory:
    """Time some steps of a new run under the profiler, print where their time went, and return the run.

    Raises:
        TrainingInfraError: if a step of the chain fails.
    """
    with say.silenced(quiet):
        run = run_chain(local_steps(config, run_dir, resume=False, only="benchmark"))
        for profile in read_profiles(run):
            for kind, seconds, share in profile.rows():
                say("profile", f"rank {profile.rank}  {seconds:>9}  {share:>6}  {kind}")
        say("profile", f"every operator: {run.trace}/rank-*.json.gz, for https://ui.perfetto.dev")
        if any(run.trace.glob("*.pickle")):
            say("profile", f"CUDA's memory: {run.trace}/rank-*.pickle, for https://pytorch.org/memory_viz")
    return run
