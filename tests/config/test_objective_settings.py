import pytest
from toy_objective import MASKED

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.objectives.registry import OBJECTIVES
from llama_core.sweep.objective import SweepObjective, problems_of_throughput, problems_of_training

KEY = "training.objective"


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, MASKED.name, MASKED)


def test_another_objective_is_another_run_and_is_recorded():
    one, other = (RunConfig.from_mapping({}, [f"{KEY}={name}"]) for name in ("next_token", "masked"))
    assert one == RunConfig()
    assert one.fingerprint() != other.fingerprint()
    assert "objective: masked" in other.to_yaml()
    assert other.objective == MASKED


def test_a_setting_of_another_objective_is_refused():
    with pytest.raises(
        ConfigError, match=r"training\.z_loss=0\.1 has no effect, because training\.objective=masked takes"
    ):
        RunConfig.from_mapping({"training": {"objective": "masked", "z_loss": 0.1}})


@pytest.mark.parametrize(("strategy", "rate", "decay"), [("standard", 1e-6, 0.1), ("lora", 5e-6, 0.0)])
def test_pairs_of_answers_take_one_epoch_at_a_low_rate(strategy, rate, decay):
    settings = {"strategy": strategy, "training": {"objective": "dpo", "init_from": "weights"}}
    training = RunConfig.from_mapping({"model": "tiny_llama3_50m"} | settings).training
    assert (training.learning_rate, training.weight_decay, training.epochs) == (rate, decay, 1.0)
    given = {"objective": "dpo", "learning_rate": 1e-3}
    assert RunConfig.from_mapping({"strategy": strategy, "training": given}).training.learning_rate == 1e-3


def test_no_run_is_resumed_with_another_objective():
    (known,) = [known for known in RunConfig.known_keys() if known.name == KEY]
    assert known.key.on_resume == "refuse"


def test_a_sweep_over_objectives_is_ranked_by_throughput_but_not_by_losses_of_different_kinds():
    assert not list(problems_of_throughput([KEY]))
    (problem,) = problems_of_training(SweepObjective("loss"), [KEY], RunConfig())
    assert str(problem) == f"grid: with other {KEY}, held-out losses cannot be compared; leave it out"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"strategy": "lora"}, "architecture.mtp_layers=1: adapters train no prediction modules"),
        ({"training": {"objective": "dpo"}}, "mtp_layers=1: training.objective=dpo trains no prediction modules"),
        ({"architecture": {}, "training": {"mtp_weight": 0.1}}, "training.mtp_weight=0.1 has no effect without"),
    ],
)
def test_prediction_modules_are_trained_with_the_next_token_and_all_weights(changed, told):
    mapping = {"model": "tiny_llama3_50m", "architecture": {"mtp_layers": 1}}
    assert RunConfig.from_mapping(mapping | {"training": {"mtp_weight": 0.1}}).spec.mtp_layers == 1
    with pytest.raises(ConfigError) as error:
        RunConfig.from_mapping(mapping | changed)
    assert told in str(error.value)
