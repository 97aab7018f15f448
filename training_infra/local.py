"""The steps of runs and sweeps, run by this process."""

from functools import partial
from pathlib import Path

from llama_core.chain import steps
from llama_core.chain.chain import Steps
from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.records.job import Part
from llama_core.sweep import steps as sweeps
from llama_core.sweep.chain import SweepSteps
from llama_core.sweep.judgement import remember_sweep
from training_reports import page, sweep


def local_steps(
    config: RunConfig,
    run_dir: Path | None,
    *,
    resume: bool,
    allow_data_change: bool = False,
    only: Part | None = None,
) -> Steps:
    """Return the steps of a run, to be run by this process.

    Args:
        config: what to run.
        run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``.
        resume: continue the run in ``run_dir``, or the newest unfinished one of this configuration.
        allow_data_change: let the run in ``run_dir`` go on with other sources, weights or stages of its mixture.
        only: run this part alone: training or the timed steps.

    Raises:
        ConfigError: if ``only`` is the benchmark, but the configuration times no steps.
    """
    if only == "benchmark":
        steps.refuse_untimed(config)
    return Steps(
        prepare=lambda: prepare_run(config, run_dir, resume=resume, allow_data_change=allow_data_change),
        validate=partial(steps.validate, saves=only != "benchmark"),
        estimate=steps.read_estimate,
        rehearse=steps.rehearse,
        submit=partial(steps.submit, only=only),
        train=steps.follow,
        evaluate=steps.evaluate,
        benchmark=steps.timed_steps,
        report=page.write_report,
    )


def local_sweep_steps() -> SweepSteps:
    """Return the steps of a sweep, to be run by this process."""
    return SweepSteps(
        validate=sweeps.validate,
        rehearse=sweeps.rehearse,
        submit=sweeps.submit,
        follow=sweeps.follow,
        remember=remember_sweep,
        report=sweep.write_report,
    )
