"""Compare published training throughputs with the estimated time of a step, row by row.

``python -m benchmarks.cost_ledger`` reads ``benchmarks/data/published_memory.csv``. Its rows give tokens per second, or
an MFU from which they follow. Each row is mapped to a model, a plan and a device; a row that no plan expresses is
listed with the reason. The tables go into ``docs/cost.md``.
"""

import argparse
import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, geometric_mean, median

from llama_core.config.hardware import DeviceSpec, gpu_spec
from llama_core.config.models import ModelSpec, model_spec
from llama_core.config.settings import Precision, RecomputeMode
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.step_time import flops_per_token, step_time
from llama_core.planning.work import Work

ROWS = Path(__file__).parent / "data" / "published_memory.csv"
PAGE = Path(__file__).parents[1] / "docs" / "cost.md"
TABLES = re.compile(r"(?<=<!-- ledger -->\n).*(?=<!-- end of ledger -->)", re.DOTALL)
FAR = 0.15
"""Error above which a row counts as far off."""

Row = Mapping[str, str]

_MODELS = {
    "llama2_7b": model_spec("llama2_7b"),
    "llama3_8b": model_spec("llama3_8b"),
    "llama3.1_8b": model_spec("llama3_8b"),
    "llama3.1_70b": model_spec("llama3_70b"),
    "llama3.1_405b": model_spec("llama3_405b"),
    "llama3.2_3b": model_spec("llama3_2_3b"),
    "qwen3_14b": ModelSpec("qwen3_14b", "llama3", 5120, 40, 40, 8, 128, 17_408, 151_936, 1e6, 1e-6, 40_960, 4096),
    "qwen3_32b": ModelSpec("qwen3_32b", "llama3", 5120, 64, 64, 8, 128, 25_600, 151_936, 1e6, 1e-6, 40_960, 4096),
}
_DEVICES = {"H100 96GB": "h100_96gb", "H100 80GB": "h100", "H200": "h200", "A100 80GB": "a100", "B200": "b200"}
_RECOMPUTE: Mapping[str, RecomputeMode] = {"none": "none", "full": "full", "selective": "selective"}


class UnmappedError(Exception):
    """A row that no plan expresses; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """A published throughput, and the model, plan and device that reached it."""

    row: Row
    spec: ModelSpec
    plan: ParallelPlan
    device: DeviceSpec
    seq_len: int
    published: float
    """Tokens per second and device."""

    @property
    def framework(self) -> str:
        """The framework that was measured, without its version."""
        return self.row["framework"].split()[0]

    @property
    def precision(self) -> Precision:
        """The precision of the products; every framework's fp8 recipe counts as ours."""
        return "bf16" if self.row["float8"] in {"none", ""} else "fp8"

    @cached_property
    def estimated(self) -> float:
        """Tokens per second and device, estimated by this project."""
        # they ran torch's flash kernel, which is that of documents: torch preferred it then
        work = Work(self.spec, self.plan, self.seq_len, self.precision, documents="varlen")
        step = step_time(work, self.device)
        return step.tokens_per_second_per_device

    @property
    def error(self) -> float:
        """Relative error: estimated over published throughput, minus 1."""
        return self.estimated / self.published - 1


def read_cases(rows: Iterable[Row]) -> tuple[list[Case], list[tuple[Row, str]]]:
    """Return the rows that can be estimated, and the others with the reason; rows without a throughput are dropped."""
    mapped = []
    unmapped = []
    for row in rows:
        if row["tokens_s_gpu"] or row["mfu_pct"]:
            try:
                mapped.append(read_case(row))
            except UnmappedError as error:
                unmapped.append((row, str(error)))
    return mapped, unmapped


def read_case(row: Row) -> Case:
    """Return one row as a case.

    Raises:
        UnmappedError: if no plan expresses the row, with the reason.
    """
    if row["method"] in {"LoRA", "QLoRA"}:
        raise UnmappedError("LoRA: the ledger does not map adapters")
    if int(row["pp"] or 1) > 1 and not row["grad_accum"]:
        raise UnmappedError("the number of microbatches is not printed")
    spec = _model(row)
    seq_len = int(row["seq_len"])
    plan = _plan(row, spec)
    device = _device(row)
    published = float(row["tokens_s_gpu"] or 0)
    if not published:
        published = float(row["mfu_pct"]) / 100 * device.bf16_flops / flops_per_token(spec, seq_len)
    return Case(row, spec, plan, device, seq_len, published)


def _model(row: Row) -> ModelSpec:
    if row["model"] in _MODELS:
        return _MODELS[row["model"]]
    sizes = re.match(r"L(\d+) h(\d+) H(\d+) ffn(\d+) (tied|untied).* vocab (\d+)", row["extra"])
    if sizes is None:
        raise UnmappedError("the sizes of the model are not printed, or it is a mixture of experts")
    layers, hidden, heads, ffn, vocab = (int(sizes[place]) for place in (1, 2, 3, 4, 6))
    head_dim = hidden // heads
    tied = sizes[5] == "tied"
    dims = (hidden, layers, heads, heads, head_dim, ffn, vocab)
    return ModelSpec(row["model"], "llama3", *dims, 1e4, 1e-5, 4096, 4096, tied_embeddings=tied)


def _device(row: Row) -> DeviceSpec:
    names = [name for fragment, name in _DEVICES.items() if row["gpu_type"].startswith(fragment)]
    if not names:
        raise UnmappedError(f"{row['gpu_type']} is not in the hardware table")
    return gpu_spec(names[0])


def _plan(row: Row, spec: ModelSpec) -> ParallelPlan:
    recompute, recomputed_layers = _recompute(row, spec)
    tp, pp, cp = (int(row[axis] or 1) for axis in ("tp", "pp", "cp"))
    copies = int(row["dp_replicate"] or 1)
    shards = int(row["dp_shard"] or 0) or int(row["gpus"]) // (tp * pp * cp * copies)  # torchtitan's default: the rest
    zero_stage = int(row["zero_stage"] or 0)
    if zero_stage < 3:  # nanotron shards the optimizer over its replicas
        shards, copies = (shards * copies, 1) if zero_stage else (1, shards * copies)
    microbatch_size = int(row["micro_batch"] or row["local_batch"])
    num_microbatches = int(row["grad_accum"] or 1)
    return ParallelPlan(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_shard=shards,
        dp_replicate=copies,
        zero_stage=zero_stage,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        recompute=recompute,
        recomputed_layers=recomputed_layers,
        compile=_is_fused(row),
    )


def _recompute(row: Row, spec: ModelSpec) -> tuple[RecomputeMode, tuple[int, ...] | None]:
    """Return the mode of recomputation, and the number of recomputed layers if not all were."""
    if row["ac_mode"] == "selective layer(2)":
        return "full", (spec.num_layers // 2,)
    word = re.split(r"[ (]", row["ac_mode"])[0]
    if word not in _RECOMPUTE:
        raise UnmappedError("what was recomputed is not printed")
    return _RECOMPUTE[word], None


def _is_fused(row: Row) -> bool:
    """Return whether norms, rotary embedding and activation ran in fused kernels: compiled, or nanotron's own."""
    return row["compile"] in {"yes", "aot_fx_trace"} or row["framework"].startswith("nanotron")


def tables(mapped: Sequence[Case], unmapped: Sequence[tuple[Row, str]]) -> str:
    """Return the ledger as Markdown: errors by framework, every row, and the rows left out."""
    lines = ["", *_summary(mapped), "", *_rows(mapped), "", "Left out:", ""]
    reasons: dict[str, list[str]] = {}
    for row, reason in unmapped:
        reasons.setdefault(reason, []).append(row["id"])
    lines += [f"* {', '.join(ids)}: {reason}." for reason, ids in reasons.items()]
    return "\n".join([*lines, "", ""])


def _summary(mapped: Sequence[Case]) -> Iterator[str]:
    yield f"| rows | number | mean absolute error | bias | median | off by more than {FAR:.0%} | with a fitted factor |"
    yield "|---|---|---|---|---|---|---|"
    groups = {"tokens per second printed": [case for case in mapped if case.row["tokens_s_gpu"]], "all": mapped}
    for framework in dict.fromkeys(case.framework for case in mapped):
        groups[framework] = [case for case in mapped if case.framework == framework]
    groups["fp8"] = [case for case in mapped if case.precision == "fp8"]
    for name, group in groups.items():
        errors = [case.error for case in group]
        sizes = [abs(error) for error in errors]
        far = sum(size > FAR for size in sizes)
        others = [case for case in mapped if case not in group]
        fitted = f"{_fitted_error(group, others):.1%}" if others and name != "tokens per second printed" else ""
        yield (
            f"| {name} | {len(group)} | {fmean(sizes):.1%} | {fmean(errors):+.1%} | {median(sizes):.1%} | {far} "
            f"| {fitted} |"
        )


def _fitted_error(group: Sequence[Case], others: Sequence[Case]) -> float:
    """Return the mean absolute error of ``group`` with estimates scaled by one factor, fitted on ``others``."""
    factor = geometric_mean([case.published / case.estimated for case in others])
    return fmean(abs(case.estimated * factor / case.published - 1) for case in group)


def _rows(mapped: Sequence[Case]) -> Iterator[str]:
    yield "| row | framework | model | device | plan | sequence | published | estimated | error |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for case in sorted(mapped, key=lambda case: abs(case.error), reverse=True):
        plan = case.plan.summary().replace(" sequences per step and rank", "")
        kernels = ("fused" if case.plan.compile else "eager") + (", fp8" if case.precision == "fp8" else "")
        yield (
            f"| {case.row['id']} | {case.framework} | {case.row['model']} | {case.device.name} | {plan}, {kernels} "
            f"| {case.seq_len} | {case.published:.0f} | {case.estimated:.0f} | {case.error:+.0%} |"
        )


def main(arguments: Sequence[str]) -> None:
    """Write the ledger into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROWS, help="published rows")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page whose tables are replaced")
    options = parser.parse_args(arguments)
    with options.csv.open(newline="", encoding="utf-8") as file:
        text = tables(*read_cases(csv.DictReader(file)))
    options.page.write_text(TABLES.sub(lambda _: text, options.page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main(sys.argv[1:])
