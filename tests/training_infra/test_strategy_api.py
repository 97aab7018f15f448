"""Strategies as users spell them, from Python and on the command line."""

import json

import pytest

from llama_core.errors import ConfigError
from training_infra import LlamaTrainingOrchestrator, TrainingStrategy, estimate_requirements
from training_infra.cli import main


def test_python_and_the_command_line_estimate_70b_adapters_alike(capsys):
    strategy = TrainingStrategy(name="lora", parameters={"lora_rank": 64, "lora_alpha": 128})
    plan = {"tp": 8, "recompute": "full"}
    needs = estimate_requirements("llama3_70b", num_gpus=8, gpu_type="h100", strategy=strategy, **plan)
    model, devices = ["--model", "llama3_70b"], ["--gpus", "8", "--gpu-type", "h100", "--tensor-parallel", "8"]
    flags = ["--strategy", "lora", "--lora-rank", "64", "--activation-checkpointing", "--json"]
    assert main(["estimate-memory", *model, *devices, *flags]) == 0
    assert needs["fits"]
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == needs["memory_per_gpu_gb"] * 1e9


def test_experts_are_part_of_an_orchestrators_model():
    parameters = {"num_experts": 16, "experts_per_token": 2, "moe_layers": [4, 8, 12, 16, 20, 24, 28]}
    strategy = TrainingStrategy(name="moe", parameters=parameters)
    one = LlamaTrainingOrchestrator(model_variant="llama2_13b", training_strategy=strategy, num_gpus=8)
    assert one.config.spec.num_sparse_layers == 7


def test_hybrid_takes_the_parameters_of_both():
    parameters = {"lora_rank": 8, "num_experts": 4, "trainable": ["*norm*"]}
    one = LlamaTrainingOrchestrator("tiny_llama3_50m", TrainingStrategy("hybrid", parameters))
    spec = one.config.spec
    assert (spec.lora.lora_rank, spec.moe.num_experts, spec.trainable) == (8, 4, ("*norm*",))


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        (
            "lora",
            {"lora_rnk": 8},
            "strategy 'lora' takes method, lora_rank, lora_alpha, rslora, initial_values, base, lora_dropout, "
            "target_modules, trainable, not lora_rnk; did you mean 'lora_rank'?",
        ),
        (
            "DPO",
            {},
            "unknown strategy 'DPO'; a strategy says which weights are trained (standard, lora, moe, hybrid); what "
            "they are trained for is training.objective=dpo (--objective)",
        ),
        ("standard", {"lora_rank": 8}, "strategy 'standard' takes no parameters, not lora_rank"),
    ],
)
def test_a_parameter_that_a_strategy_does_not_have_is_refused(name, parameters, problem):
    with pytest.raises(ConfigError) as caught:
        TrainingStrategy(name=name, parameters=parameters)
    assert caught.value.problems == (problem,)
