"""Experts compute what Mixtral computes, in every dtype, and the auxiliary losses enter as gradients only."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import hugging_face_config
from parity import UNTIED
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from llama_core.config.config_json.reading import read_folder
from llama_core.config.strategy import MoE
from llama_core.models import grouped
from llama_core.models.batch import Batch
from llama_core.models.grouped import add_to_groups, grouped_product
from llama_core.models.layers import FeedForward
from llama_core.models.llama import Llama, build_llama, initialize_weights
from llama_core.models.moe import MixtureOfExperts, prepare_routers

SPEC = replace(UNTIED, num_layers=3, moe=MoE(num_experts=4, experts_per_token=2))
TOKENS = torch.randint(0, SPEC.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))


def with_moe(**settings):
    return replace(SPEC, moe=SPEC.moe.model_copy(update=settings))


def mixture(dtype=torch.float64, **settings):
    spec = with_moe(**settings)
    layer = MixtureOfExperts(spec, spec.moe).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def stream(dtype=torch.float64, rows=2, seed=2):
    return torch.randn(rows, 16, SPEC.hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def best_experts(scores, moe):
    """Return the experts with the best scores, of the groups whose two best have the highest sum."""
    size = moe.num_experts // moe.expert_groups
    groups = [list(range(first, first + size)) for first in range(0, moe.num_experts, size)]
    groups.sort(key=lambda group: -sum(sorted(scores[e] for e in group)[-2:]))
    left = [e for group in groups[: moe.groups_per_token] for e in group]
    return sorted(left, key=lambda e: -scores[e])[: moe.experts_per_token]


def expert_by_expert(layer, x):
    """Return what a mixture computes, token by token; the gates are softmaxes as the papers write them."""
    moe, rows = layer.moe, []
    w1, w2, w3 = (matrix.weight for matrix in layer.experts.children())
    b1, b2, b3 = ([0] * moe.num_experts if m.bias is None else m.bias for m in layer.experts.children())
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token + (0 if layer.router.bias is None else layer.router.bias)
        everything = logits.exp().sum()
        scores = (logits.sigmoid() if moe.has_sigmoids else logits.exp() / everything).tolist()
        chosen = best_experts(scores, moe)
        gates = {
            "softmax_chosen": [logits[e].exp() / logits[chosen].exp().sum() for e in chosen],
            "softmax_all": [logits[e].exp() / everything for e in chosen],
            "sigmoid": [1 / (1 + (-logits[e]).exp()) for e in chosen],
            "sigmoid_chosen": [logits[e].sigmoid() / logits[chosen].sigmoid().sum() for e in chosen],
        }[moe.gates]
        gates = [moe.gate_scale * gate for gate in gates]
        row = layer.shared(token) if layer.shared else 0
        for gate, e in zip(gates, chosen, strict=True):
            inner, outer = (gate, 1) if moe.gate_inputs else (1, gate)
            hidden = F.silu(w1[e] @ token * inner + b1[e]) * (w3[e] @ token * inner + b3[e])
            row = row + outer * (w2[e] @ hidden + b2[e])
        rows.append(row)
    return torch.stack(rows).view_as(x)


def mixtral(spec):
    experts = {"num_local_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.experts_per_token}
    return MixtralForCausalLM(hugging_face_config(spec, MixtralConfig, **experts)).eval()


@torch.no_grad()
def test_logits_are_those_of_mixtral():
    model, theirs = build_llama(SPEC, device="cpu", seed=0), mixtral(SPEC)
    names = {"attention": "self_attn", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj"}
    names |= {"feed_forward": "mlp", "router": "gate", "attention_norm": "input_layernorm"}
    names |= {"ffn_norm": "post_attention_layernorm", "tok_embeddings": "embed_tokens"}
    state = {}
    for name, weight in model.named_parameters():
        parts = [names.get(part, part) for part in name.split(".")]
        state["lm_head.weight" if name == "output.weight" else "model." + ".".join(parts)] = weight * 5
        weight.copy_(weight * 5)  # larger, so that the router's choices are clear
    for layer in range(SPEC.num_layers):
        experts = f"model.layers.{layer}.mlp.experts"
        w1, w2, w3 = (state.pop(f"{experts}.{name}.weight") for name in ("w1", "w2", "w3"))
        state |= {f"{experts}.gate_up_proj": torch.cat((w1, w3), dim=1), f"{experts}.down_proj": w2}
    theirs.load_state_dict(state)
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


TRAITS = {
    "none": {},
    "a softmax over all": {"gates": "softmax_all"},
    "sigmoids": {"gates": "sigmoid"},
    "narrow experts": {"expert_size": 24},
    "an expert for all tokens": {"shared_size": 40},
    "gates on inputs": {"gate_inputs": True},
    "biases": {"biases": True},
    "sigmoids over their sum": {"gates": "sigmoid_chosen", "gate_scale": 2.5},
    "groups": {"num_experts": 12, "expert_groups": 3, "groups_per_token": 2},
    "groups, a softmax over all": {"num_experts": 8, "expert_groups": 2, "gates": "softmax_all"},
    "gates on inputs, sigmoids, shared": {"gate_inputs": True, "gates": "sigmoid", "shared_size": 40},
}


@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
@pytest.mark.parametrize("experts_per_token", [1, 2, 4])
def test_output_and_gradients_are_those_of_the_experts_one_token_at_a_time(traits, experts_per_token):
    layer = mixture(**traits, experts_per_token=experts_per_token)
    x, upstream = stream().requires_grad_(), stream(seed=3)
    inputs = (x, *layer.parameters())
    ours, theirs = (torch.autograd.grad(out, inputs, upstream) for out in (layer(x), expert_by_expert(layer, x)))
    torch.testing.assert_close(layer(x), expert_by_expert(layer, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_and_the_loop_agree(dtype, monkeypatch):
    layer, x, upstream = mixture(dtype, biases=True), stream(dtype).requires_grad_(), stream(dtype, seed=3)
    kernel = torch.autograd.grad(layer(x), (x, *layer.parameters()), upstream)
    monkeypatch.setattr(grouped, "_KERNEL_DTYPES", {})
    loop = torch.autograd.grad(layer(x), (x, *layer.parameters()), upstream)
    precision = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(kernel, loop, rtol=precision, atol=precision * max(float(g.abs().max()) for g in loop))


@pytest.mark.parametrize("sizes", [(7, 0, 3), (0, 0, 0), (0, 10, 0)])
@pytest.mark.parametrize(("columns", "rows"), [(8, 16), (7, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_groups_of_any_size_and_matrices_of_any_shape_multiply(sizes, columns, rows, dtype):
    x = torch.randn(sum(sizes), columns, dtype=dtype, requires_grad=True)
    w = torch.randn(len(sizes), columns, rows, dtype=dtype, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0).int()
    expected = torch.cat([part @ matrix for part, matrix in zip(x.split(sizes), w.unbind(), strict=True)])
    out = grouped_product(x, w, ends)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)[:, :1].expand_as(out)  # not contiguous
    ours, theirs = (torch.autograd.grad(y, (x, w), upstream) for y in (out, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("sizes", [(7, 0, 3), (0, 0, 0), (0, 10, 0)])
def test_the_row_of_its_group_is_added_to_each_row(sizes):
    x = torch.randn(sum(sizes), 5, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(len(sizes), 5, dtype=torch.float64, requires_grad=True)
    out = add_to_groups(x, rows, torch.tensor(sizes).cumsum(0).int())
    expected = x + rows.repeat_interleave(torch.tensor(sizes), dim=0)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(y, (x, rows), upstream) for y in (out, expected))
    torch.testing.assert_close(ours, theirs)


def auxiliary_loss(layer, x):
    """Return the coefficients times the losses, each averaged over tokens and summed over rows, as the papers do."""
    moe, total = layer.moe, 0
    for row in x:
        logits = row @ layer.router.weight.T
        probabilities = logits.softmax(-1)
        if moe.has_sigmoids:
            probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        chosen = F.one_hot(logits.topk(moe.experts_per_token).indices, moe.num_experts).sum(1)
        fractions = chosen.double().mean(0) / moe.experts_per_token
        balance = moe.num_experts * (fractions * probabilities.mean(0)).sum()
        z = logits.exp().sum(-1).log().square().mean()
        total = total + moe.balance_loss_coefficient * balance + moe.z_loss_coefficient * z
    return total


def test_an_expert_without_tokens_has_no_gradient_where_the_kernel_writes_none(monkeypatch):
    """On Blackwell its part of the result is whatever was in memory."""
    kernel = F.grouped_mm

    def skipping(x, y, offs):
        out = kernel(x, y, offs=offs)
        return out.masked_fill((offs.diff(prepend=offs.new_zeros(1)) == 0)[:, None, None], torch.nan)

    x, y = torch.ones(16, 8), torch.ones(16, 8)
    ends = torch.tensor([0, 5, 5, 16, 16], dtype=torch.int32)
    expected = grouped.grouped_outer_product(x, y, ends)
    monkeypatch.setattr(F, "grouped_mm", skipping)
    assert grouped.grouped_outer_product(x, y, ends).isnan().any()
    monkeypatch.setattr(grouped, "skips_empty_groups", lambda device: True)
    assert torch.equal(grouped.grouped_outer_product(x, y, ends), expected)


@pytest.mark.parametrize("gates", ["softmax_chosen", "sigmoid", "sigmoid_chosen"])
def test_the_backward_adds_the_gradients_of_the_auxiliary_losses_times_the_scale(gates):
    layer = mixture(gates=gates, balance_loss_coefficient=0.3, z_loss_coefficient=0.7)
    x, upstream, scale = stream().requires_grad_(), stream(seed=3), torch.tensor(0.125, dtype=torch.float64)
    inputs = (x, layer.router.weight)
    plain = layer(x)
    expected = torch.autograd.grad((plain * upstream).sum() + scale * auxiliary_loss(layer, x), inputs)
    prepare_routers(layer, scale)
    out = layer(x)
    torch.testing.assert_close(out, plain, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, upstream), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_folders_weight_of_the_balance_loss_weighs_as_in_transformers(kind, tmp_path):
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.25}
    sizes = {"vocab_size": 66, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | sizes | heads | experts))
    read = read_folder(str(tmp_path))
    layer = mixture(balance_loss_coefficient=read.moe.balance_loss_coefficient, experts_per_token=3)
    x = stream(rows=1)
    prepare_routers(layer, torch.ones((), dtype=torch.float64))
    layer(x)
    balance = layer.statistics[-3].detach() / 16
    logits = layer.router(x).detach().flatten(0, 1)
    theirs = load_balancing_loss_func((logits,) * read.num_layers, 4, 3)  # all layers alike
    ours = read.num_layers * read.moe.balance_loss_coefficient * balance
    assert float(ours) == pytest.approx(0.25 * float(theirs), rel=1e-5)


def test_statistics_count_every_forward_with_gradients_once():
    layer = mixture(balance_loss_coefficient=1.0, z_loss_coefficient=0.0)
    prepare_routers(layer, torch.ones((), dtype=torch.float64))
    x = stream(rows=1)
    losses = [auxiliary_loss(layer, x).item(), auxiliary_loss(layer, -x).item()]
    layer(x), layer(-x)
    with torch.no_grad():
        layer(x)
    *tokens, balance, _, entropy = layer.statistics.tolist()
    assert sum(tokens) == 2 * 16 * 2
    assert balance == pytest.approx(16 * sum(losses))
    assert 0 < entropy < 2 * 16 * torch.tensor(4.0).log()


def test_balanced_tokens_have_the_least_balance_loss_and_equal_logits_the_largest_entropy():
    layer = mixture()
    torch.nn.init.zeros_(layer.router.weight)
    prepare_routers(layer, torch.ones((), dtype=torch.float64))
    layer(stream())
    *_, balance, z, entropy = (layer.statistics / 32).tolist()
    log_experts = float(torch.tensor(4.0, dtype=torch.float64).log())
    assert (balance, z, entropy) == pytest.approx((1.0, log_experts**2, log_experts))


@pytest.mark.parametrize(("moe_layers", "sparse"), [(None, [0, 1, 2]), ((1,), [1]), (2, [1]), (3, [2])])
@pytest.mark.parametrize("traits", TRAITS.values(), ids=TRAITS)
def test_only_the_layers_asked_for_have_experts(moe_layers, sparse, traits):
    spec = with_moe(moe_layers=moe_layers, **traits)
    with torch.device("meta"):
        model = Llama(spec)
    kinds = [type(block.feed_forward) for block in model.layers.values()]
    assert kinds == [MixtureOfExperts if layer in sparse else FeedForward for layer in range(3)]
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_fake_step_has_the_shapes_of_a_real_one_and_counts_the_flops_of_active_experts(dtype):
    def step(model):
        initialize_weights(model.to_empty(device="cpu"), seed=0)
        prepare_routers(model, torch.ones((), dtype=torch.promote_types(dtype, torch.float32)))
        with FlopCounterMode(display=False) as counter:
            model(TOKENS, Batch(TOKENS, TOKENS, None)).backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
        return counter.get_flop_counts()["Global"]

    with torch.device("meta"):
        models = [Llama(SPEC, compute_dtype=dtype) for _ in range(2)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = step(models[0])
    assert step(models[1]) == fake
    pairs = TOKENS.numel() * SPEC.moe.experts_per_token * SPEC.num_layers
    counted = sum(flops for op, flops in fake.items() if "grouped" in str(op))
    assert counted == 3 * 3 * 2 * pairs * SPEC.hidden_size * SPEC.ffn_size


@pytest.mark.parametrize(
    "traits",
    [
        {},
        {"gate_inputs": True, "gates": "sigmoid", "shared_size": 40, "biases": True},
        {"gates": "sigmoid_chosen", "gate_scale": 2.5, "balance_bias": True, "num_experts": 8, "expert_groups": 2},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_is_one_graph_and_computes_the_same(dtype, traits):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer, x, upstream = mixture(dtype, **traits), stream(dtype).requires_grad_(), stream(dtype, seed=3)
    prepare_routers(layer, torch.ones(()))
    eager = torch.autograd.grad(layer(x), (x, *layer.parameters()), upstream)
    counted = layer.statistics.clone()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        prepare_routers(layer, torch.ones(()))
        again = torch.autograd.grad(compiled(x), (x, *layer.parameters()), upstream)
    assert len(graphs) == 1
    torch.testing.assert_close(again, eager)
    torch.testing.assert_close(layer.statistics, counted)
