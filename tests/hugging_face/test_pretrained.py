"""Bad weights are refused before a job exists, in one line."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from architectures import BLOCK, NEEDS, VALUES
from hugging_face_models import model_with_large_weights, renamed
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from llama_core.config.config_json.writing import config_json
from llama_core.config.model_weights import hugging_face_name
from llama_core.config.rope import LinearScaling
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face import pretrained
from llama_core.hugging_face.pretrained import (
    check_pretrained,
    has_own_head,
    hugging_face_weights,
    origin_of,
    refuse_own_head,
    resolve_pretrained,
    where_stored,
)
from llama_core.hugging_face.weight_files import read_tensors
from llama_core.hugging_face.weight_names import hugging_face_shapes
from llama_core.records.checkpoints import LAYOUT, STATE, checkpoint_name, write_manifest
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
CONFIG = RunConfig.from_mapping({"model": "llama3_8b", "architecture": SIZES | {"vocab_size": 64}})
SPEC = CONFIG.spec
TIED = replace(SPEC, tied_embeddings=True)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def written_by_transformers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    model = LlamaForCausalLM(LlamaConfig(**config_json(SPEC)))
    model.save_pretrained(folder / "whole")
    model.save_pretrained(folder / "sharded", max_shard_size="16KB")
    return folder


@pytest.fixture
def folder(tmp_path):
    """A whole model in one file, as this project writes it."""
    save_file(renamed(model_with_large_weights(SPEC)), tmp_path / "model.safetensors", {"format": "pt"})
    describe(tmp_path, SPEC)
    return tmp_path


@pytest.fixture
def sharded(written_by_transformers, tmp_path):
    """A sharded model; its files are links, as in the cache of huggingface_hub."""
    for path in (written_by_transformers / "sharded").iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def refusal(folder, spec=SPEC):
    with pytest.raises(WeightsError) as refused:
        check_pretrained(spec, folder)
        refuse_own_head(spec, origin_of(folder))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("trait", [name for name in VALUES if "." not in name and name != "trainable"])
def test_a_trait_that_no_weight_shows_is_compared_with_that_of_the_weights(trait):
    plain, other = (replace(BLOCK, **NEEDS.get(trait, {}) | {trait: value}) for value in VALUES[trait][-2:])
    is_shown = hugging_face_shapes(plain) != hugging_face_shapes(other)
    assert is_shown or trait in {*pretrained._FIXED, *pretrained._MOVABLE}


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_weights_of_transformers_are_accepted_and_found_where_safetensors_finds_them(written_by_transformers, layout):
    folder = written_by_transformers / layout
    check_pretrained(SPEC, folder)
    found = read_tensors(folder)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (layout == "sharded")
    for file in files:
        for name, weight in load_file(file).items():
            stored = found.pop(name)
            assert (stored.file, stored.shape) == (file, tuple(weight.shape))
            raw = file.read_bytes()[stored.start : stored.start + weight.nbytes]
            assert raw == weight.numpy().tobytes()
    assert found == {}


def test_a_link_into_a_cache_is_followed(sharded):
    check_pretrained(SPEC, sharded)


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def break_link(link):
    link.unlink()
    link.symlink_to("nowhere")


def cut_short(file, num_bytes):
    content = file.read_bytes()[:num_bytes]
    file.unlink()
    file.write_bytes(content)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).unlink()
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def repeat_weight(file, other):
    """Add a weight of ``file`` to ``other``."""
    name, weight = next(iter(load_file(file).items()))
    weights = load_file(other)
    other.unlink()
    save_file(weights | {name: weight}, other)


def move_weight(folder, name):
    """Move a weight to the first shard; the index still names the shard that it was in."""
    first = shards(folder)[0]
    before = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    rest = load_file(before)
    moved = {name: rest.pop(name)} | load_file(first)
    for file, weights in ((before, rest), (first, moved)):
        file.unlink()
        save_file(weights, file, {"format": "pt"})


def unsharded(folder, others):
    """Put all weights in one file, and leave an index of shards that are gone; copy the file to ``others``."""
    weights = {}
    for file in shards(folder):
        weights |= load_file(file)
        file.unlink()
    for name in ("model.safetensors", *others):
        save_file(weights, folder / name, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (
            lambda at: (at / "consolidated-00001.safetensors").write_bytes(b"x"),
            f"consolidated-00001.safetensors is not read, only the files that {INDEX} names, as in transformers",
        ),
        (
            lambda at: [(at / f"{name}.safetensors").write_bytes(b"x") for name in ("model-fp8", "adapter_model", "b")],
            f"adapter_model.safetensors and 2 more are not read, only the files that {INDEX} names, as in transformers",
        ),
        (
            lambda at: unsharded(at, []),
            f"{INDEX} is not read, only model.safetensors, as in transformers",
        ),
        (
            lambda at: [unsharded(at, [shards(at)[0].name])],
            "model-00001-of-00006.safetensors and 1 more are not read, only model.safetensors, as in transformers",
        ),
        (
            lambda at: [unsharded(at, ["params.safetensors"]), (at / INDEX).unlink()],
            "params.safetensors is not read, only model.safetensors, as in transformers",
        ),
        (
            lambda at: edit_index(at, lambda index: index["weight_map"].pop("model.norm.weight")),
            f"model.norm.weight is read from another file than {INDEX} says",
        ),
        (
            lambda at: move_weight(at, "lm_head.weight"),
            f"lm_head.weight is read from another file than {INDEX} says",
        ),
    ],
)
def test_other_files_and_a_stale_index_are_told_and_the_weights_are_those_of_transformers(sharded, change, note):
    change(sharded)
    notes = []
    found = read_tensors(sharded, notes.append)
    assert notes == [f"{sharded}: {note}"]
    assert check_pretrained(SPEC, sharded) == notes
    theirs = LlamaForCausalLM.from_pretrained(sharded).state_dict()
    assert found.keys() == theirs.keys()
    for name, stored in found.items():
        raw = stored.file.read_bytes()[stored.start : stored.start + theirs[name].nbytes]
        assert raw == theirs[name].numpy().tobytes()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda at: shards(at)[3].unlink(), "names model-00004-of-"),
        (lambda at: shards(at)[3].rename(at / "elsewhere"), "which is not there; download it"),
        (lambda at: break_link(shards(at)[3]), "which is not there; download it"),
        (lambda at: cut_short(shards(at)[0], 4000), "has 4,000 of "),
        (lambda at: cut_short(shards(at)[0], 100), "has 100 bytes, fewer than its header; download it again"),
        (lambda at: cut_short(shards(at)[0], 0), "has 0 bytes, fewer than its header; download it again"),
        (lambda at: (at / INDEX).unlink(), f"but neither model.safetensors nor {INDEX}; download it"),
        (lambda at: repeat_weight(shards(at)[0], shards(at)[3]), "and so does model-00001-of-"),
        (lambda at: cut_short(at / INDEX, 100), f"{INDEX}: JSONDecodeError"),
        (lambda at: edit_index(at, lambda index: index.pop("weight_map")), f"{INDEX}: KeyError('weight_map'); down"),
        (
            lambda at: edit_index(at, lambda index: index["weight_map"].update(more=shards(at)[0].name)),
            f"does not hold more, which {INDEX} places there",
        ),
    ],
)
def test_an_incomplete_sharded_model_is_refused(sharded, damage, complaint):
    damage(sharded)
    assert complaint in refusal(sharded)


def resave(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def describe(folder, spec):
    (folder / "config.json").write_text(json.dumps(config_json(spec)))


def rename_weights(folder, name):
    (folder / "model.safetensors").rename(folder / name)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda at: resave(at, lambda w: w.pop("model.norm.weight")), "model.norm.weight is missing"),
        (lambda at: resave(at, lambda w: w.update(bias=torch.ones(1))), "bias is unknown"),
        (
            lambda at: resave(at, lambda w: w.update({"model.norm.weight": torch.ones(2)})),
            "model.norm.weight is [2] instead of [32]",
        ),
        (
            lambda at: resave(at, lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})),
            "model.safetensors holds weights in I8; dequantise them to one of F64, F32, F16, BF16",
        ),
        (lambda at: rename_weights(at, "pytorch_model.bin"), "save_pretrained(safe_serialization=True)"),
        (lambda at: rename_weights(at, "consolidated.00.pth"), "save_pretrained(safe_serialization=True)"),
        (lambda at: rename_weights(at, "weights.safetensors"), "weights.safetensors, but neither model.safetensors"),
        (lambda at: (at / "model.safetensors").unlink(), "holds no weights: neither model.safetensors, nor"),
        (lambda at: (at / "model.safetensors").write_text("x" * 99), "fewer than its header"),
        (
            lambda at: (at / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
            "is a Git LFS pointer without the weights; run git lfs pull",
        ),
        (lambda at: (at / "model.safetensors").write_bytes(b"\4" + b"\0" * 7 + b"{}}}"), "is not a safetensors file"),
        (lambda at: describe(at, replace(SPEC, num_heads=2)), "num_heads=2 instead of 4"),
        (
            lambda at: [describe(at, TIED), resave(at, lambda w: w.pop("lm_head.weight"))],
            "tied_embeddings=True instead of False",
        ),
    ],
)
def test_a_folder_that_this_model_cannot_start_from_is_refused(folder, change, complaint):
    change(folder)
    assert complaint in refusal(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head + 1,
        lambda head: head.to(torch.bfloat16),
        lambda head: torch.cat((head[:-1], head[:1])),
        lambda head: -head,
    ],
)
def test_a_head_that_is_not_the_embedding_of_a_tied_model_is_refused_unless_it_is_asked_for(folder, change):
    resave(folder, lambda w: w.update({"lm_head.weight": change(w["model.embed_tokens.weight"])}))
    describe(folder, TIED)
    assert has_own_head(folder)
    assert refusal(folder, TIED) == (
        f"{folder}/config.json says tie_word_embeddings=true, but lm_head.weight holds other numbers than "
        "model.embed_tokens.weight; set architecture.tied_embeddings=false to have that head, as transformers 5 does, "
        "or remove it there"
    )
    assert check_pretrained(SPEC, folder) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.pop("lm_head.weight"),
        lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
        lambda w: w.update({"lm_head.weight": w.pop("model.embed_tokens.weight")}),
    ],
    ids=["embedding", "both", "head"],
)
def test_the_one_matrix_of_a_tied_model_may_have_either_name_or_both(folder, change):
    resave(folder, change)
    describe(folder, TIED)
    assert not has_own_head(folder)
    assert check_pretrained(TIED, folder) == []
    stored = hugging_face_weights(TIED, folder)["tok_embeddings.weight"][0]
    theirs = LlamaForCausalLM.from_pretrained(folder).model.embed_tokens.weight.detach()
    assert stored.file.read_bytes()[stored.start : stored.start + theirs.nbytes] == theirs.numpy().tobytes()


def test_a_folder_of_another_architecture_is_refused(folder):
    (folder / "config.json").write_text(json.dumps(config_json(SPEC) | {"model_type": "gemma"}))
    with pytest.raises(ConfigError, match=r'model_type="gemma": only llama, mixtral, .* can be trained'):
        check_pretrained(SPEC, folder)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({}, []),
        ({"rope_theta": 1e4}, ["architecture.rope_theta is 500000, but {} was made for 10000"]),
        (
            {"rope_scaling": LinearScaling(4.0)},
            ["architecture.rope_scaling is none, but {} was made for kind=linear factor=4.0"],
        ),
        ({"sliding_window": 512}, ["architecture.sliding_window is 0, but {} was made for 512"]),
        ({"norm_eps": 1e-6}, ["architecture.norm_eps is 1e-05, but {} was made for 1e-06"]),
    ],
)
def test_weights_made_for_other_settings_are_accepted_with_a_note(folder, changes, note):
    describe(folder, replace(SPEC, **changes))
    expected = [f"{sentence.format(folder)}; ignore this if it is intended" for sentence in note]
    assert check_pretrained(SPEC, folder) == expected


def test_a_path_that_is_not_a_folder_is_refused(tmp_path):
    assert "does not exist; name a folder on this disk" in refusal(tmp_path / "meta-llama" / "Meta-Llama-3-8B")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file; name its folder" in refusal(tmp_path / "model.safetensors")


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints, complete except for real weights."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.config.write_text(CONFIG.to_yaml())
    for step in (2, 4):
        checkpoint = run.checkpoints / checkpoint_name(step)
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.yaml").write_text(CONFIG.to_yaml())
        (checkpoint / "__0_0.distcp").write_bytes(b"weights")
        write_json(checkpoint / STATE, {"step": step})
        write_manifest(checkpoint, {})
    return run


def test_a_run_stands_for_its_newest_complete_checkpoint(run):
    newest = run.checkpoints / "step-00000004"
    assert resolve_pretrained(str(run.path)) == str(newest)
    assert resolve_pretrained(str(newest)) == str(newest)
    assert check_pretrained(SPEC, newest) == []
    (newest / "__0_0.distcp").write_bytes(b"weigh")
    assert resolve_pretrained(str(run.path)) == str(run.checkpoints / "step-00000002")


def with_config(run, **changes):
    mapping = yaml.safe_load(CONFIG.to_yaml()) | changes
    checkpoint = run.checkpoints / "step-00000004"
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(mapping))
    write_manifest(checkpoint, {})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda run: write_json(
                run.checkpoints / "step-00000004" / LAYOUT, {"zero_stage": 1, "compute_dtype": "bfloat16"}
            ),
            "was written by DeepSpeed at stage 1 in bf16, whose weights",
        ),
        (lambda run: with_config(run, strategy="moe"), "model.layers.0.mlp.gate_proj.weight is missing"),
        (lambda run: with_config(run, strategy="lora"), "holds adapters, which only strategy=lora and hybrid train"),
        (lambda run: with_config(run, model="tiny_llama3_50m"), "tied_embeddings=True instead of False"),
        (
            lambda run: with_config(run, architecture=SIZES | {"vocab_size": 65}),
            "model.embed_tokens.weight is [65, 32] instead of [64, 32]",
        ),
        (
            lambda run: (run.checkpoints / "step-00000004" / "__0_0.distcp").write_bytes(b""),
            "is damaged (__0_0.distcp has 0 of 7 bytes); choose another checkpoint of its run",
        ),
    ],
)
def test_a_checkpoint_that_this_model_cannot_start_from_is_refused(run, change, complaint):
    change(run)
    assert complaint in refusal(run.checkpoints / "step-00000004")


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.config.write_text(CONFIG.to_yaml())
    assert "has no complete checkpoint yet; let it save one" in refusal(run.path)


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_a_weight_is_found_in_the_file_that_holds_it(written_by_transformers, layout):
    folder = written_by_transformers / layout
    for file in sorted(folder.glob("*.safetensors")):
        for theirs in load_file(file):
            ours = next(name for name in SPEC.parameter_shapes if hugging_face_name(name) == theirs)
            assert where_stored(ours, SPEC, folder) == f"{theirs} in {file}"
