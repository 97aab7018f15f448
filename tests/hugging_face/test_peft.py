"""Bad adapters are refused before a job exists, in one line that names the remedy."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from hugging_face_models import model_with_large_weights, renamed
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_pretrained import CONFIG, SIZES
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from llama_core.config.config_json.writing import config_json
from llama_core.config.run import RunConfig
from llama_core.config.strategy import FEED_FORWARD_MATRICES, MATRICES, TARGETS, LoRA
from llama_core.errors import WeightsError
from llama_core.hugging_face.peft import ADAPTER_CONFIG, ADAPTERS, adapter_json, adapter_weights, peft_name
from llama_core.hugging_face.pretrained import check_pretrained, origin_of
from llama_core.records.checkpoints import STATE, checkpoint_name, write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json

LORA = LoRA(lora_rank=4, lora_alpha=8, target_modules=("q_proj", "v_proj"))
SPEC = replace(CONFIG.spec, lora=LORA)


def refusal(source, spec=SPEC):
    with pytest.raises(WeightsError) as refused:
        check_pretrained(spec, source)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    save_file(renamed(model_with_large_weights(CONFIG.spec)), tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config_json(CONFIG.spec)))
    return tmp_path / "base"


@pytest.fixture
def folder(base):
    """A PEFT folder, as this project writes it."""
    folder = base.with_name("adapters")
    folder.mkdir()
    save_file({peft_name(name): torch.ones(shape) for name, shape in SPEC.adapter_shapes.items()}, folder / ADAPTERS)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_json(LORA, str(base))))
    return folder


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), MATRICES, TARGETS])
def test_peft_has_the_same_adapters_under_the_same_names(tmp_path, targets):
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**config_json(CONFIG.spec))),
        LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), task_type="CAUSAL_LM"),
    )
    model.save_pretrained(tmp_path)
    theirs = {name: tuple(weight.shape) for name, weight in load_file(tmp_path / ADAPTERS).items() if "lora_" in name}
    spec = replace(SPEC, lora=lora_on(targets))
    assert {peft_name(name): shape for name, shape in spec.adapter_shapes.items()} == theirs
    assert adapter_weights(spec, tmp_path).keys() == spec.adapter_shapes.keys()


@pytest.mark.parametrize(("query_rank", "of_queries"), [(20, ("q_a_proj", "q_b_proj")), (0, ("q_proj",))])
def test_peft_has_the_same_adapters_on_matrices_of_latents(tmp_path, query_rank, of_queries):
    """But for the feed-forward, whose matrices PEFT takes for those of experts in this type."""
    latents = {"num_kv_heads": CONFIG.spec.num_heads, "kv_rank": 24, "rope_dim": 4, "query_rank": query_rank}
    attention = {*of_queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    plain = replace(CONFIG.spec, **latents)
    everywhere = replace(plain, lora=lora_on(MATRICES)).named_lora
    assert {*everywhere.target_modules} == attention | {*FEED_FORWARD_MATRICES}
    spec = replace(plain, lora=lora_on(tuple(sorted(attention))))
    written = adapter_json(spec.named_lora, "base")
    model = get_peft_model(
        DeepseekV3ForCausalLM(DeepseekV3Config(**config_json(replace(spec, lora=None)))),
        LoraConfig(r=4, lora_alpha=8, target_modules=written["target_modules"], task_type="CAUSAL_LM"),
    )
    model.save_pretrained(tmp_path)
    theirs = {name: tuple(weight.shape) for name, weight in load_file(tmp_path / ADAPTERS).items()}
    assert {peft_name(name, spec.model_type): shape for name, shape in spec.adapter_shapes.items()} == theirs
    assert adapter_weights(spec, tmp_path).keys() == spec.adapter_shapes.keys()


@pytest.mark.parametrize("cache", ["/home/me/.cache/huggingface/hub", "/scratch/hub"])
def test_a_base_in_a_cache_of_the_hub_is_named_as_peft_names_it(tmp_path, cache):
    commit = "0123456789abcdef" * 2
    for base, named in ((f"{cache}/models--org--base-1b/snapshots/{commit}", "org/base-1b"), (f"{cache}/base", None)):
        (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(adapter_json(LORA, base)))
        theirs = PeftConfig.from_pretrained(tmp_path)
        assert theirs.base_model_name_or_path == (named or base)
        assert theirs.revision == (named and commit)


def lora_on(targets):
    return LoRA(lora_rank=4, lora_alpha=8, target_modules=targets)


def test_adapters_and_their_base_are_found(folder, base):
    assert check_pretrained(SPEC, folder) == []
    origin = origin_of(folder)
    assert (origin.base, origin.adapters, origin.drawn_by) == (base, folder, None)


@pytest.mark.parametrize("targets", ["q_proj|v_proj", r".*\.(q|v)_proj"])
def test_a_target_pattern_matches_the_matrices_with_adapters(folder, targets):
    describe(folder, target_modules=targets)
    assert check_pretrained(SPEC, folder) == []


def test_names_with_their_parent_and_keys_without_effect_are_accepted(folder):
    describe(
        folder,
        target_modules=["self_attn.q_proj", "self_attn.v_proj"],
        lora_dropout=0.1,
        init_lora_weights="gaussian",
        rank_pattern={},
        alpha_pattern=None,
        peft_version="9.9",
        megatron_core="megatron.core",
        qalora_group_size=16,
        runtime_config={"ephemeral_gpu_offload": False},
    )
    assert check_pretrained(SPEC, folder) == []


def describe(folder, **changes):
    file = folder / ADAPTER_CONFIG
    described = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in described.items() if value != "left out"}))


def resave(folder, change):
    weights = load_file(folder / ADAPTERS)
    change(weights)
    save_file(weights, folder / ADAPTERS)


QUERY_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
KEY_A = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda at: describe(at, peft_type="IA3"), "has peft_type='IA3': input should be 'LORA'; save plain LoRA"),
        (lambda at: describe(at, peft_type="left out"), "has no peft_type; save plain LoRA adapters"),
        (lambda at: describe(at, task_type="SEQ_CLS"), "has task_type='SEQ_CLS': input should be 'CAUSAL_LM'"),
        (lambda at: describe(at, bias="all"), "has bias='all': input should be 'none'"),
        (lambda at: describe(at, fan_in_fan_out=True), "has fan_in_fan_out=True"),
        (lambda at: describe(at, init_lora_weights="pissa"), "has init_lora_weights='pissa'"),
        (lambda at: describe(at, use_rslora=True), "have rslora=true instead of false; set lora.rslora=true"),
        (lambda at: describe(at, use_dora=True), "have method=dora instead of lora; set lora.method=dora"),
        (lambda at: describe(at, modules_to_save=["lm_head"]), "has modules_to_save=['lm_head'], which is not"),
        (lambda at: describe(at, rank_pattern={"q_proj": 2}), "has rank_pattern={'q_proj': 2}, which is not"),
        (lambda at: describe(at, alpha_pattern={"q_proj": 2}), "has alpha_pattern={'q_proj': 2}, which is not"),
        (lambda at: describe(at, use_something_new=True), "has use_something_new=True, which is not supported"),
        (lambda at: describe(at, r=8), "have lora_rank=8 instead of 4; set lora.lora_rank=8"),
        (lambda at: describe(at, r=0), "has r=0: input should be greater than or equal to 1"),
        (lambda at: describe(at, lora_alpha=6.5), "have lora_alpha=6.5 instead of 8; set lora.lora_alpha=6.5"),
        (
            lambda at: describe(at, r=2, target_modules=["v_proj", "q_proj", "up_proj"]),
            "have lora_rank=2 instead of 4, target_modules=[q_proj,v_proj,up_proj] instead of [q_proj,v_proj]; "
            "set lora.lora_rank=2 lora.target_modules=[q_proj,v_proj,up_proj]",
        ),
        (
            lambda at: describe(at, target_modules=["q_proj", "gate"]),
            "target gate, which is not supported; only q_proj, ",
        ),
        (lambda at: describe(at, target_modules=None), "has target_modules=None"),
        (lambda at: describe(at, target_modules=[]), "names no target_modules"),
        (lambda at: (at / ADAPTER_CONFIG).write_text("{"), "cannot be read (Invalid JSON"),
        (lambda at: (at / ADAPTERS).rename(at / "adapter_model.bin"), "save_pretrained(safe_serialization=True)"),
        (lambda at: (at / ADAPTERS).unlink(), "holds no adapter_model.safetensors; download it"),
        (lambda at: (at / ADAPTERS).write_text("version https://git-lfs"), "run git lfs pull"),
        (lambda at: resave(at, lambda w: w.pop(QUERY_A)), f"{QUERY_A} is missing; choose the model they were trained"),
        (lambda at: resave(at, lambda w: w.update({KEY_A: torch.ones(4, 32)})), f"{KEY_A} is unknown; choose"),
        (
            lambda at: resave(at, lambda w: w.update({QUERY_A: torch.ones(4, 64)})),
            f"{QUERY_A} is [4, 64] instead of [4, 32]; choose the model they were trained over",
        ),
        (
            lambda at: resave(at, lambda w: w.update({QUERY_A: torch.ones(4, 32, dtype=torch.int8)})),
            "holds adapters in I8; save them in one of F64, F32, F16, BF16",
        ),
        (
            lambda at: describe(at, base_model_name_or_path="models/base/latest"),
            "base_model_name_or_path='models/base/latest', which is neither the absolute path of a folder here nor a",
        ),
        (lambda at: describe(at, base_model_name_or_path=None), "base_model_name_or_path='', which is neither"),
        (
            lambda at: (at.with_name("base") / "model.safetensors").unlink(),
            "base holds no weights: neither model.safetensors, nor",
        ),
    ],
)
def test_adapters_that_this_run_cannot_start_from_are_refused(folder, change, complaint):
    change(folder)
    assert complaint in refusal(folder)


def test_a_run_that_trains_every_weight_cannot_start_from_adapters(folder):
    assert "holds adapters, which only strategy=lora and hybrid train; use one, or merge" in refusal(
        folder, CONFIG.spec
    )


@pytest.fixture
def checkpoint(base):
    """A checkpoint of an adapter run, complete except for real weights."""
    checkpoint = RunDirectory(base.with_name("run")).checkpoints / checkpoint_name(2)
    checkpoint.mkdir(parents=True)
    (checkpoint / "__0_0.distcp").write_bytes(b"weights")
    write_json(checkpoint / STATE, {"step": 2})
    reconfigure(checkpoint, training={"init_from": str(base)})
    return checkpoint


def reconfigure(checkpoint, **changes):
    mapping = {"model": "llama3_8b", "architecture": SIZES | {"vocab_size": 64}, "strategy": "lora"}
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    config = RunConfig.from_mapping(mapping | {"lora": lora} | changes)
    (checkpoint / "config.yaml").write_text(config.to_yaml())
    write_manifest(checkpoint, {})


def test_an_adapter_checkpoint_has_the_base_its_run_started_from(checkpoint, base, folder):
    assert check_pretrained(SPEC, checkpoint) == []
    assert origin_of(checkpoint).base == base
    reconfigure(checkpoint, training={"init_from": str(folder)})
    assert (origin_of(checkpoint).base, origin_of(checkpoint).adapters) == (base, checkpoint)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"lora": {"lora_rank": 8}},
            "have lora_rank=8 instead of 4, lora_alpha=16 instead of 8, target_modules=[",
        ),
        (
            {"architecture": SIZES | {"vocab_size": 65}},
            "model.embed_tokens.weight is [65, 32] instead of [64, 32]",
        ),
        ({"training": {"init_from": "/gone"}}, "'/gone' does not exist; name a folder on this disk"),
        (
            {"training": {"init_from": None}, "launch": {"device": "cuda"}},
            "was drawn from a seed on a GPU",
        ),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(checkpoint, change, complaint):
    reconfigure(checkpoint, **change)
    assert complaint in refusal(checkpoint)


def test_adapters_that_start_from_themselves_are_refused(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "other")
    reconfigure(checkpoint, training={"init_from": str(tmp_path / "other")})
    reconfigure(tmp_path / "other", training={"init_from": str(checkpoint)})
    assert f"the adapters in {checkpoint} say that they start from themselves" in refusal(checkpoint)


def test_a_damaged_checkpoint_of_adapters_is_refused(checkpoint):
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    assert "is damaged (__0_0.distcp has 0 of 7 bytes)" in refusal(checkpoint)


def test_the_base_of_a_folder_cannot_be_a_run_or_its_adapter_checkpoint(checkpoint, folder):
    run = checkpoint.parents[1]
    describe(folder, base_model_name_or_path=str(run))
    assert f"is the run {run}; name one of its checkpoints" in refusal(folder)
    describe(folder, base_model_name_or_path=str(checkpoint))
    assert "strategy=lora and holds no full model; name one that does" in refusal(folder)


def test_a_randomly_drawn_base_is_identified_by_its_seed(checkpoint):
    reconfigure(checkpoint, training={"seed": 5})
    assert check_pretrained(SPEC, checkpoint) == []
    origin = origin_of(checkpoint)
    assert (origin.base, origin.drawn_by.training.seed) == (None, 5)
    assert yaml.safe_load((checkpoint / "config.yaml").read_text())["training"]["init_from"] is None
