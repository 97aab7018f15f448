"""Weights of experts come from Mixtral's folders, from dense models and from runs, and go back to Mixtral's folders."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed import run_ranks
from parity import native_engine
from safetensors.torch import load_file
from same_logits import TOKENS
from test_stored_weights import ALONE, differing, filled, lively, save_folder, save_run, train
from tiers import nightly
from transformers import MixtralConfig, MixtralForCausalLM

from llama_core.config.run import RunConfig
from llama_core.config.strategy import MoE
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face.pretrained import check_pretrained, resolve_pretrained
from llama_core.models.llama import named_weights
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.runs.export import export_run
from llama_core.training.stored_weights import Pretrained, write_hugging_face

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
SIZES |= {"vocab_size": 66, "tied_embeddings": False, "max_context": 64}
MOE = {"num_experts": 4, "experts_per_token": 2}


def config(**settings):
    return RunConfig.from_mapping({"architecture": SIZES, "strategy": "moe", "moe": MOE} | settings)


def mixtral_folder(path, **settings):
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=66,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            initializer_range=0.25,
            max_position_embeddings=64,
        )
    )
    model.save_pretrained(path, **settings)
    return path


@torch.no_grad()
def logits_of_transformers(folder):
    model, report = MixtralForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    return model.eval()(TOKENS).logits


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, {"save_original_format": False}], ids=["apart", "stacked"])
def test_logits_of_a_mixtral_folder_are_those_of_transformers(tmp_path, settings):
    folder = mixtral_folder(tmp_path / "mixtral", **settings)
    read = RunConfig.from_mapping({"model": str(folder)})
    moe = MoE(num_experts=4, experts_per_token=2, balance_loss_coefficient=0.001)
    assert (read.strategy, read.spec.moe) == ("moe", moe)
    logits = filled(read.spec, folder)(TOKENS)
    assert logits.std() > 0.5
    torch.testing.assert_close(logits, logits_of_transformers(folder), rtol=0, atol=1e-4)


def test_a_run_keeps_the_experts_of_its_folder_without_the_folder(tmp_path):
    folder = mixtral_folder(tmp_path / "mixtral")
    read = RunConfig.from_mapping({"model": str(folder), "moe": {"balance_loss_coefficient": 0.5}})
    assert read.moe == MoE(num_experts=4, experts_per_token=2, balance_loss_coefficient=0.5)
    kept = read.self_contained()
    folder.rename(tmp_path / "elsewhere")
    assert RunConfig.from_mapping(kept.model_dump()).spec.moe == read.moe


@pytest.mark.parametrize("strategy", ["standard", "lora"])
def test_a_mixture_is_trained_as_a_mixture(tmp_path, strategy):
    folder = mixtral_folder(tmp_path / "mixtral")
    with pytest.raises(ConfigError, match=f"strategy={strategy}: mixtral is a mixture of experts; use strategy=moe"):
        RunConfig.from_mapping({"model": str(folder), "strategy": strategy})


@pytest.fixture
def run(tmp_path):
    """A run that has saved lively weights."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    engine = native_engine(ParallelPlan(), config().spec)
    engine.set_weights(lambda model: model.load_state_dict(lively(config().spec).state_dict()))
    save_run(run, engine, config(), 1)
    return run


@torch.no_grad()
def test_an_exported_run_has_the_logits_of_the_run_in_transformers_and_in_another_run(run, tmp_path):
    model = lively(config().spec)
    exported = export_run(run, tmp_path / "out")
    torch.testing.assert_close(logits_of_transformers(exported), model(TOKENS), rtol=0, atol=1e-4)
    read = RunConfig.from_mapping({"training": {"init_from": str(exported)}})
    assert differing(filled(read.spec, exported), model) == []


def test_a_run_begins_with_the_experts_of_another(run):
    read = RunConfig.from_mapping({"training": {"init_from": str(run.path)}})
    assert (read.strategy, read.moe) == ("moe", config().moe)
    assert differing(filled(read.spec, resolve_pretrained(str(run.path))), lively(config().spec)) == []


def test_experts_that_were_trained_with_other_gates_are_told(run):
    other = replace(config().spec, moe=config().moe.model_copy(update={"gates": "sigmoid"}))
    (told,) = check_pretrained(other, Path(resolve_pretrained(str(run.path))))
    assert told.startswith("moe.gates is sigmoid, but ")
    assert told.endswith(" was made for softmax_chosen; ignore this if it is intended")


@pytest.mark.parametrize(
    ("moe", "complaint"),
    [
        ({"moe_layers": 2}, r"MixtralForCausalLM is the nearest there, and has no moe.moe_layers=2\Z"),
        ({"gates": "softmax_all"}, r"MixtralForCausalLM is the nearest there, and has no moe.gates=softmax_all\Z"),
    ],
)
def test_what_mixtral_cannot_describe_is_not_exported(tmp_path, moe, complaint):
    run, other = RunDirectory(tmp_path / "run"), config(moe=MOE | moe)
    run.create()
    save_run(run, native_engine(ParallelPlan(), other.spec), other, 1)
    with pytest.raises(ConfigError, match=rf"cannot describe .*: {complaint}"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_of_another_width_cannot_begin_as_copies(tmp_path):
    source = save_folder(tmp_path / "folder", lively(replace(config().spec, moe=None)))
    narrow = config(moe=MOE | {"expert_size": 16}).spec
    with pytest.raises(
        WeightsError, match=r"\Aexperts of moe.expert_size=16 cannot begin as copies of .* columns; set"
    ):
        filled(narrow, source)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["folder", nightly("run")])
def test_experts_that_begin_as_copies_of_a_dense_model_compute_what_it_computes(tmp_path, kind):
    dense = lively(replace(config().spec, moe=None))
    source = save_folder(tmp_path / "folder", dense)
    if kind == "run":
        run, plain = RunDirectory(tmp_path / "run"), config(strategy="standard", moe={})
        run.create()
        engine = native_engine(ParallelPlan(), plain.spec)
        engine.set_weights(lambda model: model.load_state_dict(dense.state_dict()))
        save_run(run, engine, plain, 1)
        source = resolve_pretrained(str(run.path))
    model = filled(config(moe=MOE | {"moe_layers": [1], "biases": True}).spec, source)
    torch.testing.assert_close(model(TOKENS), dense(TOKENS), rtol=0, atol=1e-4)
    assert model.layers["1"].feed_forward.router.weight.std() > 0.01


def hybrid(base, **settings):
    lora = {"lora_rank": 4, "target_modules": ["q_proj", "o_proj"]}
    mapping = {"strategy": "hybrid", "lora": lora, "trainable": ["*norm*"], "training": {"init_from": str(base)}}
    return config(**(mapping | settings))


@pytest.fixture
def trained(tmp_path):
    """A hybrid run over a dense model that has taken two steps, and its model before and after them."""
    dense = save_folder(tmp_path / "dense", lively(replace(config().spec, moe=None)))
    begun = hybrid(dense)
    engine = native_engine(ALONE, begun.spec)
    engine.set_weights(Pretrained(begun.spec, dense).fill)
    before = {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}
    train(engine, 2)
    run = RunDirectory(tmp_path / "hybrid")
    run.create()
    save_run(run, engine, begun, 2)
    return run, begun, before, engine.model


def test_a_hybrid_run_changes_what_it_trains_and_saves_nothing_else(trained):
    run, begun, before, model = trained
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name, weight in model.named_parameters() if weight.requires_grad}
    saved = dcp.FileSystemReader(run.checkpoints / "step-00000002").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} == changed
    assert begun.spec.trained_in_full < changed


def test_a_hybrid_run_is_exported_as_a_mixtral_with_its_adapters_merged(trained, tmp_path):
    run, begun, _, model = trained
    assert differing(filled(begun.spec, resolve_pretrained(str(run.path))), model) == []
    with torch.no_grad():
        expected = model.eval()(TOKENS)
    torch.testing.assert_close(logits_of_transformers(export_run(run, tmp_path / "out")), expected, rtol=0, atol=1e-4)


def test_a_hybrid_run_begins_with_another_unless_it_would_lose_what_that_has_trained(trained):
    run, begun, _, model = trained
    read = RunConfig.from_mapping({"training": {"init_from": str(run.path)}})
    assert (read.strategy, read.spec) == ("hybrid", begun.spec)
    source = resolve_pretrained(str(run.path))
    assert differing(filled(read.spec, source), model) == []
    with pytest.raises(WeightsError, match=r"has trained 5 weights, such as layers\.0\.attention_norm\.weight, that"):
        check_pretrained(hybrid(source, trainable=[]).spec, Path(source))


def fill(folder, plan):
    spec = config().spec
    engine = native_engine(plan, spec, seed=3)
    engine.set_weights(Pretrained(spec, folder, seed=5).fill)
    expected = lively(spec)
    Pretrained(spec, folder, seed=5).fill(expected)
    return differing(engine.model, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("dense", [False, True])
def test_every_rank_reads_its_part_of_its_experts(tmp_path, dense):
    spec = config().spec
    source = save_folder(tmp_path / "folder", lively(replace(spec, moe=None))) if dense else None
    source = source or mixtral_folder(tmp_path / "mixtral")
    for plan in (
        ParallelPlan(tp=2, dp_shard=2, ep=2, zero_stage=3),
        ParallelPlan(dp_shard=4, ep=2, zero_stage=3),
        ParallelPlan(dp_shard=4, zero_stage=3),
        ParallelPlan(tp=2, expert_tp=1, ep=4, dp_shard=2, zero_stage=3),
    ):
        assert run_ranks(4, fill, source, plan) == [[]] * 4


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_balance_biases_that_a_mixture_lacks_begin_at_zero_and_are_told(run, tmp_path, kind):
    source = mixtral_folder(tmp_path / "mixtral") if kind == "folder" else Path(resolve_pretrained(str(run.path)))
    biased = config(moe=MOE | {"balance_bias": True}).spec
    assert any("moe.balance_bias is True, but " in told for told in check_pretrained(biased, source))
    read = filled(biased, source)
    assert differing(read, filled(config().spec, source)) == []
    biases = [weight for name, weight in named_weights(read) if name in biased.buffer_shapes]
    assert len(biases) == 2
    assert not any(bias.any() for bias in biases)


def test_weights_with_balance_biases_are_not_those_of_a_mixture_without(tmp_path):
    run, biased = RunDirectory(tmp_path / "run"), config(moe=MOE | {"balance_bias": True})
    run.create()
    save_run(run, native_engine(ParallelPlan(), biased.spec), biased, 1)
    with pytest.raises(WeightsError, match="e_score_correction_bias is unknown"):
        check_pretrained(config().spec, list_checkpoints(run)[0])


@torch.no_grad()
@pytest.mark.parametrize("shard_bytes", [10**9, 5000])
def test_balance_biases_are_written_in_fp32_and_read(tmp_path, shard_bytes):
    run, biased = RunDirectory(tmp_path / "run"), config(moe=MOE | {"balance_bias": True})
    run.create()
    engine = native_engine(ParallelPlan(), biased.spec)
    expected = {}
    for name, weight in named_weights(engine.model):
        if name in biased.spec.buffer_shapes:
            expected[name] = weight.normal_(generator=torch.Generator().manual_seed(0)).clone()
    save_run(run, engine, biased, 1)
    folder = tmp_path / "folder"
    folder.mkdir()
    write_hugging_face(list_checkpoints(run)[0], biased.spec, folder, dtype="bf16", shard_bytes=shard_bytes)
    dtypes = {}
    for file in folder.glob("*.safetensors"):
        dtypes |= {name: tensor.dtype for name, tensor in load_file(file).items()}
    in_fp32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert in_fp32 == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(2)}
    for source in (folder, list_checkpoints(run)[0]):
        read = dict(named_weights(filled(biased.spec, source)))
        assert all(torch.equal(read[name], bias) for name, bias in expected.items())
