"""The report of one run: a single HTML file that opens offline, made from the run directory alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from llama_core.chain.batch import batch_line, global_batch
from llama_core.config.parameter_counts import counts_in_words
from llama_core.config.run import RANDOM_BASE, RunConfig
from llama_core.config.settings import DATALOADER
from llama_core.errors import RunDirectoryError
from llama_core.objectives.next_token import NEXT_TOKEN
from llama_core.records.directory import RunDirectory
from llama_core.records.files import by_dotted_key
from llama_core.runs.continuing import resume_command
from llama_core.units import counted, format_bytes, format_count, format_duration
from training_reports.attempts import COLUMNS, attempts_table
from training_reports.breakdown import step_breakdown
from training_reports.by_rank import memory_by_rank
from training_reports.by_step import panels_of_learning, panels_of_running, weights_of_named
from training_reports.contents import RunContents
from training_reports.evaluations import evaluation_panels
from training_reports.events import COLUMNS as EVENT_COLUMNS
from training_reports.events import events_table
from training_reports.files import NO_OUTPUTS, RankOutputs, end_of_culprits_log, run_files
from training_reports.goodput import goodput_table, recoveries_table
from training_reports.layout import REFUSED, STATUS_STYLE, Card, Panel, ReportPage, moment
from training_reports.peak_memory import memory_comparison_panel, relative_error
from training_reports.progress import job_sentence, progress_of
from training_reports.slow_ranks import slow_ranks
from training_reports.timelines import pipeline_timelines


def write_report(run: RunDirectory, *, job: str = "") -> Path:
    """Write the report of ``run`` as it stands and return its path.

    A missing or damaged record is replaced by a sentence that says so.

    Args:
        run: the run.
        job: what its job is doing, by ``JobHandle.state``; empty if it has none that has not ended.

    Raises:
        RunDirectoryError: if there is no such directory, or the page cannot be written.
    """
    return page_of(run, job=job).write(run.report)


def page_of(run: RunDirectory, *, job: str = "", outputs: RankOutputs = NO_OUTPUTS) -> ReportPage:
    """Return the report of ``run`` as it stands.

    Args:
        run: the run.
        job: as for ``write_report``.
        outputs: what its ranks have printed, if the page is to show it.

    Raises:
        RunDirectoryError: if there is no such directory.
    """
    if not run.path.is_dir():
        raise RunDirectoryError(f"{str(run.path)!r} is not a directory; give the directory of a run")
    contents = RunContents.read(run)
    outcome = contents.outcome
    settings = by_dotted_key(contents.config or {})
    defaults = by_dotted_key(RunConfig().model_dump(mode="json"))
    return ReportPage(
        "run.html",
        name=run.name,
        source=run.path,
        status=_status(contents, job),
        style=STATUS_STYLE.get(outcome.status, "bad") if outcome and not job else "idle",
        warning=_warning(contents),
        facts=_facts(contents),
        contents=contents,
        data=_data(contents),
        files=run_files(run, contents.setting("training", "keep_best_by") or ""),
        log_end=end_of_culprits_log(run, outcome),
        last_signs=_last_signs(contents),
        resume_command=resume_command(run, contents.setting("data", "source")),
        progress=progress_of(run, contents) if job else None,
        outputs=outputs,
        events=events_table(run, contents),
        event_columns=EVENT_COLUMNS,
        cards=[_held_out_loss(contents), _throughput(contents), _mfu(contents), _peak_memory(contents)],
        panels=_panels(contents),
        goodput=goodput_table(contents.goodput),
        recoveries=recoveries_table(contents.recoveries),
        attempts=attempts_table(contents),
        attempt_columns=COLUMNS,
        settings=settings,
        changed=[key for key, value in settings.items() if value != defaults.get(key, value)],
        plan=by_dotted_key(contents.plan or {}),
    )


def _warning(contents: RunContents) -> str | None:
    """Return the warning at the top of the page, if there is one."""
    config = contents.run_config
    if config is None or not config.has_random_base:
        return None
    return f"{RANDOM_BASE[0].upper()}{RANDOM_BASE[1:]}."


def _facts(contents: RunContents) -> dict[str, object]:
    """Return the facts below the run's name; None for an unknown value."""
    outcome = contents.outcome
    steps = contents.steps
    plan = contents.plan or {}
    done = outcome.step if outcome else _last(steps, "step")
    planned = _last(steps, "total_steps") or contents.setting("training", "steps")
    return {
        "Model": _model(contents),
        "Parameters": _parameters(contents),
        "Tokenizer": _tokenizer(contents),
        "Data": _source(contents),
        "Sequence length": _counted(contents.setting("training", "seq_len"), "token"),
        "Global batch": _global_batch(contents),
        "Microbatch": _counted(plan.get("microbatch_size"), "sequence"),
        "Gradient accumulation": _counted(plan.get("num_microbatches"), "microbatch", "es"),
        "Steps": done if planned is None or done is None else f"{done} of {planned}",
        "Tokens": None if steps.empty else format_count(_last(steps, "tokens")),
        "Time in steps": None if steps.empty else format_duration(steps["step_seconds"].sum()),
        "Measured on": _device(contents),
        "Commit": (contents.environment or {}).get("facts", {}).get("commit"),
    }


def _model(contents: RunContents) -> str | None:
    """Return the model, with what makes it another one than its name says."""
    if contents.run_config is None:
        return (contents.config or {}).get("model")
    return contents.run_config.model_in_words


def _parameters(contents: RunContents) -> str | None:
    """Return how many parameters the model has, and how many of them are trained if not all are."""
    if contents.run_config is None:
        return None
    spec = contents.run_config.spec
    whole = format_count(spec.num_parameters)
    return f"{whole} ({counts_in_words(spec)})" if spec.lora else whole


def _tokenizer(contents: RunContents) -> str | None:
    """Return the name of the tokenizer; None for batches that are tokens already."""
    tokenizer = contents.setting("data", "tokenizer")
    if tokenizer is None or contents.setting("data", "source") == DATALOADER:
        return None
    return Path(str(tokenizer)).name


def _global_batch(contents: RunContents) -> str | None:
    if contents.run_config is None:
        return _counted(contents.setting("training", "batch_size"), "sequence")
    return global_batch(contents.run_config, contents.data or {})


def _counted(number: int | None, one: str, ending: str = "s") -> str | None:
    return None if number is None else counted(number, one, ending)


def _device(contents: RunContents) -> str | None:
    """Return the device of the timed steps, or else, as while a run trains, what its ranks have."""
    if contents.benchmark is not None:
        return contents.benchmark.device
    ranks = (contents.environment or {}).get("ranks", ())
    if not ranks and contents.steps.empty:
        return "nothing yet"
    return ", ".join(sorted({rank["device"] for rank in ranks})) or None


def _status(contents: RunContents, job: str) -> str:
    outcome = contents.outcome
    if job:
        latest = contents.heartbeat
        return f"{job}, no step yet" if latest is None else f"{job}, step {latest.step} of {latest.total_steps}"
    if outcome is None:
        return "no outcome yet"
    return "refused" if outcome.status == REFUSED else outcome.status


def _source(contents: RunContents) -> str | None:
    """Return the name of the data and their size."""
    source = contents.setting("data", "source")
    mixture = contents.setting("data", "sources")
    data = contents.data
    if source is None and not mixture:
        return None
    name = f"mixture of {', '.join(sorted(mixture))}" if mixture else Path(str(source)).name
    if data is None:
        return name
    return f"{name}, {format_count(data['num_documents'])} {data['unit']}, {format_count(data['num_tokens'])} tokens"


def _data(contents: RunContents) -> list[tuple[str, object]]:
    """Return the rows of the table of the data; empty without statistics."""
    data = contents.data
    if data is None:
        return []
    counts = {
        str(data["unit"]).capitalize(): ("num_documents", "num_validation_documents"),
        "Tokens": ("num_tokens", "num_validation_tokens"),
    }
    mixture = data["sources"]
    when = " at first" if contents.stages else ""
    rows: list[tuple[str, object]] = [
        (
            f"Source {source['name']}",
            f"{100 * source['share']:.3g} % of the sequences{when}, {source['num_tokens']:,} tokens",
        )
        for source in mixture
    ]
    rows += [(f"Stage {stage.number}", str(stage)) for stage in contents.stages]
    if not mixture:
        rows.append(("Source", contents.setting("data", "source")))
    for what, (trained, held_out) in counts.items():
        rows.append((what, f"{data[trained]:,} to train on, {data[held_out]:,} held out"))
    if contents.run_config is not None:
        rows.append(("Batch", batch_line(contents.run_config, data)))
    bad = data["bad_lines"]
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in bad.items())
    rows.append(("Lines left out", f"{sum(bad.values()):,}" + (f": {kinds}" if kinds else "")))
    rows += [("", example) for example in data["bad_line_examples"]]
    return rows


def _last_signs(contents: RunContents) -> Iterator[str]:
    job = contents.job
    latest = contents.heartbeat
    if job is not None:
        yield job_sentence(job)
    if latest is not None:
        yield f"Last sign of life: step {latest.step} with a loss of {latest.loss:.4f}, {moment(latest.time)}."


def _no_entropies(contents: RunContents) -> str:
    why = "these are a mixture" if contents.setting("data", "sources") else "the tokenizer is not the byte-level one"
    return f"No byte entropies to compare with: {why}."


def _held_out_loss(contents: RunContents) -> Card:
    training = contents.training
    steps = contents.steps
    if training is None:
        evaluated = steps[steps["eval_loss"].notna()]
        loss = _last(evaluated, "eval_loss")
        newest = "Not evaluated yet." if loss is None else f"Newest evaluation, after step {_last(evaluated, 'step')}."
        lines = [newest, contents.missing["training"]]
    elif training.eval_loss is None:
        loss = None
        lines = ["No held-out documents were evaluated."]
    else:
        loss = training.eval_loss
        entropies = (("unigram", training.unigram_entropy), ("bigram", training.bigram_entropy))
        lines = [
            f"{_against(loss, entropy)} the byte-{name} entropy of {entropy:.4f}."
            for name, entropy in entropies
            if entropy is not None
        ]
        if not lines and training.loss_unit == NEXT_TOKEN.unit:
            lines.append(_no_entropies(contents))
        lines.append(f"Mean over {format_count(training.eval_tokens)} held-out {training.counted}.")
        lines += weights_of_named(training)
        accuracy = training.measured.get("eval_reward_accuracy")
        if accuracy is not None:
            right = "the chosen answer has the higher reward" if training.counted == "pairs" else "the reward is right"
            lines.append(f"In {accuracy:.1%} of them {right}.")
    if training is not None and training.ended_early:
        lines.append(f"Ended early: {training.ended_early}.")
    return Card("Held-out loss", None if loss is None else f"{loss:.4f}", contents.loss_unit, lines)


def _against(loss: float, entropy: float) -> str:
    return f"{abs(loss - entropy):.4f} {'below' if loss < entropy else 'above'}"


def _throughput(contents: RunContents) -> Card:
    benchmark = contents.benchmark
    rates = contents.steps["tokens_per_second"]
    value = None if rates.empty else f"{rates.median():,.0f}"
    if benchmark is not None and benchmark.disturbance and not rates.empty:
        lines = [
            f"Median of the {len(rates)} training steps.",
            f"{benchmark.tokens_per_second:,.0f} in the timed steps, while {benchmark.disturbance}.",
        ]
    elif benchmark is not None:
        slow, fast = benchmark.throughput_quartiles
        value = f"{benchmark.tokens_per_second:,.0f} ± {(fast - slow) / 2:,.0f}"
        lines = [
            f"Median ± half the interquartile range of {len(benchmark.step_seconds)} timed steps,"
            f" after {benchmark.warmup_steps} warm-up steps.",
            f"{benchmark.median_seconds:.3f} s per step of {benchmark.tokens_per_step:,} tokens.",
            *([f"Meanwhile, {benchmark.disturbance}."] if benchmark.disturbance else []),
        ]
    else:
        lines = [contents.missing["benchmark"]]
        if not rates.empty:
            lines.insert(0, f"Median of the {len(rates)} training steps.")
    return Card("Throughput", value, "tokens/s", lines)


def _mfu(contents: RunContents) -> Card:
    title = "Model FLOP/s utilisation"
    benchmark = contents.benchmark
    steps = contents.steps
    if benchmark is None and steps.empty:
        return Card(title, None, "", [contents.missing["benchmark"]])
    if benchmark is not None and benchmark.disturbance and not steps.empty:
        benchmark = None  # as for the throughput
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
        [
            f"Share of {peak} in the {source} steps; counts attention in full, but no recomputation.",
        ],
    )


def _peak_memory(contents: RunContents) -> Card:
    measured = contents.measured_bytes
    lines = [
        contents.missing[field]
        if profile is None
        else f"{how.capitalize()} {format_bytes(profile['peak_bytes'])}{relative_error(profile, measured)}."
        for how, field, profile in contents.predictions_alive
    ]
    if measured is None:
        newest = contents.heartbeat
        value, unit = format_bytes(newest.memory_added_bytes).split(" ") if newest else (None, "")
        return Card("Peak memory", value, f"{unit} so far", [contents.missing["training"], *lines])
    value, unit = format_bytes(measured).split(" ")
    if contents.training and contents.training.memory_reserved_bytes:
        taken = format_bytes(contents.training.memory_reserved_bytes)
        whose = "The whole process took" if contents.training.memory_process_bytes else "CUDA's allocator took"
        lines.append(f"{whose} {taken}.")
    return Card("Peak memory", value, f"{unit} measured", lines)


def _panels(contents: RunContents) -> list[Panel]:
    of_a_step = [*memory_by_rank(contents), *step_breakdown(contents), *pipeline_timelines(contents)]
    evaluated = evaluation_panels(contents.scores)
    return [
        *panels_of_learning(contents),
        *evaluated,
        memory_comparison_panel(contents),
        *of_a_step,
        *slow_ranks(contents),
        *panels_of_running(contents),
    ]


def _last(rows: pd.DataFrame, column: str) -> Any:
    return None if rows.empty else rows[column].iloc[-1]
