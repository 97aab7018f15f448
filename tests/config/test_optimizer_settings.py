from dataclasses import replace

import pytest
from gathering_optimizer import NORMALISED
from toy_optimizer import SIGNUM

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.optimizers.registry import OPTIMIZERS
from llama_core.sweep.objective import SweepObjective, problems_of_throughput, problems_of_training


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    for kind in (SIGNUM, NORMALISED):
        monkeypatch.setitem(OPTIMIZERS, kind.name, kind)


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({}, overrides)
    return caught.value.problems


def test_an_optimizer_that_is_not_in_the_registry_is_refused_with_those_that_are():
    (problem,) = problems("training.optimizer=adamx")
    assert problem.startswith(
        f"training.optimizer='adamx': choose one of {', '.join(OPTIMIZERS.names())}; did you mean"
    )


def test_a_setting_of_another_optimizer_is_refused_by_name():
    (problem,) = problems("training.optimizer=signum", "training.beta2=0.99")
    reason = "because training.optimizer=signum takes weight_decay, beta1"
    assert problem == f"training.beta2=0.99 has no effect, {reason}; leave it out"
    RunConfig.from_mapping({}, ["training.optimizer=signum", "training.beta1=0.8"])
    RunConfig.from_mapping({}, ["training.optimizer=signum", "training.beta2=0.95"])  # its default


def test_a_default_of_fine_tuning_is_no_setting_of_another_optimizer():
    adapters = ["strategy=lora", "training.optimizer=normalised"]
    assert RunConfig.from_mapping({}, adapters).training.weight_decay == 0
    (problem,) = problems(*adapters, "training.weight_decay=0.3")
    assert problem.startswith("training.weight_decay=0.3 has no effect")


def test_an_optimizer_without_settings_says_so(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "signum", replace(SIGNUM, keys=()))
    (problem,) = problems("training.optimizer=signum", "training.beta1=0.8")
    assert "training.optimizer=signum takes no settings of its own" in problem


def test_deepspeed_runs_only_optimizers_that_say_so():
    deepspeed = "parallel.zero_backend=deepspeed"
    (problem,) = problems("training.optimizer=normalised", deepspeed)
    assert problem == "parallel.zero_backend=deepspeed cannot run training.optimizer=normalised; use native"
    for optimizer in ("adamw", "signum"):
        RunConfig.from_mapping({}, [f"training.optimizer={optimizer}", deepspeed])


def test_deepspeed_and_optimizers_without_its_moments_refuse_bf16():
    (problem,) = problems("training.moments=bf16", "parallel.zero_backend=deepspeed")
    assert problem == "parallel.zero_backend=deepspeed cannot keep training.moments=bf16; use native, or fp32"
    (problem,) = problems("training.moments=bf16", "training.optimizer=signum")
    reason = "because training.optimizer=signum takes weight_decay, beta1"
    assert problem == f"training.moments=bf16 has no effect, {reason}; leave it out"


def test_other_moments_are_another_run():
    assert RunConfig().fingerprint() != RunConfig.from_mapping({}, ["training.moments=bf16"]).fingerprint()


def test_another_optimizer_is_another_run():
    one, other = (RunConfig.from_mapping({}, [f"training.optimizer={name}"]) for name in ("adamw", "signum"))
    assert one == RunConfig()
    assert one.fingerprint() != other.fingerprint()


def test_a_sweep_over_optimizers_is_ranked_by_loss_or_by_throughput():
    assert not list(problems_of_throughput(["training.optimizer"]))
    assert not list(problems_of_training(SweepObjective("loss"), ["training.optimizer"], RunConfig()))


def test_a_checkpoint_takes_the_trained_weights_and_their_states():
    for strategy in ("standard", "lora"):
        config = RunConfig.from_mapping({"strategy": strategy}, ["training.optimizer=signum"])
        assert config.checkpoint_bytes == 8 * config.spec.num_trainable_parameters
