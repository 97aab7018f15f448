"""The tables that the command line prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from llama_core.config.parameter_counts import counts_in_words
from llama_core.planning.memory.profile import STATES, Category, MemoryProfile, Phase
from llama_core.planning.time.cost import Cost
from llama_core.units import GIB, counted, format_bytes, format_count, format_duration
from training_infra.lines import print_line

if TYPE_CHECKING:
    from llama_core.chain.planned import PlannedRun
    from llama_core.machine.validate import EnvironmentReport
    from llama_core.planning.memory.verdict import MemoryEstimate
    from llama_core.planning.search.least_memory import Least
    from llama_core.planning.search.model_variants import ModelVariant
    from llama_core.runs.diagnosis import Diagnosis
    from llama_core.sweep.comparison import Comparison
    from training_reports.run_comparison import RunComparison

_WIDEST_COLUMN = 40


def print_plan(planned: "PlannedRun") -> None:
    """Print the model, the filled-in defaults, and the plan with its notes."""
    config = planned.config
    plan = planned.plan
    num_parameters = format_count(config.spec.num_parameters)
    batch = f"batch of {counted(config.batch_size, 'sequence')}"
    batch += "" if config.training.batch_size else " (the default)"
    largest = ", as in the largest of its stages" if config.stages else ""
    print_line(
        f"{config.model_in_words}: {num_parameters} parameters, sequence length {config.seq_len}, {batch}{largest}"
    )
    if config.spec.lora:
        print_line(f"weights: {counts_in_words(config.spec)}")
    for choice in planned.choices:
        print_line(f"default: {choice}")
    print_line(f"plan: {plan.summary()}")
    for note in plan.notes:
        print_line(f"note: {note}")


def print_profile(profile: MemoryProfile) -> None:
    """Print bytes by category (rows) and phase (columns), for one rank."""
    phases = [phase for phase in get_args(Phase) if phase in profile.phases]
    print_line()
    print_line(f"{'bytes per rank':<16}" + "".join(f"{phase:>14}" for phase in phases))
    for category in get_args(Category):
        sizes = [format_bytes(profile.phases[phase].get(category, 0)) for phase in phases]
        print_line(f"{category:<16}" + "".join(f"{size:>14}" for size in sizes))
    totals = [format_bytes(sum(profile.phases[phase].values())) for phase in phases]
    print_line(f"{'total':<16}" + "".join(f"{total:>14}" for total in totals))
    print_line()


def print_host(estimate: "MemoryEstimate") -> None:
    """Print the host memory of a node in one line."""
    if estimate.host is not None:
        print_line(f"host:     {estimate.host.summary(estimate.host_profile)}")


def print_environment(report: "EnvironmentReport") -> None:
    """Print a row for each fact, with its problem and the remedy below it, then the problems of the request."""
    for name, fact in report.facts.items():
        problem = report.problems.get(name)
        level = "error" if problem in report.errors else "warning" if problem else "ok"
        print_line(f"{level:<9} {name:<18} {fact}")
        if problem:
            print_line(f"{'':<9} {'':<18} {problem}")
    for level, problems in (("warning", report.warnings), ("error", report.errors)):
        for problem in problems:
            if problem not in report.problems.values():
                print_line(f"{level:<9} {problem}")


def print_ranks(planned: "PlannedRun", ranks: Sequence[MemoryProfile]) -> None:
    """Print a row for each rank of a pipeline, with its layers and its peak bytes; nothing without a pipeline."""
    plan = planned.plan
    if plan.pp == 1:
        return
    schedule = plan.layout
    stages = plan.stage_layers(planned.config.spec)
    peaks = [profile.peak_bytes for profile in ranks]
    marks = {min(peaks): "least", max(peaks): "most"}
    ranges = [f"{stage.start}-{stage.stop - 1}" for stage in stages]
    layers = [" ".join(ranges[stage] for stage in schedule.stages_of(rank)) for rank in range(plan.pp)]
    width = max(18, *map(len, layers)) + 2
    print_line(f"{'pipeline rank':<16}{'layers':<{width}}{'states':>14}{'activations':>14}{'rest':>14}{'peak':>14}")
    for rank, profile in enumerate(ranks):
        states = sum(profile.peak.get(category, 0) for category in STATES)
        activations = profile.peak.get("activations", 0)
        columns = (states, activations, profile.peak_bytes - states - activations, profile.peak_bytes)
        sizes = "".join(f"{format_bytes(size):>14}" for size in columns)
        print_line(f"{rank:<16}{layers[rank]:<{width}}{sizes}  {marks.get(profile.peak_bytes, '')}".rstrip())
    print_line()


def print_choice(planned: "PlannedRun") -> None:
    """Print the reasons for the plan, if it was searched for."""
    if planned.choice is not None:
        for reason in planned.choice.lines()[1:]:  # without the plan, which is above the tables
            print_line(reason)
        print_line()


def print_rates(planned: "PlannedRun") -> None:
    """Print where the times are from, and why a profile is not used."""
    known = planned.device
    if known.spec is not None:
        print_line(f"rates: {known.source}")
    if known.note:
        print_line(f"note: {known.note}")


def print_cost(planned: "PlannedRun", cost: "Cost | None") -> None:
    """Print how long the run takes and what it costs, or what a billion tokens cost if its length is unknown."""
    if cost is not None:
        print_line(f"cost: {cost.summary()} [--price]")
    elif (scale := planned.cost_for_scale) is not None:
        print_line(f"cost: {scale.summary()}; add --tokens or --data for a run's cost [--price]")


def print_comparison(comparison: "Comparison") -> None:
    """Print a line for each element: measured or predicted, with its figures, or the reason why it has none."""
    keys = [key.rpartition(".")[2] for key in comparison.rows[0].settings]
    given = [["-" if value is None else str(value) for value in row.settings.values()] for row in comparison.rows]
    widths = [max(map(len, column)) + 2 for column in zip(keys, *given, strict=True)]
    heading, *settings = (
        "".join(value.ljust(width) for value, width in zip(line, widths, strict=True)) for line in (keys, *given)
    )
    print_line(f"{heading}{'how':<11}{'tokens/s':>12}{'step':>10}{'MFU':>8}{'memory':>13}  plan, or why not")
    for row, values in zip(comparison.rows, settings, strict=True):
        rate = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        step = "" if row.step_seconds is None else _short_duration(row.step_seconds)
        mfu = "" if row.mfu is None else f"{row.mfu:.1%}"
        memory = "" if row.memory_bytes is None else format_bytes(row.memory_bytes)
        told = f"{row.status}: {row.reason}"
        if row.status == "finished":
            told = f"{row.plan} on {row.device}" + (f" ({row.reason})" if row.reason else "")
        print_line(f"{values}{row.how:<11}{rate:>12}{step:>10}{mfu:>8}{memory:>13}  {told}")
    for line in comparison.rates():
        print_line(line)


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    """Print a line for each fact, and mark the problems."""
    width = max(len(fact.subject) for fact in diagnosis.facts)
    for fact in diagnosis.facts:
        print_line(f"{'!' if fact.is_problem else ' '} {fact.subject:<{width}}  {fact.text}")
    num_problems = sum(fact.is_problem for fact in diagnosis.facts)
    if num_problems:
        print_line(f"{num_problems} {'problem' if num_problems == 1 else 'problems'}, marked with !")
    else:
        print_line("nothing is wrong")


def print_runs(comparison: "RunComparison") -> None:
    """Print where the runs' settings differ, and then their results; the best of each row has a star."""
    names = [run.name for run in comparison.runs]
    print_line("settings that differ:" if comparison.differences else "settings that differ: none")
    if comparison.differences:
        _print_columns(names, comparison.differences)
    results = []
    for measure in comparison.measures:
        stars = ["*" if place == measure.winner else "" for place in range(len(names))]
        results.append((measure.name, [cell + star for cell, star in zip(measure.cells(), stars, strict=True)]))
    print_line()
    print_line("results (change against the first run; * the best):")
    _print_columns(names, results)
    if comparison.step_rows:
        print_line()
        print_line("step by part, measured (predicted):")
        _print_columns(names, comparison.step_rows)
    for sentence in comparison.step_sentences:
        print_line(f"step: {sentence}")
    for note in comparison.notes:
        print_line(f"note: {note}")


def _print_columns(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print a table; a value that is too wide for its column is cut in the middle."""
    widths = [
        min(_WIDEST_COLUMN, max(map(len, (name, *(values[place] for _, values in rows)))))
        for place, name in enumerate(names)
    ]
    first = max(len(key) for key, _ in rows)
    for key, values in [("", names), *rows]:
        cells = "  ".join(f"{_cut(value, width):<{width}}" for value, width in zip(values, widths, strict=True))
        print_line(f"{key:<{first}}  {cells}".rstrip())


def _cut(text: str, width: int) -> str:
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[: width - 1 - half]}…{text[-half:]}"


def _short_duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)


def print_variants(variants: "Sequence[ModelVariant]", device: str, *, markdown: bool) -> None:
    """Print a line for each model variant; with ``markdown``, the table of docs/models.md."""
    if markdown:
        full, lora, qlora = (f"{what}: {device} x GiB used" for what in ("full", "LoRA", "QLoRA"))
        print_line(f"| model | parameters | context | vocabulary | {full} | {lora} | {qlora} |")
        print_line("|---|---|---|---|---|---|---|")
        for one in variants:
            spec = one.spec
            print_line(
                f"| `{spec.name}` | {format_count(spec.num_parameters)} | {spec.max_context:,} | {spec.vocab_size:,} | "
                f"{_least(one.full)} | {_least(one.lora)} | {_least(one.qlora)} |"
            )
        return
    print_line(
        f"{'model':<22}{'parameters':>18}{'layers':>8}{'hidden':>8}{'heads':>7}{'kv':>5}{'vocab':>9}{'context':>12}"
        f"{'full':>16}{'LoRA':>16}{'QLoRA':>16}   fewest {device} x GiB used"
    )
    for one in variants:
        spec = one.spec
        print_line(
            f"{spec.name:<22}{spec.num_parameters:>18,}{spec.num_layers:>8}{spec.hidden_size:>8}{spec.num_heads:>7}"
            f"{spec.num_kv_heads:>5}{spec.vocab_size:>9,}{spec.max_context:>12,}"
            f"{_least(one.full):>16}{_least(one.lora):>16}{_least(one.qlora):>16}"
        )


def _least(least: "Least | None") -> str:
    return "none found" if least is None else f"{least.gpus} x {least.peak_bytes / GIB:.1f}"
