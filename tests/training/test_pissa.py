"""PiSSA: training begins with the model itself, and exports compute the same over the untouched base."""

import json

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import native_engine
from peft import LoraConfig, PeftModel, get_peft_model
from same_logits import TOKENS, assert_same_logits, logits
from test_stored_weights import (
    ALONE,
    PLANS,
    UNTIED,
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
from llama_core.config.strategy import LoRA
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face.pretrained import check_pretrained
from llama_core.models import pissa
from llama_core.runs.export import export_run
from llama_core.training.stored_weights import Pretrained

pytestmark = pytest.mark.xdist_group("pissa")

TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]


def adapted(base, **lora):
    given = {"lora_rank": 4, "lora_alpha": 6.0, "target_modules": TARGETS, "initial_values": "pissa"} | lora
    return RunConfig.from_mapping({"strategy": "lora", "lora": given, "training": {"init_from": str(base)}})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("base") / "folder", lively(UNTIED.spec))


def decaying(rows, columns):
    """A matrix whose singular values fall by a third each."""
    generator = torch.Generator().manual_seed(3)
    left = torch.linalg.qr(torch.randn(rows, 12, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, 12, generator=generator, dtype=torch.float64)).Q
    return left * 0.67 ** torch.arange(12) @ right.T


@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40)])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_principal_part_is_that_of_the_singular_values(rows, columns, rslora):
    matrix_OI = decaying(rows, columns)
    lora = LoRA(lora_rank=4, lora_alpha=6.0, rslora=rslora, initial_values="pissa")
    a_RI, b_OR = pissa.principal(matrix_OI, lora)
    left, values, right = torch.linalg.svd(matrix_OI, full_matrices=False)
    best = left[:, :4] * values[:4] @ right[:4]
    torch.testing.assert_close(lora.scale * b_OR @ a_RI, best, rtol=0, atol=1e-5)
    torch.testing.assert_close(b_OR.square().sum(0), values[:4] / lora.scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(a_RI.square().sum(1), values[:4] / lora.scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(
        pissa.rest(matrix_OI, pissa.Principal(a_RI, b_OR), lora), matrix_OI - best, rtol=0, atol=1e-5
    )


def test_it_is_what_peft_begins_with(base):
    """PEFT's power iterations begin elsewhere, so the products are compared on a matrix whose values fall fast."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights="pissa")
    module = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=False))
    module[0].weight.data.copy_(decaying(40, 24))
    theirs = get_peft_model(module, config).base_model.model[0]
    lora = LoRA(lora_rank=4, lora_alpha=6.0, initial_values="pissa")
    ours = pissa.rest(decaying(40, 24), pissa.principal(decaying(40, 24), lora), lora)
    torch.testing.assert_close(theirs.base_layer.weight.double(), ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_training_begins_with_the_logits_of_the_base(base, rslora):
    spec = adapted(base, rslora=rslora).spec
    model = filled(spec, base)
    assert_same_logits(logits(model), logits_of_transformers(base, TOKENS))
    assert model.layers["0"].attention.wq.lora_B.weight.abs().max() > 0.01


@pytest.fixture(scope="module")
def two_ranks(base, tmp_path_factory):
    """A run trained under tp 2 x dp 2, and the wrong initial weights on each of four ranks."""
    run = new_run(tmp_path_factory.mktemp("trained") / "run", adapted(base))
    return run, run_ranks(4, on_a_rank, base, run)


def on_a_rank(base, run):
    config = adapted(base)
    plan, _ = PLANS["tp2 zero1 dp2"]
    engine = native_engine(plan, config.spec)
    engine.set_weights(Pretrained(config.spec, base).fill)
    wrong = {"begun": differing(engine.model, filled(config.spec, base))}
    train(engine, 2, plan)
    save_run(run, engine, config, 2)
    dist.barrier()
    checkpoint = run.checkpoints / "step-00000002"
    for name in ("tp2 zero3 dp2, with adapters", "tp2 pp2"):
        begun = native_engine(PLANS[name][0], config.spec, seed=3)
        begun.set_weights(Pretrained(config.spec, checkpoint).fill)
        wrong[name] = differing(begun.model, filled(config.spec, checkpoint))
    return wrong


@pytest.mark.nightly
def test_every_rank_begins_with_the_weights_of_one_process_bit_for_bit(two_ranks):
    _, found = two_ranks
    for rank, wrong in enumerate(found):
        assert len(wrong) == 3
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


@pytest.mark.nightly
def test_peft_computes_the_same_over_the_untouched_base(two_ranks, base, tmp_path):
    run, _ = two_ranks
    out = export_run(run, tmp_path / "out")
    described = json.loads((out / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["init_lora_weights"]) == (8, 12, True)
    assert described["base_model_name_or_path"] == str(base)
    ours = logits(filled(adapted(base).spec, run.checkpoints / "step-00000002"))
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model).logits
    theirs = logits(PeftModel.from_pretrained(model, out).eval()).logits
    assert (theirs - before).abs().max() > 1e-3
    assert_same_logits(ours, theirs)
    again = RunConfig.from_mapping({"strategy": "lora", "training": {"init_from": str(out)}})
    assert (again.lora.lora_rank, again.lora.scale, again.lora.initial_values) == (8, 1.5, "random")
    assert_same_logits(logits(filled(again.spec, out)), theirs)


@pytest.mark.nightly
def test_a_merged_model_computes_the_same(two_ranks, base, tmp_path):
    run, _ = two_ranks
    out = export_run(run, tmp_path / "out", merged=True)
    ours = logits(filled(adapted(base).spec, run.checkpoints / "step-00000002"))
    assert_same_logits(ours, logits_of_transformers(out, TOKENS))


def test_rslora_keeps_its_scale_in_the_folder(base, tmp_path):
    config = adapted(base, rslora=True)
    run = new_run(tmp_path / "run", config)
    engine = native_engine(ALONE, config.spec)
    engine.set_weights(Pretrained(config.spec, base).fill)
    train(engine, 1, ALONE)
    save_run(run, engine, config, 1)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = logits(PeftModel.from_pretrained(model, export_run(run, tmp_path / "out")).eval()).logits
    assert_same_logits(logits(filled(config.spec, run.checkpoints / "step-00000001")), theirs)


@pytest.mark.nightly
def test_adapters_that_began_otherwise_are_refused(two_ranks, base):
    run, _ = two_ranks
    with pytest.raises(
        WeightsError, match=r"have initial_values=pissa instead of random; set lora\.initial_values=pissa"
    ):
        check_pretrained(adapted(base, initial_values="random").spec, run.checkpoints / "step-00000002")


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ({"method": "dora"}, r"initial_values=pissa has no effect, because lora\.method=dora takes"),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            r"has lm_head, but lora\.initial_values=pissa is for the matrices of",
        ),
    ],
)
def test_what_it_is_not_made_for_is_refused(base, lora, problem):
    with pytest.raises(ConfigError, match=problem):
        adapted(base, **lora)
