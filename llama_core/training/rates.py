"""The learning-rate schedules as functions of the step. Needs no torch."""

import math

from llama_core.config.settings import TrainingConfig


def warmup_steps(training: TrainingConfig, total_steps: int) -> int:
    """Return the number of linear warm-up steps: as configured, else a tenth of the run but at most 2000."""
    return min(total_steps // 10, 2000) if training.warmup_steps is None else training.warmup_steps


def learning_rate(step: int, training: TrainingConfig, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 1.

    After a linear warm-up the rate follows half a cosine (``cosine``), stays constant and then falls linearly over the
    last ``decay_fraction`` of the steps (``wsd``), or stays constant (``constant``). The decays end at ``min_lr_ratio``
    of the peak on the last step.

    Source: cosine, Loshchilov and Hutter 2017, arXiv:1608.03983; WSD, Hu et al. 2024, arXiv:2404.06395.
    """
    peak = training.learning_rate
    floor = training.learning_rate * training.min_lr_ratio
    warmup = warmup_steps(training, total_steps)
    if step <= warmup:
        return peak * step / warmup
    match training.lr_schedule:
        case "cosine":
            progress = (step - warmup) / max(1, total_steps - warmup)
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        case "wsd":
            decay = max(1, round(total_steps * training.decay_fraction))
            remaining = min(1.0, max(0, total_steps - step) / decay)
            return floor + (peak - floor) * remaining
        case "constant":
            return peak
