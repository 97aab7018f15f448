"""How many devices of a node evaluate a checkpoint: as asked, or the fewest whose memory holds the model."""

import pytest

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.planning.evaluation import evaluation_plan


def config(model, gpu_type="h100", *, force=False, **evaluation):
    launch = {"launcher": "slurm", "device": "cuda", "gpu_type": gpu_type, "force": force}
    return RunConfig.from_mapping({"model": model, "launch": launch, "evaluation": evaluation})


def degrees(*arguments, device="cuda", **evaluation):
    plan = evaluation_plan(config(*arguments, **evaluation), device)
    return plan.tp, plan.dp


@pytest.mark.parametrize(
    ("model", "gpu_type", "evaluation", "tp"),
    [
        ("llama3_8b", "h100", {}, 1),
        ("llama3_70b", "h100", {}, 4),
        ("llama3_70b", "h100", {"dtype": "bf16"}, 2),
        ("llama3_70b", "h100", {"dtype": "bf16", "tasks": ["hellaswag"]}, 4),
        ("llama3_405b", "h200", {"dtype": "bf16"}, 8),
    ],
)
def test_the_fewest_gpus_that_hold_the_model_divide_it(model, gpu_type, evaluation, tp):
    assert degrees(model, gpu_type, **evaluation) == (tp, 1)


def test_copies_take_the_gpus_that_are_left():
    assert degrees("llama3_70b", dtype="bf16", gpus=8) == (2, 4)
    assert degrees("llama3_70b", dtype="bf16", gpus=8, tp=8) == (8, 1)


def test_one_process_on_the_cpu_holds_any_model_unless_more_are_asked_for():
    assert degrees("llama3_405b", device="cpu") == (1, 1)
    assert degrees("llama3_405b", device="cpu", tp=2) == (2, 1)


@pytest.mark.parametrize(
    ("model", "evaluation", "error", "message"),
    [
        ("llama3_70b", {"dtype": "bf16", "tp": 1}, DoesNotFitError, r"evaluation\.tp=1: .* set evaluation\.tp=2, or"),
        ("llama3_70b", {"gpus": 2}, DoesNotFitError, r"set evaluation\.gpus=8, or evaluation\.dtype=bf16, or"),
        ("llama3_405b", {"dtype": "bf16"}, DoesNotFitError, r"evaluation\.tp=8: .*; set evaluation\.device=cpu"),
        ("llama3_8b", {"tp": 3}, PlanError, r"evaluation: tp=3 does not divide the 8 key/value heads"),
        ("llama3_8b", {"gpus": 8, "tp": 3}, ConfigError, r"evaluation\.tp=3 does not divide evaluation\.gpus=8"),
    ],
)
def test_what_every_evaluation_would_fail_by_is_one_line_with_what_to_set(model, evaluation, error, message):
    with pytest.raises(error, match=message) as refused:
        degrees(model, **evaluation)
    assert "\n" not in str(refused.value)


def test_a_model_that_does_not_fit_is_evaluated_all_the_same_if_that_is_forced():
    assert degrees("llama3_405b", force=True) == (8, 1)
    assert degrees("llama3_70b", force=True, tp=1) == (1, 1)
