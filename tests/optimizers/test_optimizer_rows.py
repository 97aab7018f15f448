from copy import deepcopy
from functools import partial

import pytest
import torch
from gathering_optimizer import NORMALISED
from torch import nn
from toy_optimizer import SIGNUM

from llama_core.config.run import TrainingConfig
from llama_core.errors import ConfigError
from llama_core.optimizers.registry import (
    DEFAULT_OPTIMIZER,
    OPTIMIZERS,
    optimizer_keys,
)
from llama_core.optimizers.traits import WEIGHT_BYTES, OptimizerType, State, Trained
from llama_core.training.optimizer import build_optimizer

KINDS = [*OPTIMIZERS.values(), SIGNUM, NORMALISED]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, request.param.name, request.param)
    return request.param


def step(optimizer, gradient, *, scale=1.0, skipped=False):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(float(skipped))
    optimizer.step()


def everything(model, optimizer):
    states = [state for states in optimizer.state.values() for state in states.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *states)]


def test_an_optimizer_makes_the_states_of_its_row_and_a_count_of_steps_at_most(kind, model):
    optimizer = build_optimizer(model, TrainingConfig(optimizer=kind.name))
    step(optimizer, 1.0)
    for name, parameter in model.named_parameters():
        sizes = {state: tensor.nbytes / parameter.numel() for state, tensor in optimizer.state[parameter].items()}
        assert sizes.pop("step", 0) <= WEIGHT_BYTES / parameter.numel()
        assert sizes == {state.name: state.num_bytes for state in kind.updates(name, parameter.ndim).states}


@pytest.mark.parametrize("kind", [*OPTIMIZERS.values(), SIGNUM], indirect=True, ids=lambda kind: kind.name)
def test_a_step_divides_by_the_scale_and_a_skipped_one_changes_nothing(kind, model):
    one, other = (deepcopy(model) for _ in range(2))
    scaled, plain = (build_optimizer(part, TrainingConfig(optimizer=kind.name)) for part in (one, other))
    step(scaled, 6.0, scale=2.0)
    step(plain, 3.0)
    before = everything(one, scaled)
    torch.testing.assert_close(before, everything(other, plain), rtol=0, atol=0)
    step(scaled, torch.nan, skipped=True)
    torch.testing.assert_close(everything(one, scaled), before, rtol=0, atol=0)


def test_an_update_moves_at_least_the_gradient_the_weight_and_every_state(kind):
    assert kind.read_bytes >= 2 * WEIGHT_BYTES
    assert kind.written_bytes >= WEIGHT_BYTES
    assert kind.moved_bytes <= 4 * (2 * WEIGHT_BYTES + kind.state_bytes), "each of them at most four times"


def test_the_settings_of_an_optimizer_are_keys_of_training(kind):
    assert set(kind.keys) <= set(optimizer_keys()) <= set(TrainingConfig.model_fields)


def test_adamw_is_the_default_and_has_sixteen_bytes_with_its_gradient():
    assert DEFAULT_OPTIMIZER == TrainingConfig().optimizer == "adamw"
    assert OPTIMIZERS.named("adamw").saved_for(Trained(1, 0)) + WEIGHT_BYTES == 16


def test_an_unknown_optimizer_is_refused_with_the_names_of_the_known_ones():
    known = ", ".join(OPTIMIZERS.names())
    with pytest.raises(ConfigError, match=rf"training\.optimizer=adamx is not one of {known}; did you mean 'adamw'"):
        OPTIMIZERS.named("adamx")


def test_the_first_pattern_that_fits_a_name_gives_its_rate_and_the_others_have_that_of_the_run():
    rated = partial(OptimizerType, "rated", module="", states=(State("sum"),), read_bytes=12, written_bytes=8)
    kind = rated(rates=(("*.attention_norm.*", 2.0), ("*norm.weight", 3.0)))
    names = ("layers.0.attention_norm.weight", "norm.weight", "output.weight")
    assert [kind.rate(name) for name in names] == [2.0, 3.0, 1.0]


def test_an_optimizer_that_cannot_skip_a_step_on_the_device_is_refused(monkeypatch):
    slow = OptimizerType("slow", module="toy_optimizer", states=(), read_bytes=8, written_bytes=4)
    monkeypatch.setitem(OPTIMIZERS, slow.name, slow)
    monkeypatch.setattr("toy_optimizer.build", lambda groups, training: torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(TypeError, match="the step of slow has to heed grad_scale and found_inf"):
        build_optimizer(nn.Linear(2, 2), TrainingConfig(optimizer="slow"))
