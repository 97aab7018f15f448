"""The report of one run: a single HTML file that opens offline, made from the run directory alone."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from llama_core.chain.runs import resume_command
from llama_core.config.run import RANDOM_BASE, RunConfig
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.records.directory import RunDirectory
from llama_core.records.files import by_dotted_key
from llama_core.units import format_bytes, format_count, format_duration
from training_reports import figures
from training_reports.attempts import COLUMNS, attempts_table
from training_reports.breakdown import step_breakdown
from training_reports.by_rank import memory_by_rank
from training_reports.contents import Record, RunContents
from training_reports.downsampling import MOST_POINTS
from training_reports.files import end_of_culprits_log, run_files
from training_reports.goodput import goodput_table
from training_reports.layout import REFUSED, STATUS_STYLE, Card, Panel, write_page
from training_reports.timelines import pipeline_timelines

MEASURES = {
    "cpu": "the memory in use, as the C library counts it",
    "cuda": "the memory allocated by PyTorch on the GPU",
}
"""How the memory of a step is measured, by device."""


def write_report(run: RunDirectory) -> Path:
    """Write the report of ``run`` as it stands and return its path.

    A missing or damaged record is replaced by a sentence that says so.

    Raises:
        RunDirectoryError: if there is no such directory, or the page cannot be written.
    """
    if not run.path.is_dir():
        raise RunDirectoryError(f"{str(run.path)!r} is not a directory; give the directory of a run")
    contents = RunContents.read(run)
    outcome, settings = contents.outcome, by_dotted_key(contents.config or {})
    defaults = by_dotted_key(RunConfig().model_dump(mode="json"))
    return write_page(
        run.report,
        "run.html",
        name=run.name,
        source=run.path,
        status=_status(contents),
        style=STATUS_STYLE.get(outcome.status, "bad") if outcome else "idle",
        warning=_warning(contents),
        facts=_facts(contents),
        contents=contents,
        data=_data(contents),
        files=run_files(run),
        log_end=end_of_culprits_log(run, outcome),
        last_signs=_last_signs(contents),
        resume_command=resume_command(run, contents.setting("data", "source")),
        cards=[_held_out_loss(contents), _throughput(contents), _mfu(contents), _peak_memory(contents)],
        panels=_panels(contents),
        goodput=goodput_table(run),
        attempts=attempts_table(contents),
        attempt_columns=COLUMNS,
        settings=settings,
        changed=[key for key, value in settings.items() if value != defaults.get(key, value)],
        plan=by_dotted_key(contents.plan or {}),
    )


def _warning(contents: RunContents) -> str | None:
    """Return the warning at the top of the page, if there is one."""
    try:
        config = RunConfig.from_mapping(contents.config or {})
    except ConfigError:  # the configuration of another version
        return None
    return f"{RANDOM_BASE[0].upper()}{RANDOM_BASE[1:]}." if config.has_random_base else None


def _facts(contents: RunContents) -> dict[str, object]:
    """Return the facts below the run's name; None for an unknown value."""
    outcome, steps, plan = contents.outcome, contents.steps, contents.plan or {}
    done = outcome.step if outcome else _last(steps, "step")
    planned = _last(steps, "total_steps") or contents.setting("training", "steps")
    return {
        "Model": (contents.config or {}).get("model"),
        "Data": _source(contents),
        "Sequence length": _counted(contents.setting("training", "seq_len"), "token"),
        "Global batch": _counted(contents.setting("training", "batch_size"), "sequence"),
        "Microbatch": _counted(plan.get("microbatch_size"), "sequence"),
        "Gradient accumulation": _counted(plan.get("num_microbatches"), "microbatch", "es"),
        "Steps": done if planned is None or done is None else f"{done} of {planned}",
        "Tokens": None if steps.empty else format_count(_last(steps, "tokens")),
        "Time in steps": None if steps.empty else format_duration(steps["step_seconds"].sum()),
        "Measured on": contents.benchmark and contents.benchmark.device,
        "Commit": (contents.environment or {}).get("facts", {}).get("commit"),
    }


def _counted(number: int | None, one: str, ending: str = "s") -> str | None:
    return None if number is None else f"{number} {one}{'' if number == 1 else ending}"


def _status(contents: RunContents) -> str:
    outcome = contents.outcome
    if outcome is None:
        return "no outcome yet"
    return "refused" if outcome.status == REFUSED else outcome.status


def _source(contents: RunContents) -> str | None:
    """Return the name of the data and their size."""
    source, data = contents.setting("data", "source"), contents.data or {}
    if source is None:
        return None
    sizes = [
        f"{format_count(data[key])} {what}"
        for key, what in (("num_documents", "documents"), ("num_tokens", "tokens"))
        if key in data
    ]
    return ", ".join([Path(str(source)).name, *sizes])


def _data(contents: RunContents) -> list[tuple[str, object]]:
    """Return the rows of the table of the data; empty without statistics."""
    data = contents.data
    if data is None:
        return []
    counts = {
        "Documents": ("num_documents", "num_validation_documents"),
        "Tokens": ("num_tokens", "num_validation_tokens"),
    }
    rows: list[tuple[str, object]] = [("Source", contents.setting("data", "source"))]
    for what, (trained, held_out) in counts.items():
        if {trained, held_out} <= data.keys():
            rows.append((what, f"{data[trained]:,} to train on, {data[held_out]:,} held out"))
    if "bad_lines" in data:
        bad = data["bad_lines"]
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in bad.items())
        rows.append(("Lines left out", f"{sum(bad.values()):,}" + (f": {kinds}" if kinds else "")))
    rows += [("", example) for example in data.get("bad_line_examples", ())]
    return rows


def _last_signs(contents: RunContents) -> Iterator[str]:
    job, latest = contents.job, contents.heartbeat
    if job is not None:
        yield f"Job {job.job_id} ({job.launcher}) was submitted from {job.host}, {job.submitted_at}."
    if latest is not None:
        try:
            seen = datetime.fromtimestamp(latest.time, UTC).isoformat(timespec="seconds")
        except (OSError, OverflowError, ValueError):
            seen = "at an unknown time"
        yield f"Last sign of life: step {latest.step} with a loss of {latest.loss:.4f}, {seen}."


def _held_out_loss(contents: RunContents) -> Card:
    training, steps = contents.training, contents.steps
    if training is None:
        evaluated = steps[steps["eval_loss"].notna()]
        loss = _last(evaluated, "eval_loss")
        newest = "Not evaluated yet." if loss is None else f"Newest evaluation, after step {_last(evaluated, 'step')}."
        lines = [newest, contents.missing["training"]]
    elif training.eval_loss is None:
        loss, lines = None, ["No held-out documents were evaluated."]
    else:
        loss = training.eval_loss
        entropies = (("unigram", training.unigram_entropy), ("bigram", training.bigram_entropy))
        lines = [
            f"{_against(loss, entropy)} the byte-{name} entropy of {entropy:.3f}."
            for name, entropy in entropies
            if entropy is not None
        ] or ["No byte entropies to compare with: the tokenizer is not the byte-level one."]
        lines.append(f"Mean over {format_count(training.eval_tokens)} held-out tokens.")
    return Card("Held-out loss", None if loss is None else f"{loss:.4f}", "nats per token", lines)


def _against(loss: float, entropy: float) -> str:
    return f"{abs(loss - entropy):.3f} {'below' if loss < entropy else 'above'}"


def _throughput(contents: RunContents) -> Card:
    benchmark, rates = contents.benchmark, contents.steps["tokens_per_second"]
    value = None if rates.empty else f"{rates.median():,.0f}"
    if benchmark is not None:
        slow, fast = benchmark.throughput_quartiles
        value = f"{benchmark.tokens_per_second:,.0f} ± {(fast - slow) / 2:,.0f}"
        lines = [
            f"Median ± half the interquartile range of {len(benchmark.step_seconds)} timed steps,"
            f" after {benchmark.warmup_steps} warm-up steps.",
            f"{benchmark.median_seconds:.3f} s per step of {benchmark.tokens_per_step:,} tokens.",
        ]
    else:
        lines = [contents.missing["benchmark"]]
        if not rates.empty:
            lines.insert(0, f"Median of the {len(rates)} training steps.")
    return Card("Throughput", value, "tokens/s", lines)


def _mfu(contents: RunContents) -> Card:
    title, benchmark, steps = "Model FLOP/s utilisation", contents.benchmark, contents.steps
    if benchmark is None and steps.empty:
        return Card(title, None, "", [contents.missing["benchmark"]])
    mfu = steps["mfu"].median() if benchmark is None else benchmark.mfu
    if mfu is None or pd.isna(mfu):
        return Card(title, None, "", ["No MFU: the peak FLOP/s of this device is unknown."])
    source = "training" if benchmark is None else "timed"
    on_cpu = contents.setting("launch", "device") == "cpu"
    peak = "the rate at which this machine multiplies matrices" if on_cpu else "the peak FLOP/s"
    return Card(
        title,
        f"{mfu:.1%}",
        "MFU",
        [f"Share of {peak} in the {source} steps; counts attention in full, but no recomputation."],
    )


def _peak_memory(contents: RunContents) -> Card:
    measured = contents.measured_bytes
    lines = [
        contents.missing[field]
        if profile is None
        else f"{how.capitalize()} {format_bytes(profile['peak_bytes'])}{_error(profile, measured)}."
        for how, field, profile in contents.predictions_alive
    ]
    if measured is None:
        return Card("Peak memory", None, "", [contents.missing["training"], *lines])
    value, unit = format_bytes(measured).split(" ")
    if contents.training and contents.training.memory_reserved_bytes:
        taken = format_bytes(contents.training.memory_reserved_bytes)
        whose = "The whole process took" if contents.training.memory_process_bytes else "CUDA's allocator took"
        lines.append(f"{whose} {taken}.")
    return Card("Peak memory", value, f"{unit} measured", lines)


def _error(profile: Record, measured: int | None) -> str:
    """Return the relative error of a prediction, such as ``' (+4.5 %)'``."""
    return f" ({100 * (profile['peak_bytes'] / measured - 1):+.1f} %)" if measured else ""


def _panels(contents: RunContents) -> list[Panel]:
    first, *others = _panels_by_step(contents)
    of_a_step = [*memory_by_rank(contents), *step_breakdown(contents), *pipeline_timelines(contents)]
    return [first, _comparison_panel(contents), *of_a_step, *others]


def _panels_by_step(contents: RunContents) -> list[Panel]:
    steps, training, benchmark = contents.steps, contents.training, contents.benchmark
    if steps.empty:
        return [Panel("Training by step", None, "", [contents.missing["steps"]], wide=True)]
    entropies = (training.unigram_entropy, training.bigram_entropy) if training else (None, None)
    first, last = steps.iloc[0], steps.iloc[-1]
    span = f"Steps {first['step']} to {last['step']}"
    shares = _time_shares(steps)
    return [
        Panel(
            "Loss",
            figures.loss(steps, *entropies),
            f"{span}: training loss from {first['loss']:.4f} to {last['loss']:.4f} nats per token.",
            [*_loss_notes(steps, *entropies), *_drawn(steps)],
            wide=True,
        ),
        Panel(
            "Throughput",
            figures.throughput(steps, benchmark),
            f"{span}: median {steps['tokens_per_second'].median():,.0f} tokens/s.",
            ["All devices together." if benchmark else contents.missing["benchmark"]],
        ),
        Panel(
            "Where the time of a step goes",
            figures.step_time(steps),
            f"{span}. {shares}",
            [shares],
        ),
        Panel(
            "Learning rate and gradient norm",
            figures.learning_rate_and_gradient_norm(steps),
            f"{span}: learning rate up to {steps['learning_rate'].max():.3g}, "
            f"median gradient norm {steps['grad_norm'].median():.4g}.",
            ["The gradient norm is global, before clipping."],
        ),
        Panel(
            "Memory by step",
            figures.memory_by_step(steps),
            f"{span}: up to {format_bytes(steps['memory_peak_bytes'].max())}.",
            [f"Memory is {_measure(contents)}, including what was held before the model was built."],
        ),
        *_routing_panel(steps),
    ]


def _routing_panel(steps: pd.DataFrame) -> Iterator[Panel]:
    """Yield a panel if the run has experts."""
    if steps["expert_load"].isna().all():
        return
    last = steps.iloc[-1]
    yield Panel(
        "Routing to experts",
        figures.routing(steps),
        f"At the last step the busiest expert got {last['expert_load']:.3g} times the tokens of an average one; the "
        f"routers' entropy was {last['router_entropy']:.3g} nats.",
        [
            "The load is the largest of any layer; 1 means that all experts get the same.",
            "The entropy is a mean over layers and tokens. The logarithm of the number of experts means no preference; "
            "0 means that every token has one expert.",
        ],
        wide=True,
    )


def _loss_notes(steps: pd.DataFrame, unigram: float | None, bigram: float | None) -> Iterator[str]:
    if unigram is not None and bigram is not None:
        yield (
            "The byte-unigram entropy is the loss of a model that knows only the frequency of each byte; the"
            " byte-bigram entropy, of one that also knows the previous byte."
        )
    skipped = int(steps["skipped"].sum())
    if skipped:
        yield f"Updates skipped because the loss or the gradient was not finite: {skipped}."


def _drawn(steps: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence on the steps that the figures leave out, if they do."""
    if len(steps) > MOST_POINTS:
        yield (
            f"The figures by step draw at most {MOST_POINTS} of {len(steps):,} steps: the lowest and the highest of "
            "every few, so that no spike is lost."
        )


def _time_shares(steps: pd.DataFrame) -> str:
    whole = steps["step_seconds"].sum()
    *parts, _ = figures.measured_parts(steps).items()
    shares = (f"{name} {seconds.sum() / whole:.1%}" for name, seconds in parts)
    return f"Share of the time of all steps: {', '.join(shares)}."


def _comparison_panel(contents: RunContents) -> Panel:
    measured, predictions = contents.measured_bytes, list(contents.predictions_alive)
    peaks = [
        f"{how} {format_bytes(profile['peak_bytes'])} in the {profile['peak_phase']} phase{_error(profile, measured)}"
        for how, _, profile in predictions
        if profile is not None
    ]
    notes = [contents.missing[field] for _, field, profile in predictions if profile is None]
    if measured is None:
        notes.append(contents.missing["training"])
    else:
        peaks.append(f"measured {format_bytes(measured)}")
        notes.append(f"The measurement is the peak of {_measure(contents)}, less its value before the model was built.")
    outside = {name: size for name, size in contents.estimated_beside.items() if name in figures.BESIDE_COLORS}
    beside = {"estimated": outside, "rehearsed": outside, "measured": contents.measured_beside}
    if contents.training and contents.training.memory_process_bytes:
        notes.append(
            f"The whole process took {format_bytes(contents.training.memory_reserved_bytes)}, including its libraries "
            "and the freed memory that it keeps."
        )
    figure, summary = None, ", ".join(peaks)
    if peaks:
        (_, _, estimated), (_, _, rehearsed) = predictions
        figure = figures.memory_comparison(estimated, rehearsed, measured, beside)
        notes.insert(0, f"Peaks: {summary}.")
    return Panel("Peak memory: estimated, rehearsed, measured", figure, summary, notes + _fit(contents), wide=True)


def _fit(contents: RunContents) -> list[str]:
    estimate = contents.estimate or {}
    if not {"fits", "usable_bytes", "device", "notes"} <= estimate.keys():
        return []
    # an estimate that leaves room on the device but does not fit is too large for the host
    verdict = "fits" if estimate["fits"] or estimate.get("headroom_bytes", -1) >= 0 else "does not fit"
    usable = f"{format_bytes(estimate['usable_bytes'])} usable of {estimate['device']}"
    notes = [f"Note on the estimate: {note}." for note in estimate["notes"]]
    return [f"The estimate {verdict} the {usable}.", *_host(estimate.get("host")), *notes]


def _host(host: Record | None) -> list[str]:
    """Return a sentence about the host memory of a node, if the estimate has it."""
    if not host:
        return []
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in host["parts"].items())
    ranks = "the rank" if host["num_ranks"] == 1 else f"each of {host['num_ranks']} ranks"
    return [f"Host memory of a node: about {format_bytes(host['node_bytes'])}; {ranks} takes {parts}."]


def _measure(contents: RunContents) -> str:
    either = f"{MEASURES['cuda']}, or on the CPU {MEASURES['cpu']}"
    return MEASURES.get(str(contents.setting("launch", "device")), either)


def _last(rows: pd.DataFrame, column: str) -> Any:
    return None if rows.empty else rows[column].iloc[-1]
