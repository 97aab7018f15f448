"""The model card of an export, as the Hugging Face Hub shows it: what the records of the run say about the weights.

Nothing in it is made up. What no record says, such as the licence, is asked for or left out, and a part whose record is
missing says so. Paths of the machine that trained are left out too: they mean nothing elsewhere.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from llama_core.config.hardware import gpu_spec
from llama_core.config.parameter_counts import counts_in_words
from llama_core.config.run import RunConfig
from llama_core.config.settings import SAMPLE
from llama_core.config.strict_yaml import write_yaml
from llama_core.data.statistics import SourceStatistics
from llama_core.errors import CheckpointError, RunDirectoryError
from llama_core.hub import HubName
from llama_core.records.checkpoints import checkpoint_step, recorded_counters
from llama_core.records.evaluations import Score, read_scores
from llama_core.records.files import DAMAGE, checked_record, read_json, read_typed
from llama_core.records.goodput import read_goodput
from llama_core.records.hub import HubRecord, HubSource
from llama_core.records.measurements import TrainingSummary
from llama_core.records.metrics import read_metrics
from llama_core.redaction import one_line
from llama_core.runs.export_source import ExportSource
from llama_core.runs.loading import load_plan
from llama_core.units import counted, format_count, format_duration

CARD = "README.md"
"""File of a model card; its first part, between lines of three dashes, is for machines."""
_INITIAL_WEIGHTS = "training.init_from"
_ALWAYS_TOLD = (
    "training.objective",
    "training.learning_rate",
    "training.lr_schedule",
    "training.warmup_steps",
    "training.optimizer",
    "training.weight_decay",
    "training.max_grad_norm",
    "training.precision",
    "training.seed",
)
"""The settings of the recipe that are told even if they have their defaults."""
_TOLD_ELSEWHERE = frozenset({"training.steps", "training.epochs", "training.minutes"})
_MARKUP = re.compile(r"[\\`*<>\[\]|]")
_SECONDS_PER_HOUR = 3600
_WATTS_PER_KILOWATT = 1000
_NOT_WORK = frozenset({"queue", "stopped"})
"""The parts of a run's time in which it held no device."""

T = TypeVar("T")


def model_card(export: ExportSource, licence: str | None) -> str:
    """Return the card, in Markdown below the Hub's metadata in YAML.

    Args:
        export: the weights.
        licence: theirs, by the Hub's name for it; None to leave it open.
    """
    hub = _record(lambda: read_typed(export.run.hub, HubRecord)) or HubRecord(())
    sections = {
        "Model": _about_model(export, hub.sources),
        "Training data": _about_data(export, hub.sources),
        "Training": _about_training(export),
        "Results": _about_results(export),
        "Compute": _about_compute(export),
    }
    lines = [
        "---",
        write_yaml(_metadata(export, hub.sources, licence)).rstrip(),
        "---",
        "",
        f"# {_text(export.run.name)}",
    ]
    for title, paragraphs in sections.items():
        lines += ["", f"## {title}", *(line for paragraph in paragraphs for line in ("", paragraph))]
    lines += ["", "Written by `training-infra export-hf` from the records of the run."]
    return "\n".join(lines) + "\n"


def _metadata(export: ExportSource, sources: Sequence[HubSource], licence: str | None) -> dict[str, Any]:
    known: dict[str, Any] = {}
    if licence is not None:
        known["license"] = licence
    known["library_name"] = "peft" if export.is_adapter else "transformers"
    known["pipeline_tag"] = "text-generation"
    if bases := _repositories(sources, _INITIAL_WEIGHTS):
        known["base_model"] = bases[-1]  # of adapters that went on as adapters, the base is the last
        known["base_model_relation"] = "adapter" if export.is_adapter else "finetune"
    if data_sets := _data_sets(sources):
        known["datasets"] = data_sets
    return known


def _about_model(export: ExportSource, sources: Sequence[HubSource]) -> Iterator[str]:
    spec = export.config.spec
    steps = [f"{checkpoint_step(path):,}" for path in export.checkpoints]
    of = f"the mean of the checkpoints of steps {', '.join(steps)}" if export.others else f"step {steps[0]}"
    rows = {
        "Type": spec.model_type.name,
        "Parameters": f"{format_count(spec.num_parameters)}, {counts_in_words(spec)}",
        "Layers": f"{spec.num_layers} of width {spec.hidden_size:,}",
        "Vocabulary": f"{spec.vocab_size:,} tokens",
        "Context": f"{spec.max_context:,} tokens",
        "Weights": f"{of}, in {export.dtype}",
    }
    if export.config.training.init_from is not None:
        named = _repositories(sources, _INITIAL_WEIGHTS)
        rows["Began with"] = ", ".join(named) or "other weights, which no record of the run names"
    yield _table(("", ""), rows.items())


def _about_data(export: ExportSource, sources: Sequence[HubSource]) -> Iterator[str]:
    data = export.config.data
    record = _record(lambda: read_json(export.run.data)) or {}
    mixed = _record(lambda: checked_record(record["sources"], tuple[SourceStatistics, ...], export.run.data))
    if mixed:
        rows = [(_told_source(sources, one.name), f"{100 * one.share:.3g} %", _epochs(one)) for one in mixed]
        yield _table(("Source", "Share", "Epochs"), rows)
        yield from (f"Stage: {_text(stage)}." for stage in record.get("stages", ()))
    elif data.sources:
        yield f"{counted(len(data.sources), 'source')}: {_text(', '.join(sorted(data.sources)))}."
    elif data.source == SAMPLE:
        yield "The source code of Python's standard library."
    else:
        named = _data_sets(sources)
        yield f"Documents of {', '.join(named)}." if named else "One source, which no record of the run names."
    if summary := record.get("summary"):
        if template := record.get("chat_template"):  # perhaps a path
            summary = summary.replace(template, Path(template).name)
        yield f"{_text(summary)}."


def _epochs(source: SourceStatistics) -> str:
    return "unknown" if source.epochs is None else f"{source.epochs:.3g}"


def _told_source(sources: Sequence[HubSource], name: str) -> str:
    """Return the name of a source of a mixture, with its repository if it has one."""
    found = _repositories(sources, f"data.sources.{name}.path")
    return f"{name} ({', '.join(found)})" if found else name


def _about_training(export: ExportSource) -> Iterator[str]:
    config = export.config
    given = config.model_dump(mode="json")
    rows: dict[str, Any] = {"strategy": config.strategy}
    if (tokens := _tokens(export)) is not None:
        rows["tokens"] = f"{tokens:,} until step {export.step:,}"
    rows["sequences of a step"] = f"{config.first_batch_size:,} of {config.first_seq_len:,} tokens"
    defaults = RunConfig().model_dump(mode="json")
    for known in RunConfig.known_keys():
        if known.name in _TOLD_ELSEWHERE:
            continue
        value = _value(given, known.name)
        is_recipe = known.key.changes == "learning" and value != _value(defaults, known.name)
        if value is not None and (is_recipe or known.name in _ALWAYS_TOLD):
            rows[known.name.removeprefix("training.")] = value
    if config.spec.lora is not None:
        rows |= {f"lora.{name}": value for name, value in given["lora"].items() if value not in (None, [], ())}
    yield _table(("Setting", "Value"), rows.items())


def _tokens(export: ExportSource) -> int | None:
    """Return the tokens that the newest checkpoint was trained on; None if it does not say."""
    with suppress(CheckpointError):
        tokens = recorded_counters(export.newest).get("tokens")
        return tokens if isinstance(tokens, int) else None
    return None


def _about_results(export: ExportSource) -> Iterator[str]:
    if export.others:
        yield "The mean of these checkpoints was not evaluated by the run that made them."
        return
    rows = list(_losses(export))
    if rows:
        yield _table(("Loss", "Value"), rows)
    scores = _record(lambda: read_scores(export.run)) or []
    of_step = [score for score in scores if score.step == export.step]
    if of_step:
        yield _table(("Task", "Metric", "Value", "Examples"), map(_score, of_step))
    if any("±" in line for row in (*rows, *map(_score, of_step)) for line in row):
        yield "± is two standard errors: how far chance alone moves the value, either way."
    if not rows and not of_step:
        yield "The run has measured nothing at this step."


def _losses(export: ExportSource) -> Iterator[tuple[str, str]]:
    """Yield the losses at the exported step, each with its name."""
    summary = _record(lambda: read_typed(export.run.training, TrainingSummary))
    unit = "nats/token" if summary is None else summary.loss_unit
    if summary is not None and summary.steps == export.step:
        yield "training", f"{summary.train_loss:.4f} {unit}"
        held_out = {"held-out": summary.eval_rows}
        held_out |= {f"held-out, {name}": rows for name, rows in summary.named_eval_rows.items()}
        for name, rows in held_out.items():
            if rows is not None:
                spread = "" if rows.spread is None else f" ± {rows.spread:.4f}"
                yield name, f"{rows.mean:.4f}{spread} {unit}, over {rows.count:,} {summary.counted}"
        return
    metrics = _record(lambda: read_metrics(export.run))
    found = [] if metrics is None else metrics.select(["step", "loss", "eval_loss"]).to_pylist()
    for row in found:
        if row["step"] == export.step:
            yield "training", f"{row['loss']:.4f} {unit}"
            if row["eval_loss"] is not None:
                yield "held-out", f"{row['eval_loss']:.4f} {unit}"


def _score(score: Score) -> tuple[str, str, str, str]:
    asked = f" ({score.settings})" if score.settings else ""
    spread = "" if score.spread is None else f" ± {score.spread:.4f}"
    return f"{score.task}{asked}", score.metric, f"{score.value:.4f}{spread}", f"{score.examples:,}"


def _about_compute(export: ExportSource) -> Iterator[str]:
    plan = _record(lambda: load_plan(export.run))
    goodput = _record(lambda: read_goodput(export.run))
    if plan is None or goodput is None:
        yield "No record of the run says how long it took, or on how many devices."
        return
    launch = export.config.launch
    of_gpu = launch.device == "cuda"
    device = gpu_spec(launch.gpu_type) if of_gpu and launch.gpu_type else None
    kind = device.label if device else "GPU" if of_gpu else "CPU"
    held = sum(seconds for part, seconds in goodput.total.items() if part not in _NOT_WORK)
    hours = held * plan.world_size / _SECONDS_PER_HOUR
    rows = {
        "Devices": f"{plan.world_size:,} x {kind}" if of_gpu else f"{counted(plan.world_size, 'rank')} on CPUs",
        "Division": plan.summary(),
        "Time with devices": f"{format_duration(held)} of {format_duration(goodput.seconds)}",
        "Device hours": f"{hours:,.3g}",
    }
    if device is not None and device.watts:
        rows["Energy, estimated"] = (
            f"{hours * device.watts / _WATTS_PER_KILOWATT:,.3g} kWh at most: {device.watts:,} W of its data sheet for "
            "each device, without hosts, network and cooling"
        )
    yield _table(("", ""), rows.items())
    packages = (_record(lambda: read_json(export.run.environment)) or {}).get("facts")
    if isinstance(packages, Mapping):
        versions = [str(packages[name]) for name in ("python", "torch") if name in packages]
        if versions:
            yield f"Software: {', '.join(versions)}."


def _repositories(sources: Sequence[HubSource], setting: str) -> list[str]:
    """Return the repositories that a setting took, without their revisions and paths."""
    names = (HubName.parse(one.name, "dataset") for one in sources if one.setting == setting)
    return list(dict.fromkeys(name.repository for name in names if name is not None))


def _data_sets(sources: Sequence[HubSource]) -> list[str]:
    settings = [one.setting for one in sources if one.setting.startswith(("data.source", "data.validation"))]
    return list(dict.fromkeys(name for setting in settings for name in _repositories(sources, setting)))


def _record(read: Callable[[], T]) -> T | None:
    """Return a record; None if it is missing or damaged, which keeps its part out of the card."""
    try:
        return read()
    except (RunDirectoryError, OSError, *DAMAGE):
        return None


def _value(settings: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    found: Any = settings
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    match value:
        case bool():
            value = "yes" if value else "no"
        case list():
            value = ", ".join(map(str, value))
    return _text(str(value))


def _text(text: str) -> str:
    """Return a text as Markdown that shows it as it is: ``<s>`` would strike out what follows."""
    return _MARKUP.sub(r"\\\g<0>", one_line(text))
