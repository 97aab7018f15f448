"""Adapters over a base in NF4 (QLoRA): what trains, what is exported and what is refused."""

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import native_engine
from peft import PeftModel
from same_logits import TOKENS, assert_same_logits, logits
from test_stored_weights import (
    ALONE,
    differing,
    filled,
    lively,
    logits_of_transformers,
    new_run,
    save_folder,
    save_run,
    train,
)
from transformers import LlamaForCausalLM

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, PlanError
from llama_core.hugging_face.pretrained import check_pretrained
from llama_core.models import nf4
from llama_core.models.llama import packed_modules
from llama_core.planning.plan import ParallelPlan
from llama_core.runs.export import export_run
from llama_core.training.stored_weights import Pretrained

SIZES = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "ffn_size": 192,
    "vocab_size": 66,
    "max_context": 64,
}


def request(folder, *overrides, **lora):
    given = {"base": "nf4", "lora_rank": 4, "target_modules": ["q_proj", "down_proj"]} | lora
    mapping = {"strategy": "lora", "lora": given, "training": {"init_from": str(folder)}}
    return RunConfig.from_mapping(mapping, overrides)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    spec = RunConfig.from_mapping({"model": "llama3_8b", "architecture": SIZES}).spec
    return save_folder(tmp_path_factory.mktemp("base") / "folder", lively(spec))


def of_rounded(base):
    """Transformers' model with the numbers that its matrices have in NF4."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.data = nf4.rounded(module.weight.data)
    return model.eval()


def test_training_begins_with_the_rounded_base(base):
    model = filled(request(base).spec, base)
    assert len(list(packed_modules(model))) == 2 * 7
    assert_same_logits(logits(model), logits(of_rounded(base)).logits)


def trained(base, path):
    config = request(base)
    run = new_run(path / "run", config)
    engine = native_engine(ALONE, config.spec)
    engine.set_weights(Pretrained(config.spec, base).fill)
    train(engine, 2, ALONE)
    save_run(run, engine, config, 2)
    return run


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return trained(base, tmp_path_factory.mktemp("trained"))


def test_merged_weights_are_those_of_the_rounded_base_and_its_adapters(run, base, tmp_path):
    ours = logits(filled(request(base).spec, run.checkpoints / "step-00000002"))
    assert (ours - logits(of_rounded(base)).logits).abs().max() > 1e-3
    out = export_run(run, tmp_path / "out", merged=True)
    assert_same_logits(ours, logits_of_transformers(out, TOKENS))


def test_peft_computes_the_same_over_the_rounded_base(run, base, tmp_path):
    ours = logits(filled(request(base).spec, run.checkpoints / "step-00000002"))
    theirs = PeftModel.from_pretrained(of_rounded(base), export_run(run, tmp_path / "out")).eval()
    assert_same_logits(ours, logits(theirs).logits)


def test_a_run_that_starts_from_it_over_plain_matrices_says_so(run, base):
    checkpoint = run.checkpoints / "step-00000002"
    assert check_pretrained(request(base).spec, checkpoint) == []
    (told,) = check_pretrained(request(base, base="plain").spec, checkpoint)
    assert told.startswith("lora.base is plain, but the adapters in ")


def test_a_resumed_run_is_the_same_to_the_bit(base):
    spec = request(base).spec
    once, again = (native_engine(ALONE, spec, seed=seed) for seed in (1, 2))
    for engine in (once, again):
        engine.set_weights(Pretrained(spec, base).fill)
    packed = [dict(packed_modules(engine.model)) for engine in (once, again)]
    for name, module in packed[0].items():
        for tensor in ("weight", "scales"):
            assert torch.equal(getattr(module, tensor), getattr(packed[1][name], tensor)), name


def on_a_rank(base):
    spec = request(base).spec
    expected = filled(spec, base)
    wrong = {}
    for name, plan in {
        "tp2 zero3": ParallelPlan(tp=2, dp_shard=2, zero_stage=3, num_microbatches=2),
        "pp2 zero2": ParallelPlan(pp=2, dp_shard=2, zero_stage=2, num_microbatches=2),
    }.items():
        engine = native_engine(plan, spec, seed=3)
        engine.set_weights(Pretrained(spec, base).fill)
        wrong[name] = differing(engine.model, expected)
    dist.barrier()
    return wrong


def test_every_rank_has_its_part_of_the_codes_of_one_process(base):
    for wrong in run_ranks(4, on_a_rank, base):
        assert not any(wrong.values()), wrong
        assert len(wrong) == 2


def test_a_weight_that_is_not_finite_is_named(base):
    spec = request(base).spec
    engine = native_engine(ALONE, spec)
    module = dict(packed_modules(engine.model))["layers.1.attention.wo.weight"]
    broken = torch.ones(module.out_features, module.in_features)
    broken[3, 5] = torch.inf
    module.get_buffer("scales").copy_(nf4.pack(broken).scales_G)
    assert list(engine.non_finite_weights()) == ["layers.1.attention.wo.weight"]


@pytest.mark.parametrize(
    ("lora", "overrides", "problem"),
    [
        ({"method": "dora"}, (), r"base=nf4 has no effect, because lora\.method=dora takes"),
        ({"initial_values": "pissa"}, (), r"base=nf4: lora\.initial_values=pissa takes the principal part off"),
        ({}, ("parallel.tp=2", "architecture.ffn_size=192"), "parallel.tp=2 does not divide the 3 blocks of NF4"),
    ],
)
def test_what_it_is_not_made_for_is_refused(base, lora, overrides, problem):
    with pytest.raises(ConfigError, match=problem):
        request(base, *overrides, **lora)


def test_rows_that_blocks_do_not_fill_are_refused():
    with pytest.raises(
        ConfigError, match=r"lora\.base=nf4 needs rows of a multiple of 64 numbers, but down_proj has 96"
    ):
        mapping = {"strategy": "lora", "model": "llama3_8b", "architecture": SIZES | {"ffn_size": 96}}
        RunConfig.from_mapping(mapping | {"lora": {"base": "nf4"}})


@pytest.mark.parametrize(
    ("plan", "precision", "problem"),
    [
        (
            ParallelPlan(dp_shard=2, zero_stage=3, zero_backend="deepspeed"),
            "bf16",
            "deepspeed does not shard the bytes",
        ),
        (ParallelPlan(), "fp8", "precision fp8 does not work with lora.base=nf4; use bf16"),
    ],
)
def test_plans_without_it_are_refused(base, plan, precision, problem):
    with pytest.raises(PlanError, match=problem):
        plan.check(request(base).spec, seq_len=64, precision=precision)
