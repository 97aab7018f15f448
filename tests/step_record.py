"""Records for tests that need one and do not care what it measured."""

from llama_core.records.measurements import StepRecord, TrainingSummary


def record(step, **changes):
    fields = {
        "step": step, "total_steps": 100, "loss": 1.0, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens": 512 * step,
        "tokens_per_second": 1000.0, "step_seconds": 0.5, "data_seconds": 0.1, "forward_backward_seconds": 0.3,
        "backward_seconds": 0.2, "optimizer_seconds": 0.1, "mfu": None, "memory_allocated_bytes": 1,
        "memory_peak_bytes": 2, "memory_reserved_bytes": 3, "loss_scale": 1.0, "skipped": False, "spike": False,
        "eval_loss": None, "time": 0.0,
    }  # fmt: skip
    return StepRecord(**fields | changes)


def training_summary(**changes):
    fields = {
        "steps": 2, "tokens": 64, "train_loss": 2.0, "eval_loss": None, "eval_tokens": 0, "unigram_entropy": None,
        "bigram_entropy": None, "memory_baseline_bytes": 0, "memory_peak_bytes": 0, "memory_reserved_bytes": 0,
        "memory_process_bytes": 0, "memory_by_rank_bytes": (), "seconds": 1.0,
    }  # fmt: skip
    return TrainingSummary(**fields | changes)
