"""A layer's program keeps, holds and multiplies what the layer itself does, counted on fake tensors."""

import random
from dataclasses import replace

import pytest
from architectures import alone, check_table, drawn_block, each_alone
from blocks import counted
from tiers import nightly
from toy_adapter import FACTORS

from llama_core.adapters.registry import ADAPTERS, DEFAULT_ADAPTER
from llama_core.config.models import model_spec
from llama_core.config.strategy import LoRA, MoE
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.program.layer import Layer
from llama_core.planning.program.operations import FP32_BYTES
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.setting import Setting
from llama_core.planning.work import Work


def drawn(seed, *, moe=False, math=False, method=None, base=None, latents=False):
    """Return a random layer: a model of it, its setting, what is recomputed, and whether its input has a gradient.

    With a ``method``, it has adapters of that kind; with a ``base``, LoRA over matrices held so.
    """
    draw = random.Random(seed)
    spec = drawn_block(draw, moe=moe, method=method, base=base, latents=latents)
    mode = draw.choice(["none", "selective", "full"])
    plan = ParallelPlan(
        microbatch_size=draw.choice([1, 2]),
        num_microbatches=draw.choice([1, 2]),
        compile=draw.random() < 0.25,
        attention="math" if math else "auto",
        recompute=mode,
    )
    seq_len = draw.choice([128, 512, 2048])
    precision = draw.choice(["bf16", "bf16", "fp32"])
    documents = "mask" if spec.attention(0).hides_in_document else "none"
    work = Work(spec, plan, seq_len, precision, documents, on_cuda=draw.random() < 0.5)
    follows_trained = spec.lora is None or draw.random() < 0.7
    return spec, work.setting, mode, follows_trained


def assert_equal(passes, mode, real, *, uncounted=0, peaks=1e-3):
    """Assert that a program says what was counted.

    Args:
        passes: of the program.
        mode: what is recomputed.
        real: what was counted.
        uncounted: bytes of scalars that a program leaves out.
        peaks: relative tolerance of the peaks.
    """
    program = passes.program
    assert (program.num_held, program.num_trained) == (real.num_held, real.num_trained)
    assert passes.kept(mode) == pytest.approx(real.kept, abs=uncounted)
    assert passes.forward_flops() == real.forward_flops
    assert passes.backward_flops(mode) == real.backward_flops
    assert max(at.kept + at.temporaries for at in passes.forward(mode)) == pytest.approx(real.forward, rel=peaks)
    in_backward = [at.kept + at.temporaries + FP32_BYTES * (at.made + at.making) for at in passes.backward(mode)]
    assert max(in_backward, default=0) == pytest.approx(real.backward, rel=peaks)


def check(layer, **tolerances):
    spec, setting, mode, follows_trained = layer
    real = counted(spec, setting, mode=mode, follows_trained=follows_trained)
    passes = Passes(Layer(spec, spec.layers[0], setting), follows_trained=follows_trained)
    if spec.attention_sinks and mode == "selective":
        # the kernel's result is kept, and what the sinks leave of it is there until it is projected: docs/memory.md
        tolerances["peaks"] = max(0.05, tolerances.get("peaks", 0.0))
    assert_equal(passes, mode, real, **tolerances)


def test_the_table_of_fields_lacks_none_of_a_model():
    check_table()


@pytest.mark.parametrize(("path", "value"), each_alone(), ids=str)
def test_a_program_follows_every_field_of_a_model_alone(path, value):
    spec = alone(path, value)
    setting = Setting(
        rows=1, seq_len=128, itemsize=2, documents="mask" if spec.attention(0).hides_in_document else "none"
    )
    check((spec, setting, "none", True), uncounted=128)


@pytest.mark.parametrize("seed", [*range(8), *(nightly(seed) for seed in range(8, 160))])
def test_a_layer_keeps_holds_and_multiplies_what_its_program_says(seed):
    """But for part of some peaks, where gradients of adapters and of weights with lasting copies meet."""
    check(drawn(seed), peaks=4e-3)


@pytest.mark.parametrize("seed", [*range(4), *(nightly(seed) for seed in range(4, 60))])
def test_a_layer_of_experts_does_too(seed):
    """But for the scalars of its auxiliary losses."""
    check(drawn(seed, moe=True), uncounted=128)


@pytest.mark.parametrize("seed", [*range(4), *(nightly(seed) for seed in range(4, 60))])
@pytest.mark.parametrize("method", [*sorted(ADAPTERS.keys() - {DEFAULT_ADAPTER}), FACTORS.name])
def test_a_layer_with_another_kind_of_adapter_does_too(method, seed, monkeypatch):
    monkeypatch.setitem(ADAPTERS, FACTORS.name, FACTORS)
    check(drawn(seed, method=method))


@pytest.mark.parametrize("seed", [*range(6), *(nightly(seed) for seed in range(6, 120))])
def test_a_layer_over_matrices_in_nf4_does_too(seed):
    check(drawn(seed, base="nf4", moe=seed % 4 == 3), uncounted=128)


@pytest.mark.parametrize("seed", [*range(8), *(nightly(seed) for seed in range(8, 80))])
def test_a_layer_whose_keys_are_made_from_latents_does_too(seed):
    check(
        drawn(seed, latents=True, moe=seed % 4 == 3, base="nf4" if seed % 8 == 5 else None), uncounted=128, peaks=4e-3
    )


@pytest.mark.parametrize("seed", [0, *(nightly(seed) for seed in range(1, 40))])
def test_a_layer_that_holds_all_scores_does_too(seed):
    """But for the peaks: the program has its operations in another order than torch's math kernel."""
    check(drawn(seed, math=True), peaks=0.15)


@pytest.mark.parametrize("seed", [0, 1, *(nightly(seed) for seed in range(2, 40))])
def test_a_split_backward_keeps_what_the_program_says_until_the_weight_gradients_are_made(seed):
    spec, setting, _, follows_trained = drawn(seed, moe=seed % 4 == 1)
    setting = setting._replace(splits_backward=True, compiles=False)
    real = counted(spec, setting, mode="none", follows_trained=follows_trained)
    layer = Layer(spec, spec.layers[0], setting)
    passes = Passes(layer, follows_trained=follows_trained, splits_backward=True)
    assert_equal(passes, "none", real, uncounted=128)
    assert passes.held_for(passes.deferred) == pytest.approx(real.deferred, abs=128)
    instants = list(passes.weight_gradients())
    at_once = layer.num_trained - sum(at.making for at in instants)
    held = [at.kept + at.temporaries + FP32_BYTES * (at_once + at.made + at.making) for at in instants]
    assert max(held, default=0) == pytest.approx(real.weight_gradients, rel=1e-3)


FORGOTTEN = {
    "an adapter": lambda traits: traits._replace(adapted=traits.adapted - {"up_proj"}),
    "a trained matrix": lambda traits: traits._replace(trained=traits.trained - {"q_proj"}),
    "a trained norm": lambda traits: traits._replace(trained=traits.trained - {"post_attention_layernorm"}),
    "experts": lambda traits: traits._replace(sparse=False),
}
FORGOTTEN_OF_MODEL = {
    "norms of heads": {"qk_norm": False},
    "biases": {"qkv_bias": False},
    "the bias of the output projection": {"o_bias": False},
    "a soft cap": {"attention_soft_cap": 0.0},
    "sinks": {"attention_sinks": False},
}


@pytest.mark.parametrize("forget", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_program_without_a_trait_of_its_layer_is_found_out(forget):
    lora = LoRA(lora_rank=16, target_modules=("up_proj", "k_proj"))
    trainable = ("*.wq.*", "*ffn_norm*")
    moe = MoE(num_experts=4) if forget is FORGOTTEN["experts"] else None
    spec = replace(model_spec("llama3_2_1b"), num_layers=1, lora=lora, trainable=trainable, moe=moe)
    setting = Setting(rows=1, seq_len=128, itemsize=2)
    traits = spec.layers[0]
    real = counted(spec, setting, mode="none", follows_trained=True)
    assert_equal(Passes(Layer(spec, traits, setting)), "none", real, uncounted=128)
    with pytest.raises(AssertionError):
        assert_equal(Passes(Layer(spec, forget(traits), setting)), "none", real, uncounted=128)


@pytest.mark.parametrize("forgotten", FORGOTTEN_OF_MODEL.values(), ids=FORGOTTEN_OF_MODEL)
def test_a_program_without_a_trait_of_its_model_is_found_out(forgotten):
    spec = replace(model_spec("llama3_2_1b"), num_layers=1, **dict.fromkeys(forgotten, True))
    setting = Setting(rows=1, seq_len=128, itemsize=2)
    real = counted(spec, setting, mode="none", follows_trained=True)
    assert_equal(Passes(Layer(spec, spec.layers[0], setting)), "none", real)
    poorer = replace(spec, **forgotten)
    with pytest.raises(AssertionError):
        assert_equal(Passes(Layer(poorer, poorer.layers[0], setting)), "none", real)
