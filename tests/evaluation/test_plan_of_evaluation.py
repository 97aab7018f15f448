"""How many devices of a node evaluate a checkpoint: as asked, or the fewest whose memory holds the model."""

from dataclasses import replace

import pytest
import torch
from tiers import nightly

from llama_core import attention
from llama_core.config.models import model_spec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, DoesNotFitError, PlanError
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.row_losses import losses_of_rows
from llama_core.evaluation.inference.scoring import Continuation, log_likelihoods
from llama_core.evaluation.plan import evaluation_plan
from llama_core.models.batch import Batch
from llama_core.planning.inference import EvaluationForward, evaluation_bytes
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.byte_counter import ByteCounter
from llama_core.training.stored_weights import whole_model


def config(model, gpu_type="h100", *, force=False, num_nodes=1, **evaluation):
    launch = {"launcher": "slurm", "device": "cuda", "gpu_type": gpu_type, "force": force, "nodes": num_nodes}
    parallel = {"gpus": 8 * num_nodes}
    return RunConfig.from_mapping({"model": model, "launch": launch, "parallel": parallel, "evaluation": evaluation})


def degrees(*arguments, device="cuda", **settings):
    """Return tp, pp, dp and the nodes of an evaluation."""
    shared = evaluation_plan(config(*arguments, **settings), device)
    return shared.plan.tp, shared.plan.pp, shared.plan.dp, shared.nodes


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
    assert degrees(model, gpu_type, **evaluation) == (tp, 1, 1, 1)


def test_tasks_that_may_generate_need_a_cache_that_serves_the_model(monkeypatch):
    kernels = tuple(kernel for kernel in attention.KERNELS if not kernel.is_cached)
    monkeypatch.setattr(attention, "KERNELS", kernels)
    assert degrees("mistral_7b") == (1, 1, 1, 1)
    with pytest.raises(
        PlanError, match=r"\Aevaluation: attention with window has no kernel among those of a cache \(no kernel\)"
    ):
        degrees("mistral_7b", tasks=["hellaswag"])


def test_a_model_larger_than_a_node_is_a_pipeline_over_as_few_whole_nodes_as_hold_it():
    assert degrees("llama3_405b", num_nodes=32, dtype="bf16", tasks=["hellaswag"]) == (8, 2, 1, 2)
    assert degrees("llama3_405b", num_nodes=32, tasks=["hellaswag"]) == (8, 4, 1, 4)
    assert degrees("llama3_405b", dtype="bf16", nodes=2) == (8, 2, 1, 2)


def test_layers_are_divided_where_matrices_are_not():
    assert degrees("llama3_70b", dtype="bf16", tp=1) == (1, 2, 1, 1)
    assert degrees("llama3_70b", dtype="bf16", tp=1, pp=4, gpus=8) == (1, 4, 2, 1)


def test_copies_take_the_gpus_that_are_left():
    assert degrees("llama3_70b", dtype="bf16", gpus=8) == (2, 1, 4, 1)
    assert degrees("llama3_70b", dtype="bf16", gpus=8, tp=8) == (8, 1, 1, 1)
    assert degrees("llama3_70b", dtype="bf16", gpus=16) == (2, 1, 8, 2)
    assert degrees("llama3_70b", dtype="bf16", nodes=2) == (2, 1, 8, 2)


def test_one_process_on_the_cpu_holds_any_model_unless_more_are_asked_for():
    assert degrees("llama3_405b", device="cpu") == (1, 1, 1, 1)
    assert degrees("llama3_405b", device="cpu", tp=2) == (2, 1, 1, 1)
    assert degrees("llama3_405b", device="cpu", pp=2, nodes=2) == (1, 2, 1, 2)


@pytest.mark.parametrize(
    ("model", "evaluation", "error", "message"),
    [
        ("llama3_70b", {"tp": 1, "pp": 1}, DoesNotFitError, r"evaluation\.tp=1: .* set evaluation\.tp=4, or"),
        ("llama3_70b", {"gpus": 2}, DoesNotFitError, r"set evaluation\.gpus=4, or evaluation\.dtype=bf16, or"),
        ("llama3_405b", {"dtype": "bf16"}, DoesNotFitError, r"evaluation\.tp=8: .*; set evaluation\.nodes=2, or"),
        ("llama3_8b", {"gpus": 9}, ConfigError, r"evaluation\.gpus=9: nodes of 8 GPUs cannot share"),
        ("llama3_8b", {"gpus": 8, "nodes": 3}, ConfigError, r"evaluation\.nodes=3 does not divide evaluation\.gpus=8"),
        ("llama3_8b", {"pp": 40}, PlanError, r"evaluation: 40 pipeline stages .* use at most pp=32"),
        ("llama3_8b", {"tp": 3}, PlanError, r"evaluation: tp=3 does not divide the 8 key/value heads"),
        ("llama3_8b", {"gpus": 8, "tp": 3}, ConfigError, r"evaluation\.tp=3 does not divide evaluation\.gpus=8"),
    ],
)
def test_what_every_evaluation_would_fail_by_is_one_line_with_what_to_set(model, evaluation, error, message):
    with pytest.raises(error, match=message) as refused:
        degrees(model, **evaluation)
    assert "\n" not in str(refused.value)


def test_a_model_that_does_not_fit_is_evaluated_all_the_same_if_that_is_forced():
    assert degrees("llama3_405b", force=True) == (8, 1, 1, 1)
    assert degrees("llama3_70b", force=True, tp=1, pp=1) == (1, 1, 1, 1)


ROWS = 4
ROW = 500


def losses(model):
    tokens_BS = torch.zeros((ROWS, ROW), dtype=torch.int64)
    losses_of_rows(model, [Batch(tokens_BS, tokens_BS, None)])


def scores(model):
    log_likelihoods(model, [Continuation((row,), (0,) * ROW) for row in range(ROWS)], context_length=ROW)


def texts(model):
    prompts = [[row] * (ROW - 1 - row) for row in range(ROWS)]  # padded, so that there is a mask
    generate_rows(model, prompts, num_tokens=2, is_end=lambda row, tokens: row > 0)


@pytest.mark.parametrize("compute", [losses, scores, texts])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"num_kv_heads": 32, "kv_rank": 48, "rope_dim": 4}, nightly({"num_layers": 16, "num_kv_heads": 32})],
    ids=["few", "latents", "many"],
)
def test_evaluations_hold_as_many_bytes_as_they_are_estimated_to(compute, sizes):
    spec = replace(model_spec("llama3_8b"), **({"hidden_size": 256, "num_layers": 2, "ffn_size": 896} | sizes))
    spec = replace(spec, head_dim=8, vocab_size=128)
    model = whole_model(spec).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    with ByteCounter() as counter:
        counter.relabel(model.parameters(), "weights")
        compute(model)
    counted = max(peak.num_bytes for peak in counter.peaks.values())
    estimated = evaluation_bytes(spec, ParallelPlan(), 4, EvaluationForward(ROWS * ROW, is_kept=compute is texts))
    assert 0.95 * counted <= estimated <= 1.25 * counted  # the mask of padded prompts is left out
