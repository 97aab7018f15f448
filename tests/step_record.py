"""A step's record for tests that need one and do not care what it measured."""

from llama_core.records.measurements import StepRecord


def record(step, **changes):
    fields = {
        "step": step, "total_steps": 100, "loss": 1.0, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens": 512 * step,
        "tokens_per_second": 1000.0, "step_seconds": 0.5, "data_seconds": 0.1, "forward_backward_seconds": 0.3,
        "optimizer_seconds": 0.1, "mfu": None, "memory_allocated_bytes": 1, "memory_peak_bytes": 2, "loss_scale": 1.0,
        "skipped": False, "eval_loss": None, "time": 0.0,
    }  # fmt: skip
    return StepRecord(**fields | changes)
