"""The fewest GPUs that can train each model, as listed and as shown in docs/models.md."""

import json
from pathlib import Path

import pytest

from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.planning.search.auto import search
from llama_core.planning.search.least_memory import NothingFitsError, least_devices
from training_infra.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
H100 = gpu_spec("h100")
MODELS = [("llama2_7b", "standard"), ("llama2_13b", "standard"), ("llama3_70b", "lora")]


def request(model, gpus, strategy="standard"):
    return RunConfig.from_mapping(
        {
            "model": model,
            "strategy": strategy,
            "parallel": {"gpus": gpus},
            "training": {"precision": "bf16"},
            "launch": {"device": "cuda"},
        }
    )


@pytest.mark.parametrize(("model", "strategy"), MODELS)
def test_the_search_finds_a_plan_for_the_fewest_devices_and_none_for_half_of_them(model, strategy):
    least = least_devices(request(model, 1, strategy), H100)
    choice = search(request(model, least.gpus, strategy), H100.usable_bytes, H100)
    assert least.peak_bytes <= choice.limit_bytes
    with pytest.raises(NothingFitsError):
        search(request(model, least.gpus // 2, strategy), H100.usable_bytes, H100)


def test_a_model_that_fits_one_device_needs_one():
    assert least_devices(request("tiny_llama3_50m", 1), H100).gpus == 1


def test_the_readmes_table_is_the_computed_one(capsys):
    assert main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out in PAGE.read_text(), "training-infra models --markdown makes the page's table"


def test_no_model_needs_more_of_a_larger_device(capsys):
    def fewest(gpu_type):
        assert main(["models", "--gpu-type", gpu_type, "--json"]) == 0
        return {name: one["min_gpus_full"] for name, one in json.loads(capsys.readouterr().out).items()}

    h100, h200 = fewest("h100"), fewest("h200")
    assert all(h200[name] <= h100[name] for name in h100)
    assert h200["llama3_405b"] < h100["llama3_405b"]


def test_an_unknown_device_is_one_line(capsys):
    assert main(["models", "--gpu-type", "h101"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown GPU type 'h101'; choose one of a100_40gb, a100, ")
