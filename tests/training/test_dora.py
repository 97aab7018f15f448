"""DoRA in and out: PEFT computes the same with our exports, and training starts from adapters that PEFT wrote."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import draw_adapters, native_engine
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
from llama_core.hugging_face.pretrained import check_pretrained
from llama_core.runs.export import export_run
from llama_core.training.stored_weights import Pretrained

pytestmark = pytest.mark.xdist_group("dora")

TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj"]


def adapted(init_from, **lora):
    """The configuration of a run that trains adapters over the weights in a folder."""
    return RunConfig.from_mapping({"strategy": "lora", "lora": lora, "training": {"init_from": str(init_from)}})


def from_the_start(base):
    return adapted(base, method="dora", lora_rank=4, lora_alpha=6.0, target_modules=TARGETS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("base") / "folder", lively(UNTIED.spec))


@pytest.fixture(scope="module")
def written_by_peft(base):
    """A folder that PEFT saved, and the logits of its model."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM", use_dora=True)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        logits = model.eval()(TOKENS).logits
    folder = base.with_name("peft")
    model.save_pretrained(folder)
    return folder, logits


def test_a_peft_folder_says_that_it_is_dora_and_computes_the_same_logits(written_by_peft):
    folder, theirs = written_by_peft
    config = adapted(folder)
    assert (config.lora.method, config.lora.lora_rank, config.lora.lora_alpha) == ("dora", 4, 6)
    assert check_pretrained(config.spec, folder) == []
    assert_same_logits(logits(filled(config.spec, folder)), theirs)


def test_a_run_begins_with_the_model_it_starts_from_and_the_lengths_of_its_rows(base):
    model = filled(from_the_start(base).spec, base)
    assert_same_logits(logits(model), logits(filled(UNTIED.spec, base)))
    for index in ("0", str(UNTIED.spec.num_layers - 1)):
        for part in (model.layers[index].attention.wo, model.layers[index].feed_forward.w3):
            torch.testing.assert_close(part.lora_magnitude_vector, part.weight.norm(dim=1), rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def trained(base, written_by_peft, tmp_path_factory):
    """A run trained under tp 2 x dp 2, and the wrong initial weights on each of four ranks."""
    run = new_run(tmp_path_factory.mktemp("trained") / "run", from_the_start(base))
    return run, run_ranks(4, on_a_rank, base, written_by_peft[0], run)


def on_a_rank(base, written_by_peft, run):
    config = from_the_start(base)
    wrong = {}
    for name, source in (("tp2 zero3 dp2, with adapters", written_by_peft), ("tp2 zero1 dp2", base)):
        plan, _ = PLANS[name]
        engine = native_engine(plan, config.spec)
        engine.set_weights(Pretrained(config.spec, source).fill)
        wrong[name] = differing(engine.model, filled(config.spec, source))
    draw_adapters(engine.model)
    for name in config.spec.adapter_shapes:
        if name.endswith("lora_B.weight"):
            engine.model.get_parameter(name).data.mul_(0.1)
    train(engine, 2, plan)
    save_run(run, engine, config, 2)
    dist.barrier()
    return wrong


@pytest.mark.nightly
def test_every_rank_starts_with_the_weights_of_one_process_bit_for_bit(trained):
    _, found = trained
    for rank, wrong in enumerate(found):
        assert len(wrong) == 2
        assert not any(wrong.values()), f"rank {rank}: {wrong}"


@pytest.mark.nightly
def test_peft_computes_the_same_with_adapters_trained_under_tp2_dp2(trained, base, tmp_path):
    run, _ = trained
    out = export_run(run, tmp_path / "out")
    assert json.loads((out / "adapter_config.json").read_text())["use_dora"] is True
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits(model).logits
    with warnings.catch_warnings(action="error", category=UserWarning):  # such as a missing key
        theirs = logits(PeftModel.from_pretrained(model, out).eval()).logits
    assert (theirs - before).abs().max() > 1
    assert_same_logits(logits(filled(from_the_start(base).spec, run.checkpoints / "step-00000002")), theirs)
    assert differing(filled(adapted(out).spec, out), filled(adapted(out).spec, run.checkpoints / "step-00000002")) == []


@pytest.mark.nightly
def test_merged_weights_compute_the_runs_logits(trained, base, tmp_path):
    run, _ = trained
    expected = logits(filled(from_the_start(base).spec, run.checkpoints / "step-00000002"))
    out = export_run(run, tmp_path / "out", merged=True)
    assert_same_logits(expected, logits_of_transformers(out, TOKENS))


def test_the_gradients_are_those_of_peft(base, written_by_peft):
    folder, _ = written_by_peft
    spec = adapted(folder).spec
    engine = native_engine(ALONE, spec)
    engine.set_weights(Pretrained(spec, folder).fill)
    engine.model(TOKENS).square().mean().backward()
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, folder, is_trainable=True)
    peft(TOKENS).logits.square().mean().backward()
    theirs = peft.base_model.model.model.layers[3].self_attn.o_proj
    ours = engine.model.layers["3"].attention.wo
    for own, other in (
        (ours.lora_A.weight, theirs.lora_A["default"].weight),
        (ours.lora_B.weight, theirs.lora_B["default"].weight),
        (ours.lora_magnitude_vector, theirs.lora_magnitude_vector["default"].weight),
    ):
        assert own.grad.abs().max() > 1e-3
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-4)
