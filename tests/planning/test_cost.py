import pytest

from llama_core.config.hardware import gpu_spec
from llama_core.config.models import model_names, model_spec
from llama_core.planning.cost import flops_per_token, hardware_flops_per_token, model_flops_utilisation


@pytest.mark.parametrize("name", model_names())
def test_every_multiplied_parameter_costs_six_flops_a_token(name):
    spec = model_spec(name)
    norms = spec.hidden_size * (2 * spec.num_layers + 1)
    look_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    assert flops_per_token(spec, 0) == 6 * (spec.num_parameters - norms - look_up)


def test_attention_costs_twelve_flops_per_score_and_half_of_it_when_causal():
    spec = model_spec("llama3_8b")
    matmuls, scores = flops_per_token(spec, 0), 12 * 32 * 32 * 128 * 8192
    assert flops_per_token(spec, 8192) - matmuls == scores
    assert flops_per_token(spec, 8192, causal=True) - matmuls == scores / 2


def test_a_token_of_the_8b_model_costs_about_six_times_its_matrices_and_its_scores():
    assert flops_per_token(model_spec("llama3_8b"), 8192) == pytest.approx(45.03e9 + 12.88e9, rel=1e-3)


def test_full_recomputation_adds_a_third_where_the_head_is_small():
    spec = model_spec("llama3_405b")
    ratio = hardware_flops_per_token(spec, 8192, "full") / flops_per_token(spec, 8192)
    assert ratio == pytest.approx(4 / 3, rel=2e-3)


def test_without_recomputation_the_hardware_does_what_the_model_needs():
    spec = model_spec("llama2_7b")
    assert hardware_flops_per_token(spec, 4096, "none") == flops_per_token(spec, 4096)


def test_a_run_at_the_devices_peak_has_a_utilisation_of_one():
    spec, device = model_spec("llama3_8b"), gpu_spec("h100")
    tokens_per_second = 8 * 989e12 / flops_per_token(spec, 8192)
    assert model_flops_utilisation(tokens_per_second, spec, 8192, 8, device) == pytest.approx(1)


def test_utilisation_is_unknown_where_the_peak_is():
    assert model_flops_utilisation(1000.0, model_spec("llama3_8b"), 8192, 1, None) is None
