"""A synthetic run, written with the same records as a real one."""

import math
from dataclasses import asdict, replace

import pandas as pd

from llama_core.config.run import RunConfig
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from llama_core.records.job import JobRecord, Outcome
from llama_core.records.measurements import BenchmarkRecord, StepRecord, TrainingSummary
from llama_core.records.metrics import write_metrics_part
from llama_core.units import MIB

ESTIMATE = {
    "phases": {
        "forward": {"weights": 191 * MIB, "activations": 420 * MIB},
        "backward": {
            "weights": 191 * MIB,
            "gradients": 191 * MIB,
            "moments": 382 * MIB,
            "activations": 840 * MIB,
            "loss": 96 * MIB,
            "temporaries": 40 * MIB,
        },
        "optimizer": {"weights": 191 * MIB, "gradients": 191 * MIB, "moments": 382 * MIB},
    },
    "peak_phase": "backward",
    "peak_bytes": 1740 * MIB,
    "device": "the CPU of this machine",
    "usable_bytes": 20_000 * MIB,
    "fits": True,
    "notes": ["bf16 copies of the weights are counted as temporaries"],
}
DRY_RUN = {
    "phases": {
        "backward": {
            "weights": 191 * MIB,
            "gradients": 185 * MIB,
            "moments": 382 * MIB,
            "activations": 790 * MIB,
            "loss": 130 * MIB,
            "temporaries": 61 * MIB,
        }
    },
    "peak_phase": "backward",
    "peak_bytes": 1739 * MIB,
    "flops": 6.1e12,
    "seconds": 3.2,
}
SUMMARY = TrainingSummary(
    steps=40,
    tokens=40 * 16_384,
    train_loss=2.41,
    eval_loss=2.4518,
    eval_tokens=131_072,
    unigram_entropy=3.1527,
    bigram_entropy=2.3874,
    memory_baseline_bytes=310 * MIB,
    memory_peak_bytes=2190 * MIB,
    memory_reserved_bytes=0,
    memory_process_bytes=0,
    memory_by_rank_bytes=(),
    seconds=492.0,
)
BENCHMARK = BenchmarkRecord(
    device="A processor of 2 cores",
    warmup_steps=2,
    step_seconds=(11.9, 12.0, 12.1, 12.3, 12.8),
    median_seconds=12.1,
    spread_seconds=0.3,
    tokens_per_step=16_384,
    tokens_per_second=16_384 / 12.1,
    mfu=None,
    memory_peak_bytes=2150 * MIB,
)
FINISHED = Outcome("finished", "all 40 steps were taken", 40, "", "2026-11-21T10:00:00+00:00")
ATTEMPT = {"submitted_at": "2026-11-21T09:50:00+00:00", "restart": 0, "reason": "", "requeued": False, "excluded": []}
ATTEMPT |= {"job_id": None, "status": "crashed", "first_step": None, "last_step": None}
ATTEMPT |= {"started_at": None, "ended_at": FINISHED.ended_at}
"""An attempt without a step."""
FAILED = Outcome(
    "oom",
    "the step asked for 2.1 GiB where 1.3 GiB were free",
    23,
    "use a smaller parallel.microbatch_size, then --resume",
    "2026-11-21T10:00:00+00:00",
    attempts=(
        ATTEMPT | {"job_id": "4711", "status": "preempted", "first_step": 1, "last_step": 11},
        ATTEMPT | {"job_id": "4712", "status": "oom", "first_step": 12, "last_step": 23},
    ),
)


DATA = {
    "summary": "120 documents; loss on 40 of 90 tokens",
    "notes": ["3 of them lose their end"],
    "num_documents": 120,
    "num_sequences": 32,
    "unit": "documents",
    "num_validation_documents": 7,
    "num_tokens": 65_000,
    "num_validation_tokens": 3_000,
    "bad_lines": {"not JSON": 2, "no text": 1},
    "bad_line_examples": ["texts.jsonl:17: not JSON (Expecting value)"],
    "sources": [],
}


def step_record(step, **changes):
    seconds = 12.1 + 0.5 * math.sin(step) + 6.0 * (step == 1)
    record = StepRecord(
        step=step,
        total_steps=40,
        loss=2.3 + 3.2 * math.exp(-step / 8) + 0.06 * math.sin(5 * step),
        grad_norm=0.8 + 4 * math.exp(-step / 5) + 0.1 * math.cos(3 * step),
        learning_rate=3e-4 * min(step / 5, (1 + math.cos(math.pi * step / 42)) / 2),
        tokens=step * 16_384,
        tokens_per_second=16_384 / seconds,
        step_seconds=seconds,
        data_seconds=0.02 * seconds,
        forward_backward_seconds=0.9 * seconds,
        optimizer_seconds=0.06 * seconds,
        backward_seconds=0.6 * seconds,
        mfu=None,
        memory_allocated_bytes=(1900 + 20 * (step % 3)) * MIB,
        memory_peak_bytes=min(2190, 2100 + 30 * step) * MIB,
        memory_reserved_bytes=min(2600, 2300 + 20 * step) * MIB,
        loss_scale=1.0,
        skipped=False,
        spike=False,
        eval_loss=None,
        time=1_795_000_000.0 + 12.1 * step,
    )
    return replace(record, **changes)


def step_records(last=40):
    evaluated = {step: {"eval_loss": 2.4 + 3.2 * math.exp(-step / 8)} for step in (10, 20, 30, 40)}
    skipped = {14: {"loss": math.nan, "grad_norm": math.inf, "skipped": True}}
    return [step_record(step, **(evaluated | skipped).get(step, {})) for step in range(1, last + 1)]


def table(records):
    """Return the steps as the report reads them."""
    unknown = dict.fromkeys(("eval_loss", "mfu"), float)
    rows = [asdict(record) for record in records]
    return pd.DataFrame([row | row.pop("measured") for row in rows]).astype(unknown)


def write_run(path, *, outcome=FINISHED, records=None):
    """Write a complete run whose metrics come in two parts, as a resumed run's do."""
    run = RunDirectory(path)
    run.create()
    sizes = {"steps": 40, "batch_size": 8, "seq_len": 2048}
    config = RunConfig.from_mapping({"training": sizes, "launch": {"device": "cpu"}})
    run.config.write_text(config.to_yaml())
    write_json(run.plan, {"dp_shard": 1, "zero_stage": 0, "microbatch_size": 4, "num_microbatches": 2, "world_size": 1})
    write_json(
        run.environment,
        {
            "errors": [],
            "warnings": ["only 2 CPU cores: expect minutes, not seconds"],
            "facts": {"python": "3.11", "torch": "2.13", "cuda": None, "commit": "0123456789ab-dirty"},
        },
    )
    write_json(run.estimate, ESTIMATE)
    write_json(run.dry_run, DRY_RUN)
    write_json(run.data, DATA)
    for rank in range(2):
        log = run.logs / f"rank-{rank:05d}.log"
        log.write_text("=== job 4711\nan earlier attempt\n=== job 4712\n" + f"a line of rank {rank}\n" * 30)
    (run.checkpoints / "step-00000020").mkdir(parents=True)
    write_json(run.job, JobRecord("local", "1234", "login1", "2026-11-21T09:50:00+00:00"))
    write_json(run.training, SUMMARY)
    write_json(run.benchmark, BENCHMARK)
    write_json(run.outcome, outcome)
    records = step_records() if records is None else records
    for part in (records[:15], records[15:]):
        write_metrics_part(run, part)
    write_json(run.heartbeat, records[-1])
    return run
