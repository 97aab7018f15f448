"""Compare published training throughputs with the estimated time of a step, row by row.

``python -m benchmarks.cost_ledger`` reads ``benchmarks/data/published_memory.csv`` and ``published_throughput.csv``.
Their rows give tokens per second, or an MFU from which they follow. Each row is read as a job; a row that no plan
expresses is listed with the reason. The efficiencies of each framework are fitted to its rows, and rows are predicted
under those fitted without them. The tables go into ``docs/cost.md``.
"""

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from benchmarks.pages import rewrite
from benchmarks.published.fitting import Measured, fit, left_out
from benchmarks.published.rows import Reader, Row
from llama_core.config.hardware import DeviceSpec, gpu_spec
from llama_core.errors import RequestError
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.step import JobTime, time_of, work_of
from llama_core.planning.frameworks.traits import Efficiencies
from llama_core.planning.time.step_time import flops_per_token
from llama_core.units import GB

DATA = Path(__file__).parent / "data"
ROWS = (DATA / "published_memory.csv", DATA / "published_throughput.csv")
PAGE = Path(__file__).parents[1] / "docs" / "cost.md"
FAR = 0.15
"""Error above which a row counts as far off."""

_DEVICES = {
    "H100 96GB": "h100_96gb",
    "H100 80GB": "h100",
    "H200": "h200",
    "A100 80GB": "a100",
    "B200": "b200",
    "GB200": "gb200",
}
_SPLIT_AMONG = 8
"""Devices of a node, which share the link that a row gives."""
_SAID = ("none", "selective", "full")
"""What a row may say that was recomputed, at its beginning."""


_CONFIGURATION = (
    *("model", "gpus", "gpu_type", "tp", "pp", "cp", "vpp", "dp_shard", "dp_replicate", "zero_stage"),
    *("seq_len", "micro_batch", "local_batch", "grad_accum", "ac_mode", "compile", "float8"),
)
"""Columns that rows of one configuration share."""


class UnmappedError(Exception):
    """A row that no plan expresses; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """A published throughput, and the job and the device that reached it."""

    row: Row
    job: Job
    device: DeviceSpec
    published: float
    """Tokens per second and device."""
    states_conditions: bool
    """Whether the row states all that its figure depends on."""

    @property
    def name(self) -> str:
        """The row's id."""
        return self.row["id"]

    @property
    def framework(self) -> str:
        """The framework that was measured, without its version."""
        return self.row["framework"].split()[0]

    @property
    def precision(self) -> str:
        """The precision of the products; every framework's fp8 recipe counts as ours."""
        return "fp8" if self.job.float8 else "bf16"

    @cached_property
    def time(self) -> JobTime:
        """The estimated time of its step."""
        return time_of(self.job, self.device)

    @property
    def measured(self) -> Measured:
        """The row as a measurement that efficiencies are fitted to."""
        return Measured(
            name=self.name,
            # rows of two versions of one software are one configuration
            configuration=tuple(self.row.get(column) or "" for column in _CONFIGURATION),
            source=(self.row["source"], self.row["location"]),
            seconds=self._tokens / self.published,
            time=self.time,
        )

    @property
    def _tokens(self) -> float:
        """Tokens of a step on one device."""
        return self.job.global_batch * self.job.seq_len / self.job.world_size

    def throughput(self, seconds: float) -> float:
        """Return the tokens per second and device of a step that takes so long."""
        return self._tokens / seconds

    def error(self, seconds: float) -> float:
        """Return the relative error of a step's estimated time: positive if it is estimated too slow."""
        return seconds * self.published / self._tokens - 1


@dataclass(frozen=True)
class CostLedger:
    """All rows that can be estimated, with the times of their steps in seconds, by row."""

    cases: Sequence[Case]
    own: Mapping[str, float]
    """At this engine's rates."""
    without_configuration: Mapping[str, float]
    """Under efficiencies of its framework, fitted without the rows of the same configuration."""
    without_source: Mapping[str, float]
    """Under those fitted without the rows of the same source."""
    fitted: Mapping[str, Efficiencies]
    """By framework, those fitted to all of its rows."""

    def mean_absolute(self, seconds: Mapping[str, float], cases: Sequence[Case] | None = None) -> float:
        """Return the mean absolute error of estimated times, over some cases or all."""
        return fmean(abs(case.error(seconds[case.name])) for case in cases or self.cases)


def cost_ledger(cases: Sequence[Case]) -> CostLedger:
    """Fit each framework, and predict each row under efficiencies that have not seen it.

    A framework with rows of a single configuration keeps this engine's own efficiencies.
    """
    without_configuration: dict[str, float] = {}
    without_source: dict[str, float] = {}
    fitted = {}
    for framework in dict.fromkeys(case.framework for case in cases):
        rows = [case.measured for case in cases if case.framework == framework]
        configurations = {row.configuration for row in rows}
        fitted[framework] = fit(rows) if len(configurations) > 1 else Efficiencies()
        without_configuration |= left_out(rows, lambda row: row.configuration)
        without_source |= left_out(rows, lambda row: row.source)
    own = {case.name: case.time.own.total for case in cases}
    return CostLedger(cases, own, without_configuration, without_source, fitted)


def read_rows(paths: Iterable[Path] = ROWS) -> Iterator[Row]:
    """Yield the rows of some files; a column that a file lacks is empty."""
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            yield from csv.DictReader(file)


def read_cases(rows: Iterable[Row]) -> tuple[list[Case], list[tuple[Row, str]]]:
    """Return the rows that can be estimated, and the others with the reason; rows without a throughput are dropped."""
    mapped = []
    unmapped = []
    for row in rows:
        if row.get("tokens_s_gpu") or row.get("mfu_pct"):
            try:
                mapped.append(read_case(row))
            except (UnmappedError, RequestError) as error:
                unmapped.append((row, str(error)))
    return mapped, unmapped


def read_case(row: Row) -> Case:
    """Return one row as a case.

    Raises:
        UnmappedError: if the row leaves open what no default tells, with the reason.
        RequestError: if no plan expresses it.
    """
    reader = Reader(row)
    if reader.text("method") in {"LoRA", "QLoRA"}:
        raise UnmappedError("LoRA: the ledger does not map adapters")
    if (reader.count("pp") or 1) > 1 and not reader.text("grad_accum"):
        raise UnmappedError("the number of microbatches is not printed")
    if reader.text("vpp") == "unknown":
        raise UnmappedError("the number of stages on a rank is not printed")
    if not reader.text("ac_mode").startswith(_SAID):
        raise UnmappedError("what was recomputed is not printed")
    job = next(reader.jobs())
    device = _device(reader)
    published = reader.number("tokens_s_gpu")
    if not published:
        utilisation = (reader.number("mfu_pct") or 0) / 100
        published = utilisation * device.bf16_flops / flops_per_token(work_of(job).spec, job.seq_len)
    return Case(row, job, device, published, reader.states_conditions())


def _device(reader: Reader) -> DeviceSpec:
    gpu_type = reader.text("gpu_type")
    names = [name for fragment, name in _DEVICES.items() if gpu_type.startswith(fragment)]
    if not names:
        raise UnmappedError(f"{gpu_type} is not in the hardware table")
    device = gpu_spec(names[0])
    link = reader.number("network_gbit")  # of a node
    if link is None:
        return device
    return replace(device, network_bandwidth=link / 8 * GB / _SPLIT_AMONG)


def tables(ledger: CostLedger, unmapped: Sequence[tuple[Row, str]]) -> str:
    """Return the ledger as Markdown: errors by framework, what was fitted, every row, and the rows left out."""
    lines = [*_summary(ledger), "", *_efficiencies(ledger), "", *_rows(ledger), "", "Left out:", ""]
    reasons: dict[str, list[str]] = {}
    for row, reason in unmapped:
        reasons.setdefault(reason, []).append(row["id"])
    lines += [f"* {', '.join(ids)}: {reason}." for reason, ids in reasons.items()]
    return "\n".join(lines)


def _groups(cases: Sequence[Case]) -> Mapping[str, list[Case]]:
    """Return the groups of rows that the page shows: all, by what they state, by framework, and by its devices."""
    groups = {"conditions stated": [case for case in cases if case.states_conditions], "all": list(cases)}
    for framework in dict.fromkeys(case.framework for case in cases):
        own = [case for case in cases if case.framework == framework]
        groups[framework] = own
        devices = list(dict.fromkeys(case.device.name for case in own))
        if len(devices) > 1:
            for device in devices:
                groups[f"{framework}, {device}"] = [case for case in own if case.device.name == device]
    groups["fp8"] = [case for case in cases if case.precision == "fp8"]
    return groups


def _summary(ledger: CostLedger) -> Iterator[str]:
    yield (
        "| rows | number | error at our rates | without its configuration | without its source | bias | median "
        f"| off by more than {FAR:.0%} |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    predicted = ledger.without_configuration
    for name, group in _groups(ledger.cases).items():
        errors = [case.error(predicted[case.name]) for case in group]
        sizes = [abs(error) for error in errors]
        far = sum(size > FAR for size in sizes)
        of_fits = (ledger.own, predicted, ledger.without_source)
        means = " | ".join(f"{ledger.mean_absolute(seconds, group):.1%}" for seconds in of_fits)
        yield f"| {name} | {len(group)} | {means} | {fmean(errors):+.1%} | {median(sizes):.1%} | {far} |"


def _efficiencies(ledger: CostLedger) -> Iterator[str]:
    yield "| framework | rows | configurations | sources | products | tensor parallelism | seconds per step |"
    yield "|---|---|---|---|---|---|---|"
    for framework, found in ledger.fitted.items():
        rows = [case.measured for case in ledger.cases if case.framework == framework]
        configurations = len({row.configuration for row in rows})
        sources = len({row.source for row in rows})
        yield (
            f"| {framework} | {len(rows)} | {configurations} | {sources} | {found.products:.2f} "
            f"| {found.tensor_parallel:.2f} | {found.step_seconds:.3f} |"
        )


def _rows(ledger: CostLedger) -> Iterator[str]:
    yield "| row | framework | model | device | plan | sequence | published | predicted | error | at our rates |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    predicted = ledger.without_configuration
    for case in sorted(ledger.cases, key=lambda case: abs(case.error(predicted[case.name])), reverse=True):
        summary = work_of(case.job).plan.summary().replace(" sequences per step and rank", "")
        fused = case.job.compiles or case.job.framework.fused_kernels
        kernels = ("fused" if fused else "eager") + (", fp8" if case.job.float8 else "")
        seconds = predicted[case.name]
        yield (
            f"| {case.name} | {case.framework} | {case.row['model']} | {case.device.name} | {summary}, {kernels} "
            f"| {case.job.seq_len} | {case.published:.0f} | {case.throughput(seconds):.0f} "
            f"| {case.error(seconds):+.0%} | {case.error(ledger.own[case.name]):+.0%} |"
        )


def main(arguments: Sequence[str]) -> None:
    """Write the ledger into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, nargs="+", default=ROWS, help="published rows")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose tables are replaced")
    options = parser.parse_args(arguments)
    mapped, unmapped = read_cases(read_rows(options.csv))
    text = tables(cost_ledger(mapped), unmapped)
    rewrite(options.page, "ledger", text)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
