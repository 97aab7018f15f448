import pytest
from toy_objective import MASKED

from llama_core.config.run import RunConfig
from llama_core.objectives.registry import OBJECTIVES
from llama_core.sweep.objective import problems_of_loss, problems_of_throughput

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


def test_no_run_is_resumed_with_another_objective():
    (known,) = [known for known in RunConfig.known_keys() if known.name == KEY]
    assert known.key.on_resume == "refuse"


def test_a_sweep_over_objectives_is_ranked_by_throughput_but_not_by_losses_of_different_kinds():
    assert not list(problems_of_throughput([KEY]))
    (problem,) = problems_of_loss([KEY], RunConfig())
    assert str(problem) == f"grid: with other {KEY}, held-out losses cannot be compared; leave it out"
