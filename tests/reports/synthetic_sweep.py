"""A synthetic sweep, written with the same records as a real one."""

from dataclasses import replace

from synthetic_run import BENCHMARK, DRY_RUN, ESTIMATE, FAILED, FINISHED, SUMMARY, step_record, write_run

from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import checkpoint_name
from llama_core.records.evaluation_jobs import write_ending
from llama_core.records.evaluations import Score, write_scores
from llama_core.records.files import read_json, write_json
from llama_core.records.held_out import HeldOutRows
from llama_core.records.job import JobRecord
from llama_core.records.measurements import BenchmarkRecord
from llama_core.sweep.directory import ElementRecord, SweepDirectory, SweepRecord, read_record, write_record
from llama_core.sweep.grid import SweepConfig
from llama_core.sweep.history import Result
from llama_core.sweep.judgement import judge
from llama_core.units import MIB

DOES_NOT_FIT = "tp=1 needs 91.2 GB of the 80 GB per device; use tp=2"


def write_sweep(path, num_elements=4, *, skipped=1, failed=1, waiting=1):
    """Write a sweep of ``num_elements`` timed elements, the last of them the fastest, followed by the others."""
    grid = {
        "parallel.microbatch_size": [2**i for i in range(-(-(num_elements + skipped + failed + waiting) // 2))],
        "parallel.recompute": ["none", "selective"],
    }
    config = SweepConfig.from_mapping(
        {"name": path.name, "base": {"model": "llama3_8b", "launch": {"device": "cpu"}}, "grid": grid}
    )
    sweep, elements = SweepDirectory(path), config.elements()
    records = []
    for number, element in enumerate(elements):
        record = ElementRecord(element.name, element.settings)
        run = sweep.run(element.name)
        if number < num_elements:
            _write_timed(run, number)
        elif number < num_elements + failed:
            run.create()
            write_json(run.estimate, ESTIMATE)
            write_json(run.outcome, FAILED)
        elif number < num_elements + failed + waiting:
            run.create()
            write_json(run.job, JobRecord("slurm", f"12_{number}", "login1", "2026-11-21T09:50:00+00:00"))
        else:
            record = replace(record, skipped=DOES_NOT_FIT)
        records.append(record)
    write_record(sweep, SweepRecord(config.model_dump(), tuple(records)))
    return sweep


def _write_timed(run, number):
    run.create()
    rate = 1 + 0.25 * number
    seconds = tuple(value / rate for value in BENCHMARK.step_seconds)
    timed = replace(
        BENCHMARK,
        step_seconds=seconds,
        median_seconds=12.1 / rate,
        tokens_per_second=16_384 * rate / 12.1,
        mfu=0.3 + 0.01 * number,
        memory_peak_bytes=(2000 + 150 * number) * MIB,
    )
    run.config.write_text("launch: {device: cpu}\n")
    write_json(run.estimate, ESTIMATE)
    write_json(run.dry_run, DRY_RUN)
    write_json(run.benchmark, timed)
    write_json(run.outcome, FINISHED)


GRID_200 = {
    "parallel.gpus": [1, 2, 4, 8, 16],
    "parallel.tp": [1, 2],
    "parallel.microbatch_size": [1, 2, 4, 8, 16],
    "parallel.recompute": ["none", "full"],
    "parallel.compile": [False, True],
}
"""200 elements; 20 of them have more tensor-parallel ranks than GPUs."""


def write_planned_sweep(path, grid):
    """Write a sweep of these ranks, microbatches and modes with their plans and predicted steps.

    More tensor-parallel ranks than GPUs are skipped, and microbatches of 16 that recompute nothing run out of memory.
    An element on n ranks is as fast as n ** 0.9 of them.
    """
    config = SweepConfig.from_mapping({"name": path.name, "base": {"model": "llama3_8b"}, "grid": grid})
    sweep, records = SweepDirectory(path), []
    for element in config.elements():
        asked = {key.rpartition(".")[2]: value for key, value in element.settings.items()}
        gpus, tp, rows = asked.get("gpus", 1), asked.get("tp", 1), asked.get("microbatch_size", 1)
        if gpus % tp:
            reason = f"parallel.gpus={gpus} is not a multiple of {tp} (tp={tp})"
            records.append(ElementRecord(element.name, element.settings, reason))
            continue
        records.append(ElementRecord(element.name, element.settings))
        full, compiled = asked.get("recompute") == "full", asked.get("compile", False)
        plan = ParallelPlan(tp=tp, dp_replicate=gpus // tp, microbatch_size=rows, num_microbatches=32 // rows)
        rate = 9000 * gpus**0.9 * (0.9 if tp > 1 else 1) * rows**0.1 * (0.75 if full else 1) * (1.1 if compiled else 1)
        num_bytes = round((16_000 + 4000 * rows * (0.25 if full else 1) - 900 * compiled) * MIB / tp)
        run = sweep.run(element.name)
        run.create()
        run.config.write_text("launch: {device: cuda}\n")
        write_json(run.plan, plan.as_dict())
        seconds = plan.batch_size * 8192 / rate
        write_json(run.choice, {"step": {"step_seconds": 0.9 * seconds}})
        write_json(run.estimate, ESTIMATE)
        fails = rows == 16 and not full
        write_json(run.outcome, FAILED if fails else FINISHED)
        if fails:
            continue
        timed = replace(
            BENCHMARK,
            device="NVIDIA H100",
            step_seconds=tuple(seconds * part for part in (0.99, 0.995, 1.0, 1.01, 1.03)),
            median_seconds=seconds,
            tokens_per_step=plan.batch_size * 8192,
            tokens_per_second=rate,
            mfu=0.4,
            memory_peak_bytes=num_bytes,
        )
        write_json(run.benchmark, timed)
    write_record(sweep, SweepRecord(config.model_dump(), tuple(records)))
    return sweep


def write_loss_sweep(
    path,
    losses=(2.6, 2.4, 2.9),
    *,
    batch_sizes=(8,),
    models=(),
    noise=0.01,
    last_loss=None,
    objective="loss",
    scores=(),
    higher_is_better=True,
):
    """Write a sweep whose elements train: elements with these held-out losses, and one whose loss was not finite.

    Args:
        path: its directory.
        losses: the held-out loss of each element; the last learning rate has none.
        batch_sizes: the last key of the grid.
        models: the first key of the grid, if there are any.
        noise: how much the loss of a row differs between elements, beyond the difference of their means.
        last_loss: the training loss that the last of these elements ends with.
        objective: what ranks them; the held-out loss of ``code`` falls where that of all, and of ``wiki``, rises.
        scores: what their last checkpoints score on the task arc in the metric acc, if they are evaluated; None of one
            whose evaluation failed.
        higher_is_better: whether a higher score is better.
    """
    num_rates = -(-len(losses) // max(1, len(models))) + 1
    grid = {
        **({"model": list(models)} if models else {}),
        "training.learning_rate": [10.0**-i for i in range(num_rates, 0, -1)],
        "training.batch_size": list(batch_sizes),
    }
    data = {"validation": {"code": "code.jsonl", "wiki": "wiki.jsonl"}}
    base = {"training": {"steps": 40}, "launch": {"device": "cpu"}, "data": data}
    if scores:
        base["evaluation"] = {"tasks": ["arc"], "limit": 100}
    config = SweepConfig.from_mapping({"name": path.name, "base": base, "grid": grid, "objective": objective})
    sweep, elements = SweepDirectory(path), config.elements()
    write_record(
        sweep, SweepRecord(config.model_dump(), tuple(ElementRecord(one.name, one.settings) for one in elements))
    )
    for number, (element, loss) in enumerate(zip(elements, losses, strict=False)):
        tokens = 100 * element.settings["training.batch_size"]
        named = {"code": 5 - loss, "wiki": 2 * loss - 2}
        evaluated = {"eval_loss": loss, "eval_losses": named}
        records = [
            step_record(step, loss=loss + 3 / step, tokens=step * tokens, **(evaluated if step % 20 == 0 else {}))
            for step in range(1, 41)
        ]
        if last_loss is not None and number == len(losses) - 1:
            records = [replace(one, loss=last_loss) if one.step > 1 else one for one in records]
        run = write_run(sweep.run(element.name).path, records=records)
        run.benchmark.unlink()
        run.config.write_text(f"model: {element.settings.get('model', 'tiny_llama3_50m')}\nlaunch: {{device: cpu}}\n")
        of_rows = [16 * (loss + 0.1 * row + noise * number * (-1) ** row - 0.15) for row in range(4)]
        summary = replace(
            SUMMARY,
            steps=40,
            tokens=40 * tokens,
            train_loss=records[-1].loss,
            eval_loss=loss,
            eval_tokens=64,
            eval_rows=HeldOutRows.of(of_rows, [16] * 4),
            named_eval_rows={name: HeldOutRows.of([16 * mean] * 2, [16] * 2) for name, mean in named.items()},
        )
        write_json(run.training, summary)
    for element, score in zip(elements, scores, strict=False):
        _write_scores(sweep.run(element.name), score, higher_is_better=higher_is_better)
    diverged = [step_record(step, loss=9.0 * step, tokens=800 * step) for step in range(1, 24)]
    outcome = replace(FAILED, status="non-finite", reason="the loss is not finite", attempts=())
    run = write_run(sweep.run(elements[-1].name).path, outcome=outcome, records=diverged)
    run.training.unlink()
    run.benchmark.unlink()
    return sweep


def _write_scores(run, value, *, higher_is_better):
    """Write the scores of the checkpoints of steps 20 and 40, and those of step 40 asked in another way."""
    for step, settings, amount in ((20, "first 100", 0.9), (40, "first 100", value), (40, "", 0.01)):
        if amount is not None:
            score = Score(step, 800 * step, "arc", "acc", amount, None, higher_is_better, 100, "1", settings, "")
            write_scores(run, [replace(score, standard_error=0.03 if amount > 0.5 else 0.04)])
    checkpoint = run.checkpoints / checkpoint_name(40)
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "state.json", {"step": 40, "tokens": 32_000})
    write_ending(run, checkpoint, "" if value is not None else "the disk is full")


def write_history(sweep):
    """Write how the timed elements of a sweep compare with nine earlier sweeps: the first of them is slower."""
    noise = (1.0, 1.01, 0.99, 1.004, 0.6, 1.012, 0.996, 1.007, 0.99)
    runs = [sweep.run(one.name) for one in read_record(sweep).runnable]
    results, earlier = [], []
    for number, run in enumerate(run for run in runs if run.benchmark.exists()):
        timed = BenchmarkRecord(**read_json(run.benchmark))
        result = Result(
            source=sweep.name,
            element=run.name,
            machine=timed.device,
            host="node1",
            fingerprint=run.name,
            ended_at="2026-11-21T10:00:00+00:00",
            versions={"python": "3.11.9", "torch": "2.13.0", "commit": "0123456789ab"},
            settings={"benchmark.steps": 5, "plan.microbatch_size": 1},
            tokens_per_step=timed.tokens_per_step,
            tokens_per_second=tuple(timed.tokens_per_step / seconds for seconds in timed.step_seconds),
            memory_peak_bytes=timed.memory_peak_bytes,
            waiting_share=0.4 if number == 1 else 0.0,
        )
        results.append(result)
        usual = 1.18 if number == 0 else 1.0
        earlier += [
            replace(
                result,
                ended_at=f"2026-11-{10 + night}T02:00:00+00:00",
                versions={"python": "3.11.9", "torch": "2.12.0", "commit": "ba9876543210"},
                tokens_per_second=tuple(usual * factor * rate for rate in result.tokens_per_second),
                waiting_share=0.0,
            )
            for night, factor in enumerate(noise if number != 2 else noise[:2])
        ]
    judgement = judge(results, earlier, "/shared/history", "part-1.parquet")
    write_json(sweep.history, judgement)
    return judgement
