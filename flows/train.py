"""The ``train`` flow: one run from its configuration to its report."""

from pathlib import Path

from prefect import flow

from llama_core.config.run import RunConfig
from tasks import benchmark, preflight, report
from tasks import train as training


@flow(name="train", validate_parameters=True)
def train(config: RunConfig, run_dir: Path | None = None, resume: bool = False) -> Path:
    """Validate, estimate, rehearse, train, benchmark and report one run.

    Args:
        config: everything that defines the run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.
    """
    run = preflight.prepare_run(config, run_dir, resume=resume)
    preflight.validate_environment(run)
    preflight.estimate_memory(run)
    preflight.dry_run(run)
    try:
        training.submit(run)
        training.train(run)
        benchmark.benchmark(run)
    finally:
        path = report.write_report(run)
    return path
