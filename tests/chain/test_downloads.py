"""Names of the Hub in a run, with a small Hub on this machine and caches of its own."""

import gzip
import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load, save, save_file
from toy_hub import COMMIT, NEWER, ToyHub

from llama_core import hub as hub_of_engine
from llama_core.chain.downloads import resolve
from llama_core.chain.environment import validate_environment
from llama_core.chain.prepare import prepare_run
from llama_core.chain.preview import preview
from llama_core.config.config_json.reading import read_folder
from llama_core.config.run import RunConfig
from llama_core.errors import HubError
from llama_core.hub import HubName, folder_of, look_up
from llama_core.hugging_face.peft import adapter_json
from llama_core.hugging_face.pretrained import origin_of
from llama_core.hugging_face.weight_names import hugging_face_shapes
from llama_core.launch.ports import free_port
from llama_core.records.files import read_json
from training_infra import cli

SIZES = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TEXTS, OTHERS = (
    "\n".join(json.dumps({"text": f"{word} {number} " * 20}) for number in range(40)).encode()
    for word in ("text", "other")
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The files of a model, as they are in its repository."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SIZES))
    shapes = hugging_face_shapes(read_folder(str(folder)))
    tensors = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    placed = {name: first if name.startswith("model.embed") else second for name in tensors}
    for file in (first, second):
        save_file({name: tensor for name, tensor in tensors.items() if placed[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(weights, tmp_path, monkeypatch):
    """A Hub with a model and a data set, an empty cache, and an empty current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    others = {"pytorch_model.bin": b"pickled", "modeling_llama.py": b"code", "original/consolidated.00.pth": b"pickled"}
    with ToyHub().serving() as hub:
        hub.add("models/org/tiny", weights | others | {"consolidated.safetensors": b"twice", "README.md": b"read me"})
        texts = {
            "data/train-0.jsonl": TEXTS,
            "data/train-1.jsonl.gz": gzip.compress(TEXTS),
            "data/test-0.jsonl": OTHERS,
            **dict.fromkeys(("other/.hidden/part.jsonl", "/tmp/part.jsonl", "../part.jsonl", "a/../../b.jsonl"), TEXTS),
            "texts.py": b"code",
            "texts.csv": b"text",
        }
        hub.add("datasets/org/texts", texts)
        set_up(monkeypatch, hub.endpoint, tmp_path / "cache")
        yield hub


def set_up(monkeypatch, endpoint, cache, offline=False):
    """Do what HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE do, which huggingface_hub reads when it is imported."""
    values = {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": offline,
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    begin_anew()


def begin_anew():
    """Forget what this process knows of the Hub, as another one would not know it."""
    hub_of_engine._look_up.cache_clear()


def unreachable():
    return f"http://127.0.0.1:{free_port()}"


def config_of(tmp_path, **keys):
    data = {"cache_dir": str(tmp_path / "tokens")} | keys.pop("data", {})
    training = {"batch_size": 2, "steps": 1} | keys.pop("training", {})
    return RunConfig.from_mapping({"launch": {"device": "cpu"}, "data": data, "training": training, **keys})


DESCRIPTION = ["config.json", "model.safetensors.index.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def test_a_model_is_planned_from_its_description_alone(hub, tmp_path, capsys):
    assert cli.main(["estimate-memory", "--model", "org/tiny", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("org/tiny: ")
    assert hub.downloaded() == DESCRIPTION


def test_initial_weights_are_what_the_index_names_and_no_code_or_pickle_is_downloaded(hub, tmp_path):
    run = prepare_run(config_of(tmp_path, training={"init_from": "org/tiny"}), tmp_path / "run")
    assert hub.downloaded() == sorted([*DESCRIPTION, *SHARDS])
    recorded = yaml.safe_load(run.config.read_text())
    folder = Path(recorded["training"]["init_from"])
    assert folder == tmp_path / "cache" / "models--org--tiny" / "snapshots" / COMMIT
    assert recorded["model"] == str(folder)
    (source,) = read_json(run.hub)["sources"]
    assert source == {"setting": "training.init_from", "name": "org/tiny", "commit": COMMIT, "num_files": 4}


def test_what_is_in_the_cache_needs_no_network(hub, tmp_path, monkeypatch):
    config = {"training": {"init_from": "org/tiny"}, "data": {"source": "org/texts"}}
    first = prepare_run(config_of(tmp_path, **config), tmp_path / "run")
    hub.requests.clear()
    begin_anew()
    again = prepare_run(config_of(tmp_path, **config), tmp_path / "again")
    assert hub.requests == []
    set_up(monkeypatch, unreachable(), tmp_path / "cache")
    prepare_run(config_of(tmp_path, **config), tmp_path / "without")
    set_up(monkeypatch, hub.endpoint, tmp_path / "cache", offline=True)
    prepare_run(config_of(tmp_path, **config), tmp_path / "offline")
    assert again.config.read_text() == first.config.read_text()


def test_a_cache_that_other_software_has_filled_is_taken_as_it_is_without_a_network(hub, tmp_path, monkeypatch):
    folder = Path(huggingface_hub.snapshot_download("org/tiny"))
    for listing in (folder.parents[1] / "trees").iterdir():
        listing.unlink()
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    set_up(monkeypatch, unreachable(), tmp_path / "cache")
    run = prepare_run(config_of(tmp_path, model="org/tiny"), tmp_path / "run")
    assert yaml.safe_load(run.config.read_text())["model"] == str(folder)


def test_a_download_that_was_cut_short_goes_on(hub, tmp_path):
    config = config_of(tmp_path, training={"init_from": "org/tiny"})
    prepare_run(config, tmp_path / "run")
    folder = look_up(HubName("org/tiny")).folder
    (folder / SHARDS[0]).unlink()
    hub.requests.clear()
    begin_anew()
    prepare_run(config, tmp_path / "again")
    assert (folder / SHARDS[0]).is_file()


def test_a_revision_is_another_commit_and_one_in_the_cache_stays(hub, tmp_path):
    repository = hub.repositories["models/org/tiny"]
    repository.commits[NEWER] = {"config.json": json.dumps(SIZES | {"num_hidden_layers": 2}).encode()}
    repository.branches["v2"] = NEWER
    names = {"org/tiny": 1, "org/tiny@v2": 2, f"org/tiny@{NEWER}": 2, f"org/tiny@{COMMIT}": 1}
    assert {name: config_of(tmp_path, model=name).spec.num_layers for name in names} == names
    repository.branches["main"] = NEWER
    begin_anew()
    assert config_of(tmp_path, model="org/tiny").spec.num_layers == 1


def test_a_run_is_named_after_the_repository(hub, tmp_path):
    assert config_of(tmp_path, model="org/tiny").spec.name == "tiny"
    assert prepare_run(config_of(tmp_path, model="org/tiny")).name.startswith("tiny-")


def test_a_data_set_is_its_files_for_training_in_formats_that_are_read(hub, tmp_path):
    data = {"source": "org/texts", "validation": "org/texts"}
    run = prepare_run(config_of(tmp_path, data=data), tmp_path / "run")
    assert hub.downloaded() == ["data/test-0.jsonl", "data/train-0.jsonl", "data/train-1.jsonl.gz"]
    recorded = yaml.safe_load(run.config.read_text())["data"]
    files = {key: sorted(path.name for path in Path(recorded[key]).rglob("*.*")) for key in data}
    assert files == {"source": ["train-0.jsonl", "train-1.jsonl.gz"], "validation": ["test-0.jsonl"]}
    record = read_json(run.hub)
    assert [source["setting"] for source in record["sources"]] == ["data.source", "data.validation"]
    assert record["notes"] == ["org/texts: 1 file for validation or tests, such as data/test-0.jsonl, left out"]


def test_several_names_and_a_file_here_are_one_source_in_which_a_file_is_taken_once(hub, tmp_path):
    Path("own.jsonl").write_bytes(OTHERS)
    source = ["org/texts/data/train-0.jsonl", "own.jsonl", f"org/texts@{COMMIT}/data/train-*", "org/texts/data/train*"]
    run = prepare_run(config_of(tmp_path, data={"source": source}), tmp_path / "run")
    first, own, second = map(Path, yaml.safe_load(run.config.read_text())["data"]["source"])
    assert [path.name for path in first.rglob("*.*")] == ["train-0.jsonl"]
    assert own == Path("own.jsonl").absolute()
    assert [path.name for path in second.rglob("*.*")] == ["train-1.jsonl.gz"]
    record = read_json(run.hub)
    assert [source["num_files"] for source in record["sources"]] == [1, 1]
    assert record["notes"] == [
        f"org/texts@{COMMIT}/data/train-*: 1 file of several names, such as data/train-0.jsonl, taken once",
        "org/texts/data/train*: 2 files of several names, such as data/train-0.jsonl, taken once",
    ]


def test_a_data_set_may_be_plain_texts_and_what_describes_it_is_no_text_of_it(hub, tmp_path):
    texts = {f"books/{number}.txt": f"book {number} ".encode() * 200 for number in range(4)}
    hub.add("datasets/org/books", texts | {"README.md": b"about", "dataset_infos.json": b"{}", "LICENSE.txt": b"free"})
    run = prepare_run(config_of(tmp_path, data={"source": "org/books"}), tmp_path / "run")
    assert hub.downloaded() == sorted(texts)
    statistics = read_json(run.data)
    assert statistics["num_documents"] + statistics["num_validation_documents"] == 4


def test_a_link_whose_file_was_in_another_cache_is_made_anew(hub, tmp_path, monkeypatch):
    config = config_of(tmp_path, data={"source": "org/texts"})
    prepare_run(config, tmp_path / "run")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    set_up(monkeypatch, hub.endpoint, tmp_path / "elsewhere")
    prepare_run(config, tmp_path / "again")


@pytest.mark.parametrize("part", ["data/train-0.jsonl", "data/train-*.jsonl", f"@{COMMIT}/data/train-0*", "data/test*"])
def test_a_part_of_a_data_set_is_a_file_a_folder_or_a_pattern(hub, tmp_path, part):
    name = f"org/texts{part}" if part.startswith("@") else f"org/texts/{part}"
    prepare_run(config_of(tmp_path, data={"source": name}), tmp_path / "run")
    assert hub.downloaded() == [f"data/{'test' if 'test' in part else 'train'}-0.jsonl"]


def test_a_folder_here_of_the_same_name_wins_and_a_note_says_so(hub, tmp_path, capsys):
    Path("org/tiny").mkdir(parents=True)
    Path("org/tiny/config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": 3}))
    assert cli.main(["estimate-memory", "--model", "org/tiny", "--device", "cpu"]) == 0
    assert "note: model=org/tiny is the folder here, not a repository of the Hub\n" in capsys.readouterr().out
    run = prepare_run(config_of(tmp_path, model="org/tiny"), tmp_path / "run")
    assert read_json(run.hub)["notes"] == ["model=org/tiny is the folder here, not a repository of the Hub"]
    assert yaml.safe_load(run.config.read_text())["architecture"]["num_layers"] == 3
    assert hub.requests == []


def test_an_unsharded_model_comes_before_an_index_that_lies_beside_it(hub, weights, tmp_path, capsys):
    tensors = {}
    for file in SHARDS:
        tensors |= load(weights[file])
    index = weights["model.safetensors.index.json"]
    stale = {
        "config.json": weights["config.json"],
        "model.safetensors.index.json": index,
        SHARDS[0]: weights[SHARDS[0]],
    }
    hub.add("models/org/merged", stale | {"model.safetensors": save(tensors)})
    assert cli.main(["generate", "org/merged", "--prompt", "a", "--tokenizer", "bytes", "--max-new-tokens", "2"]) == 0
    assert hub.downloaded() == sorted([*DESCRIPTION, "model.safetensors"])


def test_a_rehearsal_downloads_neither_weights_nor_data_and_says_what_training_will(hub, tmp_path):
    config = config_of(tmp_path, training={"init_from": "org/tiny"}, data={"source": "org/texts"})
    weights, data = preview(config, here=True).of_hub[1:]
    assert weights.startswith("training.init_from: training first downloads 2 files of org/tiny, ")
    assert data.startswith("data.source: training first downloads 2 files of org/texts, ")
    warnings = validate_environment(config).warnings
    assert {weights, data} <= set(warnings)
    assert hub.downloaded() == DESCRIPTION


def test_a_tokenizers_other_templates_belong_to_its_description(hub, weights, tmp_path):
    templates = {"chat_template.jinja": b"plain", "additional_chat_templates/tool_use.jinja": b"with tools"}
    others = {"additional_chat_templates/notes.txt": b"", "additional_chat_templates/in/deep.jinja": b""}
    hub.add("models/org/tools", weights | templates | others)
    folder = folder_of("org/tools")
    assert hub.downloaded() == sorted([*DESCRIPTION, "chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "with tools"


def test_adapters_bring_the_model_that_they_name(hub, tmp_path):
    described = {"peft_type": "LORA", "base_model_name_or_path": "org/tiny", "r": 2, "lora_alpha": 4}
    adapters = {"adapter_config.json": json.dumps(described | {"target_modules": ["q_proj"]}).encode()}
    hub.add("models/org/lora", adapters | {"adapter_model.safetensors": b"", "adapter_model.bin": b"pickled"})
    config = config_of(tmp_path, training={"init_from": "org/lora"}, strategy="lora")
    assert config.spec.name == "tiny"
    of_hub = preview(config, here=True).of_hub
    assert [note.partition(", ")[0] for note in of_hub] == [
        "training.init_from: training first downloads 1 file of org/lora",
        "training.init_from: training first downloads 2 files of org/tiny",
    ]


def test_adapters_over_a_repository_have_the_commit_that_they_were_trained_over_on_any_machine(
    hub, weights, tmp_path, monkeypatch
):
    base = hub.repositories["models/org/tiny"]
    config = config_of(tmp_path, training={"init_from": "org/tiny"}, strategy="lora", lora={"lora_rank": 2})
    folder = Path(resolve(config).config.training.init_from)
    described = json.dumps(adapter_json(config.lora, str(folder))).encode()
    assert str(tmp_path) not in described.decode()
    moved = dict(weights) | {"config.json": json.dumps(SIZES | {"rms_norm_eps": 0.5}).encode()}
    base.commits[NEWER] = moved
    base.branches["main"] = NEWER
    hub.add("models/org/lora", {"adapter_config.json": described, "adapter_model.safetensors": b""})
    set_up(monkeypatch, hub.endpoint, tmp_path / "another machine")
    there = config_of(tmp_path, training={"init_from": "org/lora"}, strategy="lora")
    assert there.spec.norm_eps == 1e-6
    resolved = resolve(there)
    assert [str(source.snapshot.name) for source in resolved.sources][-1] == f"org/tiny@{COMMIT}"
    resolved.sources[-1].fetch()
    assert origin_of(Path(resolved.config.training.init_from)).base == Path(there.model)
    assert Path(there.model).name == COMMIT


def test_a_model_of_the_hub_is_looked_at_without_a_run(hub, capsys):
    assert cli.main(["generate", "org/tiny", "--prompt", "a", "--tokenizer", "bytes", "--max-new-tokens", "2"]) == 0
    assert "download" not in capsys.readouterr().out
    assert hub.downloaded() == sorted([*DESCRIPTION, *SHARDS])


def refusal(tmp_path, **keys):
    with pytest.raises(HubError) as caught:
        prepare_run(config_of(tmp_path, **keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return str(caught.value)


def test_a_gated_repository_is_a_line_with_what_to_do(hub, tmp_path, monkeypatch):
    hub.repositories["models/org/tiny"].is_gated = True
    told = f"org/tiny is gated: ask for access at {hub.endpoint}/org/tiny, then log in with `hf auth login` or set "
    assert refusal(tmp_path, model="org/tiny") == f"{told}HF_TOKEN"
    monkeypatch.setenv("HF_TOKEN", "hf_abcDEF123456")
    begin_anew()
    prepare_run(config_of(tmp_path, training={"init_from": "org/tiny"}), tmp_path / "run")


def test_the_token_is_sent_to_the_hub_and_kept_nowhere(hub, tmp_path, monkeypatch, capsys):
    token = "hf_abcDEF123456"
    monkeypatch.setenv("HF_TOKEN", token)
    prepare_run(config_of(tmp_path, training={"init_from": "org/tiny"}), tmp_path / "run")
    problem = refusal(tmp_path / "other", model="org/nothing")
    told = capsys.readouterr()
    assert f"Bearer {token}" in {request.authorization for request in hub.requests}
    assert token not in f"{told.out}{told.err}{problem}"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if token.encode() in path.read_bytes()]


@pytest.mark.parametrize("token", ["hf_abc\x0bDEF123456", "hf_abc\u00efDEF123456"])
def test_a_token_that_no_request_can_carry_is_a_line_without_it(hub, tmp_path, monkeypatch, token):
    monkeypatch.setenv("HF_TOKEN", token)
    problem = refusal(tmp_path, model="org/tiny")
    assert problem.startswith("org/tiny cannot be had: the token has characters that no token has; log in")
    assert "DEF" not in problem


def test_without_a_network_a_name_that_is_not_in_the_cache_is_a_line(hub, tmp_path, monkeypatch):
    set_up(monkeypatch, unreachable(), tmp_path / "cache")
    told = refusal(tmp_path, model="org/tiny")
    assert told.startswith(f"org/tiny is neither here nor whole in {tmp_path / 'cache'}, and http://127.0.0.1:")
    assert told.endswith("; check the network, or name a folder here")
    set_up(monkeypatch, hub.endpoint, tmp_path / "cache", offline=True)
    assert "and HF_HUB_OFFLINE forbids to download it; name a folder here" in refusal(tmp_path, model="org/tiny")


def test_a_name_that_stands_for_nothing_usable_is_a_line(hub, tmp_path):
    hub.add("models/org/pickled", {"config.json": json.dumps(SIZES).encode(), "pytorch_model.bin": b""})
    hub.add("datasets/org/tables", {"table.csv": b""})
    told = {
        "org/nothing is neither here nor a model of": {"model": "org/nothing"},
        "org/nothing is neither here nor a dataset of": {"data": {"source": "org/nothing"}},
        "org/tiny@v9 is no revision of": {"model": "org/tiny@v9"},
        "org/pickled has no weights in safetensors, only pickled ones (pytorch_model.bin)": {
            "training": {"init_from": "org/pickled"}
        },
        "org/tables holds no file in a format that is read here; its revision refs/convert/parquet may": {
            "data": {"source": "org/tables"}
        },
        "org/texts holds no data in 'nowhere'; it has some in data": {"data": {"source": "org/texts/nowhere"}},
    }
    for beginning, keys in told.items():
        assert refusal(tmp_path, **keys).startswith(beginning)


def test_a_data_set_that_the_disk_has_no_room_for_is_refused_with_a_part_of_it(hub, tmp_path):
    hub.repositories["datasets/org/texts"].claimed_sizes["data/train-0.jsonl"] = 2**60
    told = refusal(tmp_path, data={"source": "org/texts"})
    assert f"the disk of {tmp_path / 'cache' / 'datasets--org--texts'} is full: over " in told
    assert told.endswith("or name a part of it, such as org/texts/data")
    assert hub.downloaded() == []


def test_a_misspelled_file_is_not_looked_for_on_the_hub(hub, tmp_path, capsys):
    for file in ("data/texts.jsonl", "data/README.md", "data/texts.json.zst"):
        assert cli.main(["estimate-memory", "--data", file, "--device", "cpu"]) == 2
        assert f"data source '{file}' does not exist" in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.parametrize("name", ["a\0.jsonl", f"{'a' * 300}.jsonl"], ids=["no text", "long"])
def test_a_repository_with_a_file_that_no_disk_can_hold_is_a_line_about_the_name(hub, tmp_path, name):
    hub.add("datasets/org/odd", {"fine.jsonl": TEXTS, name: TEXTS})
    told = refusal(tmp_path, data={"source": "org/odd"})
    assert told.startswith("org/odd has a file whose name cannot be used here (")
    assert "cannot be reached" not in told
