import pytest
from toy_adapter import FACTORS

from llama_core.adapters.registry import ADAPTERS
from llama_core.config.run import RunConfig
from llama_core.config.strategy import LoRA
from llama_core.errors import ConfigError
from llama_core.sweep.objective import SweepObjective, problems_of_throughput, problems_of_training

KEY = "lora.method"
FACTORS_ON = ["strategy=lora", "lora.method=factors"]


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(ADAPTERS, FACTORS.name, FACTORS)


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({}, overrides)
    return caught.value.problems


def test_a_method_that_is_not_in_the_registry_is_refused_with_those_that_are():
    (problem,) = problems("strategy=lora", "lora.method=lorra")
    assert problem.startswith(f"lora.method='lorra': choose one of {', '.join(ADAPTERS.names())}; did you mean 'lora'")


def test_a_setting_of_another_method_is_refused_by_name():
    (problem,) = problems(*FACTORS_ON, "lora.lora_rank=8")
    assert problem == "lora_rank=8 has no effect, because lora.method=factors takes target_modules; leave it out"
    RunConfig.from_mapping({}, [*FACTORS_ON, "lora.lora_rank=16"])  # its default


def test_a_table_that_the_method_does_not_adapt_is_refused():
    (problem,) = problems(*FACTORS_ON, "model=llama3_8b", "lora.target_modules=[q_proj,lm_head]")
    assert problem == (
        "target_modules=['q_proj', 'lm_head'] has lm_head, which lora.method=factors does not adapt; leave it out"
    )


def test_a_method_without_a_rank_is_not_refused_for_a_matrix_that_is_small():
    sizes = ["architecture.num_kv_heads=1", "architecture.head_dim=8"]
    assert "is above the largest rank of k_proj" in problems("strategy=lora", *sizes)[0]
    assert RunConfig.from_mapping({}, [*FACTORS_ON, *sizes]).spec.num_adapter_parameters


def test_another_method_is_another_run_and_is_recorded():
    one, other = (RunConfig.from_mapping({}, ["strategy=lora", f"{KEY}={name}"]) for name in ("lora", "factors"))
    assert one == RunConfig.from_mapping({}, ["strategy=lora"])
    assert one.fingerprint() != other.fingerprint()
    assert "method: factors" in other.to_yaml()


def test_a_sweep_over_methods_is_ranked_by_loss_or_by_throughput():
    assert not list(problems_of_throughput([KEY]))
    assert not list(problems_of_training(SweepObjective("loss"), [KEY], RunConfig()))


def test_rslora_divides_by_the_root_of_the_rank_and_has_the_usual_factor_at_the_default_rank():
    assert LoRA(rslora=True, lora_rank=64, lora_alpha=16).scale == 2.0
    assert LoRA(rslora=True).scale == LoRA().scale
    assert (LoRA(rslora=True, lora_rank=64).scale, LoRA(rslora=True, lora_rank=64).alpha) == (1.0, 8)
