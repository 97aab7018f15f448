import json
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from parity import UNTIED, draw_adapters
from safetensors.torch import save_file
from toy_adapter import FACTORS

from llama_core.adapters.registry import ADAPTERS, DEFAULT_ADAPTER
from llama_core.config.model_weights import adapter_weight, is_decayed, matrix_name
from llama_core.config.pretrained import settings_of_weights
from llama_core.config.strategy import EMBEDDING, HEAD, MATRICES, LoRA, adaptable
from llama_core.errors import ConfigError
from llama_core.hugging_face.peft import ADAPTER_CONFIG, adapter_json, adapter_weights, peft_name
from llama_core.hugging_face.peft import ADAPTERS as FILE
from llama_core.models.adapters import method_of
from llama_core.models.llama import Llama, build_llama, initialize_weights, with_adapters
from llama_core.weight_rows import INPUTS, OUTPUTS

KINDS = [*ADAPTERS.values(), FACTORS]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request, monkeypatch):
    monkeypatch.setitem(ADAPTERS, request.param.name, request.param)
    return request.param


@pytest.fixture
def spec(kind):
    sizes = dict.fromkeys(kind.sizes, 4)
    return replace(UNTIED, num_layers=2, lora=LoRA(method=kind.name, target_modules=adaptable(kind), **sizes))


def adapted_model(spec):
    model = with_adapters(Llama(spec, compute_dtype=torch.float64).double())
    initialize_weights(model, 0)
    return model


def logits(model):
    tokens_BS = torch.randint(0, UNTIED.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens_BS)


def test_the_modules_of_a_kind_train_the_weights_of_its_rows_and_nothing_else(spec):
    parameters = adapted_model(spec).named_parameters()
    assert {name: weight.shape for name, weight in parameters if weight.requires_grad} == spec.adapter_shapes


def test_adapters_change_nothing_at_first(spec):
    plain = replace(spec, lora=None)
    base = build_llama(plain, device="cpu", compute_dtype=torch.float64, seed=0).double()
    initialize_weights(base, 0)
    torch.testing.assert_close(logits(adapted_model(spec)), logits(base), rtol=1e-12, atol=1e-12)


def test_a_merged_matrix_computes_what_it_does_with_its_adapter(spec):
    model = adapted_model(spec)
    before = logits(model)
    draw_adapters(model)
    for name in spec.adapter_shapes:
        model.get_parameter(name).data.mul_(1.5)
    expected = logits(model)
    assert (expected - before).abs().max() > 1e-3
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    for name in spec.adapted:
        matrix_OI = weights[name].t() if name == "tok_embeddings.weight" else weights[name]
        rows = spec.lora.weights(matrix_name(name.removesuffix(".weight")))
        adapter = {row.name: weights[name.removesuffix("weight") + row.name] for row in rows}
        method_of(spec.lora.kind).merge(matrix_OI, adapter, spec.lora)
    plain = Llama(replace(spec, lora=None), compute_dtype=torch.float64).double()
    plain.load_state_dict({name: weights[name] for name in spec.parameter_shapes})
    torch.testing.assert_close(logits(plain), expected, rtol=1e-10, atol=1e-10)


def test_a_folder_of_a_kind_is_read_as_it_is_written(kind, spec, tmp_path):
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(adapter_json(spec.lora, str(tmp_path))))
    save_file({peft_name(name): torch.ones(shape) for name, shape in spec.adapter_shapes.items()}, tmp_path / FILE)
    assert adapter_weights(spec, tmp_path).keys() == spec.adapter_shapes.keys()
    brought = LoRA.model_validate(settings_of_weights(str(tmp_path))["lora"])
    assert brought.kind is kind
    assert brought.target_modules == spec.lora.target_modules
    assert all(brought.resolved(key) == spec.lora.resolved(key) for key in kind.keys)


def test_the_shapes_of_a_row_are_sides_of_its_matrix_and_settings(kind):
    assert set(kind.keys) <= set(LoRA.model_fields)
    assert kind.sizes <= set(kind.keys)
    for weight in (*kind.weights, *kind.of_embedding):
        assert {INPUTS, OUTPUTS}.intersection(weight.shape)
        assert weight.divided == "adapted"


def test_a_name_is_the_same_weight_in_every_kind():
    """Whether a parameter is decayed is asked by its name alone."""
    named = defaultdict(set)
    for kind in KINDS:
        for weight in kind.weights:
            named[weight.name].add(weight)
    assert all(len(weights) == 1 for weights in named.values())


def test_a_weight_of_an_adapter_is_decayed_if_its_row_says_so(spec):
    for name in spec.adapter_shapes:
        assert is_decayed(name) == adapter_weight(name)[1].decayed


def test_what_a_kind_can_adapt_are_the_matrices_of_layers_and_the_tables_that_it_names(kind):
    assert adaptable(kind)[: len(MATRICES)] == MATRICES
    assert (EMBEDDING in adaptable(kind), HEAD in adaptable(kind)) == (bool(kind.of_embedding), kind.adapts_head)


def test_lora_is_the_default():
    assert DEFAULT_ADAPTER == LoRA().method == "lora"


def test_an_unknown_kind_is_refused_with_the_names_of_the_known_ones():
    known = ", ".join(ADAPTERS.names())
    with pytest.raises(ConfigError, match=rf"lora\.method=lorra is not one of {known}; did you mean 'lora'"):
        ADAPTERS.named("lorra")
