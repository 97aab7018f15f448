import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from llama_core.chain.planned import with_keys
from llama_core.config.architecture import ArchitectureConfig
from llama_core.config.config_json.reading import ignored_settings, is_folder, read_folder
from llama_core.config.config_json.writing import config_json
from llama_core.config.models import ModelSpec, model_spec
from llama_core.config.overrides import Override
from llama_core.config.rope import LinearScaling
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.sweep.grid import SweepConfig

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
IGNORED = (
    "ignored, as in transformers; if the model was trained with it, set architecture.rope_scaling, such as its "
    "attention_factor"
)


@pytest.fixture
def folder(tmp_path):
    """A function that writes a folder's config.json with some keys changed; None drops a key."""

    def write(**keys):
        path = tmp_path / "My-Llama"
        path.mkdir(exist_ok=True)
        given = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | SIZES | keys
        (path / "config.json").write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
        return path

    return write


def config_of(path, **architecture):
    return RunConfig.from_mapping({"model": path, "architecture": architecture})


def problems(path):
    with pytest.raises(ConfigError) as caught:
        config_of(path)
    return [problem.removeprefix(f"{path}/config.json: ") for problem in caught.value.problems]


def test_a_folder_is_a_model(folder):
    config = config_of(folder(num_key_value_heads=2, tie_word_embeddings=True))
    assert (config.spec.name, config.spec.hidden_size, config.spec.num_kv_heads) == ("My-Llama", 64, 2)
    assert config.spec.tied_embeddings


@pytest.mark.parametrize(("context", "default"), [(2048, 2048), (131_072, 8192)])
def test_a_long_context_folder_trains_at_8192_tokens_unless_more_is_requested(folder, context, default):
    path = folder(max_position_embeddings=context)
    assert config_of(path).seq_len == default
    assert RunConfig.from_mapping({"model": path, "training": {"seq_len": context}}).seq_len == context


def test_initial_weights_bring_their_model_and_tokenizer_unless_others_are_named(folder):
    path = str(folder())
    (Path(path) / "tokenizer.json").touch()
    config = RunConfig.from_mapping({"training": {"init_from": path}})
    assert (config.model, config.data.tokenizer) == (path, path)
    named = {"model": "llama3_8b", "data": {"tokenizer": "bytes"}, "training": {"init_from": path}}
    assert RunConfig.from_mapping(named).model_dump(include={"model", "data"})["model"] == "llama3_8b"
    assert RunConfig.from_mapping(named).data.tokenizer == "bytes"


def test_the_weights_of_a_run_bring_its_architecture(tmp_path):
    trained = RunConfig.from_mapping({"architecture": {"num_layers": 2}})
    (tmp_path / "config.yaml").write_text(trained.to_yaml())
    assert RunConfig.from_mapping({"training": {"init_from": str(tmp_path)}}).spec == trained.spec


def test_architecture_keys_change_the_model_that_initial_weights_bring(folder, tmp_path):
    longer = {"rope_scaling": {"kind": "yarn", "factor": 4.0}}
    path = str(folder())
    of_folder = RunConfig.from_mapping({"architecture": longer, "training": {"init_from": path}})
    assert of_folder.model == path
    assert of_folder.spec.max_context == 4 * config_of(path).spec.max_context
    trained = RunConfig.from_mapping({"architecture": {"num_layers": 2, "max_context": 256}})
    (tmp_path / "config.yaml").write_text(trained.to_yaml())
    of_run = RunConfig.from_mapping(
        {"architecture": longer | {"max_context": 1024}, "training": {"init_from": str(tmp_path)}}
    )
    assert (of_run.spec.num_layers, of_run.spec.max_context) == (2, 1024)
    assert of_run.spec.rope_scaling is not None


def test_adapters_bring_their_base_and_their_settings(folder, tmp_path):
    adapters = {"base_model_name_or_path": str(folder()), "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    adapters["peft_type"] = "LORA"
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters))
    config = RunConfig.from_mapping(
        {"strategy": "lora", "lora": {"lora_alpha": 6}, "training": {"init_from": str(tmp_path)}}
    )
    assert config.model == adapters["base_model_name_or_path"]
    assert (config.lora.lora_rank, config.lora.lora_alpha, config.lora.target_modules) == (4, 6, ("q_proj",))


EXPERTS = {"num_experts": 4, "moe_layers": 2}
STRATEGIES = [
    {"strategy": "standard"},
    {"strategy": "lora", "lora": {"lora_rank": 4, "target_modules": ["q_proj", "down_proj"]}},
    {"strategy": "lora", "lora": {"method": "dora"}, "trainable": ["*norm*"]},
    {"strategy": "moe", "moe": EXPERTS},
    {"strategy": "hybrid", "moe": EXPERTS, "lora": {"rslora": True}, "trainable": ["norm"]},
]


@pytest.mark.parametrize("trained", STRATEGIES, ids=str)
@pytest.mark.parametrize("objective", ["next_token", "dpo", "kto"])
def test_a_run_goes_on_as_what_its_initial_weights_are(tmp_path, trained, objective):
    before = RunConfig.from_mapping({"model": "tiny_llama3_150m", **trained})
    (tmp_path / "config.yaml").write_text(before.to_yaml())
    after = RunConfig.from_mapping({"training": {"objective": objective, "init_from": str(tmp_path)}})
    assert (after.strategy, after.trainable) == (before.strategy, before.trainable)
    assert (after.lora, after.moe) == (before.lora, before.moe)


def test_a_strategy_that_is_named_is_not_that_of_the_initial_weights(tmp_path):
    before = RunConfig.from_mapping({"strategy": "lora", "lora": {"lora_rank": 4}, "trainable": ["*norm*"]})
    (tmp_path / "config.yaml").write_text(before.to_yaml())
    named = {"strategy": "standard", "training": {"init_from": str(tmp_path)}}
    assert RunConfig.from_mapping(named).strategy == "standard"


@pytest.mark.parametrize(
    ("base", "strategy"),
    [({}, "lora"), ({"model_type": "mixtral", "architectures": None, "num_key_value_heads": 2}, "hybrid")],
)
def test_a_folder_of_adapters_says_which_strategy_trains_them(folder, tmp_path, base, strategy):
    described = {"base_model_name_or_path": str(folder(**base)), "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **described}))
    assert RunConfig.from_mapping({"training": {"init_from": str(tmp_path)}}).strategy == strategy


def adapters_in(folder, rank, base):
    """Write PEFT's adapters of a folder of their own, and return their path."""
    described = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": rank, "target_modules": ["q_proj"]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def test_other_initial_weights_bring_their_own_model_and_adapters(folder, tmp_path):
    one = adapters_in(tmp_path / "one", 4, folder(hidden_size=64))
    (tmp_path / "b").mkdir()
    run = RunConfig.from_mapping({"architecture": {"num_layers": 3}, "data": {"chat_template": "llama2"}})
    (tmp_path / "b" / "config.yaml").write_text(run.to_yaml())
    config = RunConfig.from_mapping({"lora": {"lora_alpha": 6}, "training": {"init_from": one}})
    assert (config.strategy, config.lora.lora_rank, config.lora.lora_alpha) == ("lora", 4, 6)
    other = RunConfig.from_mapping({"training": {"init_from": one}}).with_overrides(
        Override("training.init_from", str(tmp_path / "b"))
    )
    assert (other.spec, other.strategy, other.data.chat_template) == (run.spec, "standard", "llama2")


def test_a_sweep_over_strategies_begins_with_adapters(folder, tmp_path):
    base = {"training": {"init_from": adapters_in(tmp_path / "one", 4, folder())}}
    sweep = SweepConfig.from_mapping({"name": "s", "base": base, "grid": {"strategy": ["standard", "lora"]}})
    for made in (sweep, SweepConfig.from_mapping(json.loads(json.dumps(sweep.given())))):
        standard, lora = (made.config_of(element) for element in made.elements())
        assert (standard.strategy, standard.spec.lora, lora.lora.lora_rank) == ("standard", None, 4)
    record = sweep.record()
    (tmp_path / "one" / "adapter_config.json").unlink()
    assert SweepConfig.from_mapping(record).base == sweep.base


def test_a_recorded_mixture_keeps_its_experts_without_its_folder(folder, tmp_path):
    mixtral = folder(model_type="mixtral", architectures=None, num_key_value_heads=2, num_local_experts=4)
    config = RunConfig.from_mapping({"model": str(mixtral)})
    assert config.given() == {"model": str(mixtral)}
    recorded = config.self_contained()
    (mixtral / "config.json").unlink()
    changed = with_keys(recorded, launch={"device": "cpu"})
    assert (changed.spec, changed.strategy, changed.moe) == (config.spec, "moe", config.moe)


def test_the_weights_of_a_run_bring_its_chat_template_unless_another_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text(RunConfig.from_mapping({"data": {"chat_template": "chatml"}}).to_yaml())
    settings = {"training": {"init_from": str(tmp_path)}}
    assert RunConfig.from_mapping(settings).data.chat_template == "chatml"
    assert RunConfig.from_mapping(settings | {"data": {"chat_template": "llama2"}}).data.chat_template == "llama2"


@pytest.mark.parametrize("name", ["config.yaml", "adapter_config.json"])
@pytest.mark.parametrize("text", ["[1]", "{", ""])
def test_a_damaged_file_brings_nothing(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert RunConfig.from_mapping({"training": {"init_from": str(tmp_path)}}).model == RunConfig().model


def test_a_run_records_every_trait_of_its_model():
    written_elsewhere = {"name", "family", "default_seq_len", "lora", "moe", "trainable", "base"}
    assert {trait.name for trait in fields(ModelSpec)} - written_elsewhere <= set(ArchitectureConfig.model_fields)


def test_settings_override_those_of_the_folder(folder):
    path = folder(rope_parameters=LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 512})
    config = config_of(path, num_layers=1, rope_scaling={"factor": 16})
    scaling = config.spec.rope_scaling
    assert (config.spec.num_layers, scaling.kind, scaling.factor, scaling.original_context) == (1, "llama3", 16, 512)
    assert config.spec.max_context == 2 * 2048


@pytest.mark.parametrize(
    ("files", "instruct"),
    [
        ({}, False),
        ({"tokenizer_config.json": "{}"}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"chat_template.jinja": "{{ messages }}"}, True),
    ],
)
def test_a_chat_template_marks_an_instruct_model(folder, files, instruct):
    path = folder()
    for name, text in files.items():
        (path / name).write_text(text)
    assert read_folder(str(path)).instruct is instruct
    assert not config_of(path, instruct=False).spec.instruct


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            ['architectures="LlamaForSequenceClassification": only'],
        ),
        ({"attention_bias": True}, ["attention_bias=true: Llama's attention has no biases"]),
        ({"mlp_bias": True}, ["mlp_bias=true: Llama's feed-forward has no biases"]),
        ({"hidden_act": "gelu"}, ['hidden_act="gelu": the feed-forward of Llama is SwiGLU, with silu']),
        ({"sliding_window": 4096}, ["sliding_window=4096: Llama attends to all earlier tokens"]),
        ({"quantization_config": 4}, ["quantization_config=4: is not a mapping of keys to values"]),
        (
            {"quantization_config": {"bits": 4}},
            ['quantization_config: weights in "an unnamed format" cannot be read, o'],
        ),
        (
            {"quantization_config": {"quant_method": "awq\n"}},
            ['quantization_config: weights in "awq\\n" cannot be read'],
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
            ['quantization_config: weights in "int8" cannot be read, only those in bitsandbytes\' nf4, in fp8 of'],
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            ['quantization_config: weights in "fp4" cannot be read'],
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            ['quantization_config: weights in "fp8 of e4m3 in blocks of null" cannot be read'],
        ),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5: Llama rotates the whole of every head"]),
        ({"model_type": None}, ["model_type is missing"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "64"}, ['hidden_size="64": input should be a valid integer']),
        ({"vocab_size": 0}, ["vocab_size=0: input should be greater than or equal to 1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3 does not divide num_attention_heads=4"]),
        ({"hidden_size": 66}, ["hidden_size=66 is not a multiple of num_attention_heads=4; add head_dim"]),
        ({"head_dim": 15}, ["head_dim=15 is odd, but the rotary embedding rotates pairs"]),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            ['rope_scaling.rope_type="longrope": choose one of default, linear, llama3, yarn'],
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            ['rope_parameters.rope_type="dynamic": a text\'s length would change all its frequencies, those of cached'],
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}},
            ["rope_scaling.beta_fast=1 must be above beta_slow=2, and both above 0"],
        ),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is missing"]),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": None}},
            ["rope_scaling.low_freq_factor=null: input should be a valid number"],
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            ["rope_scaling.high_freq_factor=0.5 must be at least low_freq_factor=1, and both above 0"],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["rope_parameters.full_attention: not a setting of Llama's rotary embedding"],
        ),
        ({"rope_parameters": 3}, ["rope_parameters=3: is not a mapping of keys to values"]),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            ["rope_parameters.rope_theta=500000 contradicts rope_theta=10000; keep the right one"],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA3},
            ["rope_scaling contradicts rope_parameters; keep the right one"],
        ),
        (
            {"original_max_position_embeddings": 512, "rope_scaling": YARN | {"original_max_position_embeddings": 64}},
            [
                "original_max_position_embeddings=512 contradicts rope_scaling.original_max_position_embeddings=64; "
                "keep the right one"
            ],
        ),
        (  # transformers reads the first mapping alone
            {"rope_scaling": YARN, "rope_parameters": YARN | {"original_max_position_embeddings": 64}},
            ["rope_scaling contradicts rope_parameters; keep the right one"],
        ),
        (
            {"original_max_position_embeddings": 0},
            ["original_max_position_embeddings=0: input should be greater than or equal to 1"],
        ),
        (  # all at once; another model's names for its sizes are no further problem
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "hidden_size": None},
            ['model_type="gpt2": only llama', 'architectures="GPT2LMHeadModel": only LlamaForCausalLM'],
        ),
        (
            {"attention_bias": True, "mlp_bias": True, "vocab_size": None},
            ["vocab_size is missing", "attention_bias=true: ", "mlp_bias=true: "],
        ),
    ],
)
def test_each_key_unlike_llama_is_refused_in_one_line(folder, keys, found):
    refused = problems(folder(**keys))
    assert [line[: len(start)] for line, start in zip(refused, found, strict=True)] == found
    assert not any("\n" in line for line in refused)


FULL, WINDOWED = "full_attention", "sliding_attention"
TWO_SCALINGS = {"rope_parameters": {FULL: YARN}, "rope_scaling": YARN | {"factor": 8.0}}


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (
            {"model_type": "mistral", "sliding_window": 0},
            ["sliding_window=0: input should be greater than or equal to"],
        ),
        ({"model_type": "mistral", "mlp_bias": True}, ["mlp_bias=true: Llama's feed-forward has no biases"]),
        ({"model_type": "qwen3", "attention_bias": True}, ["attention_bias=true: only the biases of Qwen2"]),
        (
            {"model_type": "qwen2", "layer_types": [FULL]},
            ["layer_types has 1 entries, but num_hidden_layers=2"],
        ),
        (
            {"model_type": "qwen2", "layer_types": [FULL, WINDOWED]},
            ["layer_types has sliding_attention, but use_sliding_window or sliding_window says that there is none"],
        ),
        (
            {"model_type": "qwen3", "layer_types": [FULL, "chunked_attention"]},
            ["layer_types=\"chunked_attention\": input should be 'full_attention' or 'sliding_attention'"],
        ),
        ({"model_type": "olmo2", "sliding_window": 64}, ["sliding_window=64: Llama attends to all earlier tokens"]),
        (
            {"model_type": "olmo3", "rope_parameters": YARN},
            ["rope_parameters has factor, rope_type outside of full_attention and sliding"],
        ),
        (
            {"model_type": "olmo3", "layer_types": [FULL, WINDOWED], "rope_theta": 1e6},
            ["rope_theta=1e+06 is read by transformers 4 for all layers, and by 5 for those without a window; add"],
        ),
        (
            {"model_type": "olmo3", "layer_types": [FULL, WINDOWED], "rope_parameters": {WINDOWED: YARN}},
            ["rope_parameters.sliding_attention: only the scaling of full_attention can be trained, or none"],
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {WINDOWED: {"rope_type": "default", "attn_factor": 0.5}}},
            ["rope_parameters.sliding_attention.attn_factor: not a setting of its rotary embedding"],
        ),
        (
            {"model_type": "olmo3", "rope_parameters": {FULL: {"rope_type": "dynamic"}}},
            ['rope_parameters.full_attention.rope_type="dynamic": a text'],
        ),
        (
            {"model_type": "olmo3", "layer_types": [FULL, WINDOWED]} | TWO_SCALINGS,
            ["rope_scaling contradicts rope_parameters; keep the right one"],
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            ["attn_logit_softcapping=50.0: only a Gemma 3 w"],
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True, "hidden_activation": "gelu"},
            [
                'hidden_activation="gelu": the feed-forward of Gemma 3 is GeGLU, with gelu_pytorch_tanh',
                "use_bidirectional_attention=true: only a Gemma 3 that attends to earlier tokens alone can be trained",
            ],
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_local_base_freq": 1e3,
                "rope_parameters": {WINDOWED: {"rope_type": "default", "rope_theta": 1e4}},
                "layer_types": [WINDOWED, FULL],
            },
            ["rope_parameters.sliding_attention.rope_theta=10000 contradicts rope_local_base_freq=1000; keep"],
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            ['model_type="gemma3" is a gemma3_text with more beside it, such as images; save the text model alone'],
        ),
        (
            {"model_type": "gpt_oss", "swiglu_limit": 6.0, "swiglu_alpha": 1.0, "attention_bias": False},
            [
                "attention_bias=false: only a GPT-OSS with biases can be trained",
                "swiglu_limit=6.0: the experts of GPT-OSS clamp at 7.0",
                "swiglu_alpha=1.0: the sigmoid in the experts of GPT-OSS has the slope 1.702",
            ],
        ),
        (
            {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
            ['model_type="llama4" is a llama4_text with more beside it, such as images; save the text model alone'],
        ),
        ({"model_type": "llama4_text", "moe_layers": []}, ["moe_layers: only a Llama 4 with experts in some"]),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 2, "no_rope_layers": [1]},
            ["no_rope_layers has 1 entries, but num_hidden_layers=2"],
        ),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 2, "layer_types": ["chunked_attention", FULL]},
            ["layer_types: chunked_attention is of the layers that rotate, if attention_chunk_size is set; the others"],
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ["mlp_only_layers: only mixtures with experts in every"]),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ["decoder_sparse_step=2: only mixtures with experts"]),
        (
            {"model_type": "qwen2_moe"},
            ['model_type="qwen2_moe": only llama, mixtral, mistral, qwen2, qwen3, qwen3_moe'],
        ),
    ],
    ids=str,
)
def test_what_a_relative_cannot_be_is_refused_in_one_line(folder, keys, found):
    refused = problems(folder(architectures=None, num_key_value_heads=2, **keys))
    assert [line[: len(start)] for line, start in zip(refused, found, strict=True)] == found


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"model_type": "mistral"}, [4096, 4096]),
        ({"model_type": "mistral", "sliding_window": 64}, [64, 64]),
        ({"model_type": "mixtral", "sliding_window": 64}, [64, 64]),
        ({"model_type": "qwen2", "sliding_window": 64}, [0, 0]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, [0, 0]),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, [0, 64]),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": [WINDOWED, FULL]}, [4096, 0]),
        ({"model_type": "qwen3_moe", "sliding_window": 64, "use_sliding_window": True}, [64, 64]),
        ({"model_type": "olmo3", "sliding_window": 64, "layer_types": [FULL, WINDOWED]}, [0, 64]),
        ({"model_type": "olmo3", "num_hidden_layers": 5}, [4096, 4096, 4096, 0, 4096]),
        ({"model_type": "gemma3_text", "num_hidden_layers": 7}, [4096] * 5 + [0, 4096]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, [64, 0]),
        ({"model_type": "gpt_oss", "num_hidden_layers": 3}, [128, 0, 128]),
        ({"model_type": "gpt_oss", "sliding_window": 64, "layer_types": [FULL, WINDOWED]}, [0, 64]),
        ({"model_type": "gpt_oss", "layer_types": [FULL, FULL]}, [0, 0]),
    ],
    ids=str,
)
def test_each_type_says_in_its_own_way_which_layers_have_a_window(folder, keys, windows):
    spec = read_folder(str(folder(architectures=None, num_key_value_heads=2, **keys)))
    assert [spec.window(layer) for layer in range(spec.num_layers)] == windows


@pytest.mark.parametrize("kind", ["olmo3", "gpt_oss"])
def test_layers_with_a_window_of_no_size_are_refused(folder, kind):
    path = folder(architectures=None, model_type=kind, num_key_value_heads=2)
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(given | {"sliding_window": None}))
    said = "sliding_window=null: layers with sliding_attention, of which this model has some, need its size"
    assert problems(path) == [said]


def test_a_gemma_3_in_the_spelling_of_transformers_4_is_scaled_in_layers_without_a_window(folder):
    # the keys of gemma-3-4b's text_config and of its class's defaults
    keys = {
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    given = keys | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "hidden_activation": "gelu_pytorch_tanh"}
    spec = read_folder(str(folder(architectures=None, num_key_value_heads=2, **given)))
    variant = model_spec("gemma3_4b").with_few_layers(2)
    assert [spec.rope(layer)[1:] for layer in range(2)] == [variant.rope(layer)[1:] for layer in range(2)]


def test_an_olmo_3_in_the_spelling_of_transformers_4_is_scaled_in_layers_without_a_window(folder):
    # the keys of Olmo-3-1025-7B
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    keys = {"layer_types": [WINDOWED, FULL], "rope_theta": 500_000, "rope_scaling": yarn | {"beta_fast": 32.0}}
    spec = read_folder(str(folder(model_type="olmo3", architectures=None, num_key_value_heads=2, **keys)))
    variant = model_spec("olmo3_7b").with_few_layers(2)
    assert [spec.rope(layer)[1:] for layer in range(2)] == [variant.rope(layer)[1:] for layer in range(2)]
    assert spec.rope(0) != spec.rope(1)


def test_a_mistral_whose_window_is_null_has_none(folder):
    path = folder(model_type="mistral", architectures=None, num_key_value_heads=2)
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(given | {"sliding_window": None}))
    assert read_folder(str(path)).sliding_window == 0


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"windowed_layers": [0]}, "architecture.windowed_layers needs architecture.sliding_window"),
        ({"windowed_rope_theta": 1e4}, "windowed_rope_theta=10000 needs architecture.windowed_layers: which layers it"),
        ({"sliding_window": 64, "windowed_rope_theta": 1e4}, "rope_theta if all have a window, or none"),
        ({"sliding_window": 64, "windowed_layers": [1, 40]}, r"architecture.windowed_layers=\[40\] are not layers of"),
    ],
)
def test_windows_of_layers_that_cannot_have_them_are_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        RunConfig.from_mapping({"model": "llama3_8b", "architecture": settings})


@pytest.mark.parametrize(
    "keys",
    [
        {"pretraining_tp": 2},  # slices of a product, summed
        {"attention_dropout": 0.1, "initializer_range": 0.01, "use_cache": False, "dtype": "bfloat16"},
        {"hidden_act": "swish"},  # another name for silu
        {"architectures": None, "num_key_value_heads": None, "rope_scaling": {}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 10_000},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    ids=str,
)
def test_keys_that_do_not_change_the_function_are_ignored(folder, keys):
    plain = read_folder(str(folder()))
    assert read_folder(str(folder(**keys))) == plain


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, []),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, []),
        ({"rope_scaling": YARN | {"attn_factor": 0.5}}, ["rope_scaling.attn_factor=0.5"]),
        (
            {"rope_scaling": YARN | {"finetuned": True}, "rope_parameters": YARN | {"x\n": "y\n"}},
            ["rope_scaling.finetuned=true", 'rope_parameters.x\\n="y\\n"'],
        ),
        ({"rope_parameters": {"type": "default", "factor": 2.0}}, ["rope_parameters.factor=2.0"]),
    ],
    ids=str,
)
def test_settings_of_the_rotary_embedding_that_nothing_reads_are_named_once(folder, keys, named):
    path = folder(**keys)
    notes = ignored_settings(str(path))
    assert notes == [f"{path}/config.json: {', '.join(named)}: {IGNORED}"] * bool(named)


def test_a_changed_folder_is_told_by_what_is_changed_until_its_traits_are_recorded(folder):
    path = str(folder())
    config = config_of(path, num_layers=1)
    assert config.model_in_words == f"{path} with num_layers=1"
    assert config.self_contained().model_in_words == path


def test_a_variant_has_no_settings_that_are_ignored():
    assert ignored_settings("llama3_8b") == []


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_weight_of_the_balance_loss_goes_in_and_out_unchanged(folder, kind):
    sizes = {"num_hidden_layers": 6, "num_experts_per_tok": 3, "num_key_value_heads": 2, "head_dim": 16}
    path = folder(model_type=kind, architectures=None, router_aux_loss_coef=0.02, **sizes)
    spec = read_folder(str(path))
    assert spec.moe.balance_loss_coefficient == pytest.approx(0.02 * 3 / 6)
    assert config_json(spec)["router_aux_loss_coef"] == pytest.approx(0.02)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_servers_that_do_not_read_moe_layers_find_the_experts_of_a_llama4(step):
    spec = model_spec("llama4_scout").with_few_layers(6)
    keys = config_json(replace(spec, moe=spec.moe.model_copy(update={"moe_layers": step})))
    every_nth = [layer for layer in range(6) if (layer + 1) % keys["interleave_moe_layer_step"] == 0]
    assert every_nth == keys["moe_layers"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_negative_weight_of_the_balance_loss_is_refused(folder, kind):
    path = folder(model_type=kind, architectures=None, num_key_value_heads=2, router_aux_loss_coef=-0.5)
    assert problems(path) == ["router_aux_loss_coef=-0.5: input should be greater than or equal to 0"]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("weights.bin", "", "has no config.json; give a folder with a config.json, or a name that"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not a mapping of keys to values"),
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "meta-llama/Llama-2-7b-hf"}',
            r"holds adapters for meta-llama/Llama-2-7b-hf \(adapter_config.json\), but no model",
        ),
    ],
)
def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=complaint) as refusal:
        config_of(tmp_path)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize("model", ["a/b/c", "./here", "~nobody-of-this-name/model"])
def test_a_path_that_leads_nowhere_is_refused(model):
    with pytest.raises(ConfigError, match=f"model='{model}' is not a folder here; give a folder"):
        config_of(model)


def test_a_file_is_refused_as_a_folder(folder):
    with pytest.raises(ConfigError, match="is a file"):
        config_of(folder() / "config.json")


def test_a_bare_name_is_a_folder_only_if_one_exists_and_no_variant_has_that_name(folder, monkeypatch):
    monkeypatch.chdir(folder().parent)
    Path("llama2_7b").symlink_to("My-Llama")
    assert is_folder("My-Llama")
    assert not is_folder("llama2_7b")
    assert not is_folder("x" * 5000)
    assert config_of("My-Llama").spec == config_of("./My-Llama").spec


def test_a_recorded_configuration_needs_no_folder(folder, monkeypatch):
    path = folder(rope_scaling={"type": "linear", "factor": 4.0}, tie_word_embeddings=True, rms_norm_eps=3e-5)
    monkeypatch.chdir(path.parent)
    request = config_of("My-Llama", num_layers=1)
    recorded = request.self_contained().to_yaml()
    path.rename(path.with_name("elsewhere"))
    monkeypatch.chdir("/")
    (path.parent / "run.yaml").write_text(recorded)
    config = RunConfig.load(path.parent / "run.yaml")
    assert (config.model, config.spec) == (str(path), request.spec)
    assert config.spec.rope_scaling == LinearScaling(4.0)
    assert config.self_contained() == config


def test_a_trait_newer_than_a_record_has_its_default(folder):
    path = folder()
    recorded = config_of(path).self_contained().model_dump(exclude_none=True)
    path.rename(path.with_name("elsewhere"))
    del recorded["architecture"]["instruct"]
    assert not RunConfig.from_mapping(recorded).spec.instruct


@pytest.mark.parametrize("other", ["llama2_7b", "/another/Llama"])
def test_a_record_of_one_model_is_refused_for_another(folder, other):
    recorded = config_of(folder()).self_contained()
    with pytest.raises(ConfigError, match=f"recorded from .* and does not describe model='{other}'; keep that"):
        recorded.with_overrides(f"model={other}")


def test_a_folder_has_one_fingerprint_by_any_path_and_another_once_it_changes(folder, monkeypatch):
    path = folder()
    monkeypatch.chdir(path.parent)
    relative, absolute = config_of("./My-Llama"), config_of(path)
    recorded = absolute.self_contained()
    assert relative.fingerprint() == absolute.fingerprint() == recorded.fingerprint()
    folder(rope_theta=5e5)
    assert config_of(path).fingerprint() != recorded.fingerprint() == absolute.fingerprint()


def test_a_variant_needs_no_record_of_its_architecture():
    config = RunConfig(model="llama3_1_8b")
    assert config.self_contained() is config
    assert config.identity()["architecture"] == {}
