import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from whole_logits import logits_of_documents

from llama_core.config.models import model_names, model_spec
from llama_core.config.parameter_counts import num_parameters_of
from llama_core.config.strategy import LoRA, MoE
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama, build_llama, initialize_parameter, initialize_weights, with_adapters

TIED = replace(model_spec("tiny_llama3_50m"), hidden_size=64, num_layers=3, head_dim=16, ffn_size=96, vocab_size=256)
UNTIED = replace(TIED, tied_embeddings=False)
ADAPTED_TABLES = replace(UNTIED, lora=LoRA(target_modules=("q_proj", "embed_tokens", "lm_head")))


def build(spec, seed=0, compute_dtype=torch.float32):
    return build_llama(spec, device="cpu", compute_dtype=compute_dtype, seed=seed)


def random_tokens(*shape):
    return torch.randint(0, TIED.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", model_names())
def test_every_variant_builds_on_meta_with_the_number_of_parameters_its_spec_states(name):
    spec = model_spec(name)
    with torch.device("meta"):
        model = Llama(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("spec", [TIED, UNTIED])
def test_the_loss_sum_is_the_cross_entropy_of_the_logits_over_targets_that_count(spec):
    model = build(spec)
    tokens = random_tokens(2, 16)
    targets = random_tokens(2, 16).masked_fill(torch.arange(16) % 5 == 0, -100)
    expected = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, Batch(tokens, targets, None)), expected)


@pytest.mark.parametrize("spec", [TIED, UNTIED])
def test_every_parameter_receives_the_gradient_of_the_plain_loss(spec):
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16)
    ours, plain = build(spec), build(spec)
    ours(tokens, Batch(tokens, targets, None)).backward()
    torch.nn.functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for (name, parameter), reference in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_packed_documents_give_the_same_logits_as_each_alone():
    model = build(UNTIED)
    tokens = random_tokens(1, 30)
    positions = torch.cat((torch.arange(11), torch.arange(19)))[None]
    alone = torch.cat((model(tokens[:, :11]), model(tokens[:, 11:])), dim=1)
    torch.testing.assert_close(logits_of_documents(model, tokens, positions), alone, rtol=1e-4, atol=1e-5)


def test_positions_of_one_document_per_row_change_nothing():
    model = build(TIED)
    tokens = random_tokens(2, 16)
    torch.testing.assert_close(
        logits_of_documents(model, tokens, torch.arange(16).expand(2, -1)), model(tokens), rtol=1e-4, atol=1e-5
    )


def test_no_logit_depends_on_a_later_token():
    model = build(TIED)
    tokens = random_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % TIED.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_bf16_compute_keeps_fp32_parameters_and_gradients_and_nearly_the_same_loss():
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16)
    exact, model = build(TIED), build(TIED, compute_dtype=torch.bfloat16)
    batch = Batch(tokens, targets, None)
    loss = model(tokens, batch)
    loss.backward()
    assert model(tokens, layers=range(1)).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(loss, exact(tokens, batch), rtol=2e-3, atol=0)  # bf16 has 8 bits


def test_a_training_step_runs_on_fake_tensors_with_packed_documents():
    spec = replace(model_spec("llama3_405b"), num_layers=2)
    with torch.device("meta"):
        model = Llama(spec, compute_dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        initialize_weights(model, seed=0)
        tokens = torch.zeros((1, 4096), dtype=torch.long)
        model(tokens, Batch(tokens, tokens, tokens)).backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_the_residual_stream_has_its_shape_on_the_meta_device():
    with torch.device("meta"):
        model = Llama(TIED)
        stream = model(torch.zeros((2, 8), dtype=torch.long), layers=range(TIED.num_layers - 1))
    assert stream.shape == (2, 8, TIED.hidden_size)


@pytest.mark.parametrize("spec", [TIED, UNTIED])
def test_the_parts_of_a_model_in_turn_match_the_whole(spec):
    whole, tokens = build(spec), random_tokens(2, 16)
    cut = spec.num_layers // 2
    first, last = (Llama(spec, layers=layers) for layers in (range(cut), range(cut, spec.num_layers)))
    for part in (first, last):
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
    batch = Batch(tokens, tokens, None)
    stream = first(tokens, batch, layers=range(cut))
    torch.testing.assert_close(
        last(stream, batch, layers=range(cut, spec.num_layers)), whole(tokens, batch), rtol=0, atol=0
    )
    assert {*first.state_dict(), *last.state_dict()} == {*whole.state_dict()}


@pytest.mark.parametrize("spec", [TIED, UNTIED, replace(TIED, moe=MoE(num_experts=4)), ADAPTED_TABLES])
def test_a_part_has_as_many_parameters_as_the_spec_states(spec):
    for layers in (range(1), range(1, 2), range(1, 3), range(3)):
        with torch.device("meta"):
            part = with_adapters(Llama(spec, layers=layers))
        assert sum(parameter.numel() for parameter in part.parameters()) == num_parameters_of(spec, layers)


def test_initial_weights_have_the_stated_moments_and_cut():
    deep = replace(UNTIED, num_layers=8, hidden_size=256, ffn_size=512)
    cut_std = 0.9866  # of a standard normal cut at three: sqrt(1 - 6 * pdf(3) / (2 * cdf(3) - 1))
    for name, weight in build(deep).named_parameters():
        residual = name.endswith(("wo.weight", "w2.weight"))
        std = 0.02 / (math.sqrt(2 * 8) if residual else 1.0)
        expected = (1.0, 0.0, 1.0) if weight.ndim == 1 else (0.0, cut_std * std, 3 * std)
        sampling_error = 5 * std / math.sqrt(weight.numel())
        assert weight.mean().item() == pytest.approx(expected[0], abs=sampling_error), name
        assert weight.std().item() == pytest.approx(expected[1], abs=sampling_error), name
        assert weight.abs().max().item() <= expected[2] * (1 + 1e-6), name


def test_a_weight_without_a_row_gets_no_initial_values_by_accident():
    with pytest.raises(NotImplementedError, match=r"layers\.0\.feed_forward\.w2\.bias has no row among the weights"):
        initialize_parameter("layers.0.feed_forward.w2.bias", torch.empty(4), TIED, seed=0)


def test_initial_weights_depend_on_seed_and_name_but_not_on_other_layers():
    whole = dict(build(TIED).named_parameters())
    part = build(TIED)
    del part.layers["0"]
    initialize_weights(part, seed=0)
    assert all(torch.equal(weight, whole[name]) for name, weight in part.named_parameters())
    assert not torch.equal(whole["layers.1.attention.wq.weight"], whole["layers.2.attention.wq.weight"])


def test_another_seed_draws_other_weights():
    weights, others = build(TIED, seed=0).state_dict(), build(TIED, seed=1).state_dict()
    matrices = [name for name in weights if "norm" not in name]
    assert not any(torch.equal(weights[name], others[name]) for name in matrices)
