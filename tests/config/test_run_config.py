import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.hardware import gpu_names
from llama_core.config.names import ALSO_CALLED
from llama_core.config.rope import LinearScaling, Llama3Scaling, YarnScaling
from llama_core.config.run import RunConfig, config_keys
from llama_core.config.strict_yaml import parse_yaml, write_yaml
from llama_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def problems(mapping, *overrides):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(mapping, overrides)
    return caught.value.problems


def test_a_saved_configuration_loads_as_the_same_one():
    config = RunConfig.from_mapping({"model": "llama2_7b", "training": {"learning_rate": 1e-4}})
    assert RunConfig.from_mapping(parse_yaml(config.to_yaml(), "saved")) == config


@pytest.mark.parametrize(
    ("model", "architecture", "said"),
    [
        ("llama3_8b", {}, "llama3_8b"),
        ("llama3_8b", {"num_layers": 4, "ffn_size": 512}, "llama3_8b with num_layers=4, ffn_size=512"),
        (
            "llama2_7b",
            {"rope_scaling": {"kind": "yarn", "factor": 2}, "tied_embeddings": True},
            'llama2_7b with tied_embeddings=true, rope_scaling.kind="yarn", rope_scaling.factor=2.0',
        ),
        (
            "mistral_7b",
            {"windowed_layers": [0, 3], "num_layers": 6},
            "mistral_7b with num_layers=6, windowed_layers=[0, 3]",
        ),
    ],
)
def test_a_model_with_another_architecture_is_told_by_what_is_changed(model, architecture, said):
    config = RunConfig.from_mapping({"model": model, "architecture": architecture})
    assert config.model_in_words == said
    assert RunConfig.from_mapping(parse_yaml(config.to_yaml(), "saved")).model_in_words == said


def test_overrides_are_typed_as_yaml_and_the_last_one_wins():
    config = RunConfig.from_mapping(
        {"training": {"batch_size": 4}},
        ["training.batch_size=8", "training.batch_size=16", "training.learning_rate=1e-4", "data.document_mask=false"],
    )
    assert (config.training.batch_size, config.training.learning_rate) == (16, 1e-4)
    assert config.data.document_mask is False


def test_all_problems_are_reported_at_once_with_the_nearest_key():
    found = problems(
        {"modle": "x", "training": {"batchsize": 3, "steps": "many", "seq_len": 4096}, "launch": {"gpu_type": "h1000"}},
        "training.warmup_steps=-1",
    )
    assert sorted(found) == [
        "training.seq_len=4096 is above the context of tiny_llama3_50m; use at most 2048, or stretch its positions "
        "with architecture.rope_scaling.factor=2, or keep them as they are with architecture.max_context=4096",
        "training.steps='many': input should be a valid integer",
        "training.warmup_steps=-1: input should be greater than or equal to 0",
        f"unknown GPU type 'h1000'; choose one of {', '.join(gpu_names())}",
        "unknown key 'modle'; did you mean 'model'?",
        "unknown key 'training.batchsize'; did you mean 'training.batch_size'?",
    ]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"model": "llama3_80b"}, "unknown model 'llama3_80b'; did you mean 'llama3_8b' or 'llama3_70b'?"),
        (
            {
                "training": {"batch_size": 9},
                "parallel": {"gpus": 4, "tp": 2, "pp": 1, "cp": 1, "microbatch_size": 2},
            },
            "training.batch_size=9 is not a multiple of 4 (microbatch_size 2 x 2 data-parallel ranks); use 12",
        ),
        (
            {"training": {"batch_size": 9}, "parallel": {"gpus": 2, "microbatch_size": 2}},
            "training.batch_size=9 is not a multiple of 2 (microbatch_size 2); use 10",
        ),
        (
            {"training": {"batch_size": 9}, "parallel": {"gpus": 4, "dp_replicate": 2}},
            "training.batch_size=9 is not a multiple of 2 (2 copies); use 10",
        ),
        ({"parallel": {"gpus": 3, "tp": 2}}, "parallel.gpus=3 is not a multiple of 2 (tp 2); use 4"),
        (
            {"parallel": {"gpus": 8, "tp": 3}},  # no number of devices suits tp 3
            "parallel.tp=3 does not divide the 2 key/value heads of tiny_llama3_50m; use one of 1, 2",
        ),
        (
            {"parallel": {"gpus": 8, "cp": 3}},
            "parallel.cp=3: the 2048 tokens of a sequence are not a multiple of 6 (2 x cp); use one of 1, 2, 4",
        ),
        (
            {"parallel": {"gpus": 8, "pp": 17}},
            "parallel.pp=17 is above the 16 layers of tiny_llama3_50m; use at most that",
        ),
        (
            {"parallel": {"gpus": 8, "expert_tp": 1}},
            "parallel.expert_tp=1 has no effect, because tiny_llama3_50m has no experts; leave it out",
        ),
        ({"parallel": {"tp": 0}}, "parallel.tp=0: input should be 'auto' or an integer of at least 1"),
        ({"parallel": {"pp": "many"}}, "parallel.pp='many': input should be 'auto' or an integer of at least 1"),
        (
            {"parallel": {"gpus": 8}, "launch": {"nodes": 3}},
            "parallel.gpus=8 cannot be spread evenly over launch.nodes=3",
        ),
        (
            {"training": {"steps": 10, "warmup_steps": 20}},
            "training.warmup_steps=20 is above training.steps=10",
        ),
        (
            {"architecture": {"num_kv_heads": 3}},
            "architecture.num_kv_heads=3 does not divide the 4 query heads; use one of 1, 2, 4",
        ),
        (
            {"training": {"precision": "fp8"}, "launch": {"device": "cpu"}},
            "training.precision=fp8 needs an NVIDIA GPU of the Ada, Hopper or Blackwell generation, and "
            "launch.device=cpu has none; use bf16 or fp32",
        ),
        (
            {"training": {"precision": "fp8"}, "launch": {"gpu_type": "a100"}},
            "training.precision=fp8 needs an NVIDIA GPU of the Ada, Hopper or Blackwell generation, and "
            "launch.gpu_type=a100 is none; use bf16",
        ),
        (
            {"data": {"validation": {"wiki": "w", "code": "c"}}, "training": {"keep_best_by": "wikis"}},
            "training.keep_best_by=wikis is not one of code, wiki; did you mean 'wiki'?",
        ),
        (
            {"training": {"keep_best_by": "wiki"}},
            "training.keep_best_by=wiki: the held-out loss has no names; leave it out",
        ),
        (
            {"data": {"validation_fraction": 0.0}, "training": {"keep_best": 2}},
            "training.keep_best=2: nothing is held out; set data.validation, or a data.validation_fraction above 0",
        ),
        (
            {"training": {"patience": 3}},
            "training.patience=3: the run is evaluated only after its last step; set training.eval_every",
        ),
        ({"training": 3}, "training=3: this is a section of keys, not a value"),
        ({"launch": {"slurm": {"setup": ["a", 1]}}}, "launch.slurm.setup.1=1: input should be text; put it in quotes"),
        ({"training": {"batch_size": "8"}}, "training.batch_size='8': input should be a valid integer"),
        (
            {"tracking": {"run_name": "my run"}},
            "tracking.run_name='my run': input should be letters, digits, '_', '-' and '.', "
            "and not begin with '-' or '.'",
        ),
        ({"data": {"source": 7}}, "data.source=7: input should be a path, or a list of paths; put it in quotes"),
        ({"data": {"source": []}}, "data.source=[]: input should be a path, or a list of paths"),
        ({"data": {"source": ["a", ""]}}, "data.source=['a', '']: input should be a path, or a list of paths"),
        ({"data": {"validation": [1]}}, "data.validation=[1]: input should be a path, or a list of paths"),
        (
            {"data": {"source": ["a.jsonl", "sample"]}},
            "data.source=['a.jsonl', 'sample']: 'sample' cannot be combined with paths; give one or the other",
        ),
        ({"data": {"fields": {"prompt": 1}}}, "data.fields.prompt=1: input should be text; put it in quotes"),
        (
            {"strategy": "dpo"},
            "strategy='dpo': a strategy says which weights are trained (standard, lora, moe, hybrid); what they are "
            "trained for is training.objective=dpo (--objective)",
        ),
        (
            {"strategy": "ppo"},
            "strategy='ppo': a strategy says which weights are trained (standard, lora, moe, hybrid); ppo is another "
            "thing, and not there yet",
        ),
    ],
)
def test_each_mistake_is_one_line(mapping, message):
    assert problems(mapping) == (message,)


def test_a_source_is_one_path_or_several_and_stays_so_in_a_file(tmp_path):
    for written, source in (
        ("a", "a"),
        (["a"], "a"),
        (["a", "b"], ("a", "b")),
        ([tmp_path, "b"], (str(tmp_path), "b")),
    ):
        config = RunConfig.from_mapping({"data": {"source": written, "validation": written}})
        assert (config.data.source, config.data.validation) == (source, source)
        (tmp_path / "run.yaml").write_text(config.to_yaml())
        assert RunConfig.load(tmp_path / "run.yaml") == config


def test_the_names_of_fields_can_be_set_one_by_one():
    config = RunConfig.from_mapping({}, ["data.fields.prompt=question", "data.fields.completion=answer"])
    assert config.data.fields == {"prompt": "question", "completion": "answer"}


OPEN = ("tp", "pp", "cp", "dp_replicate", "zero_stage", "schedule", "num_chunks", "recompute", "offload")


@pytest.mark.parametrize("name", OPEN)
def test_a_setting_left_to_the_planner_is_auto_by_default_and_null_means_auto(name):
    default, null = RunConfig(), RunConfig.from_mapping({}, [f"parallel.{name}=null"])
    assert getattr(default.parallel, name) == "auto"
    assert null == default == RunConfig.from_mapping({}, [f"parallel.{name}=auto"])


def test_the_default_batch_has_a_microbatch_for_every_possible_data_parallel_rank():
    open_degrees = RunConfig.from_mapping({"parallel": {"gpus": 64}})
    tensor_parallel = RunConfig.from_mapping({"parallel": {"gpus": 64, "tp": 4}})
    assert (open_degrees.batch_size, tensor_parallel.batch_size) == (64, 16)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lr", "training.learning_rate"),
        ("lr", "training.learning_rate"),
        ("training.gradient_accumulation_steps", "parallel.num_microbatches"),
        ("launch.partition", "launch.slurm.partition"),
        ("lora.rank", "lora.lora_rank"),
        ("trainig.steps", "training"),
        ("training.warm_up_steps", "training.warmup_steps"),
        ("training.optimiser", "training.optimizer"),
        ("optimizer", "training.optimizer"),
    ],
)
def test_an_unknown_key_suggests_the_setting_that_is_meant(key, meant):
    (problem,) = problems({}, f"{key}=1")
    assert problem.endswith(f"; did you mean {meant!r}?")


@pytest.mark.parametrize("key", ["training.x", "training.velocity", "nonsense"])
def test_an_unknown_key_suggests_nothing_far_fetched(key):
    assert problems({}, f"{key}=1") == (f"unknown key {key!r}",)


def test_a_key_without_a_name_is_an_unknown_one():
    assert problems({"": 1}) == ("unknown key ''",)
    assert problems({"training": {"": 1}}) == ("unknown key 'training.'",)


@pytest.mark.parametrize("mapping", [{"\ud800": 1}, {"training": {"\ud800": 1}}])
def test_a_key_that_is_no_text_is_named(mapping):
    (problem,) = problems(mapping)
    assert problem.isprintable()
    assert r"'\ud800': input should be a valid string" in problem


def test_names_from_elsewhere_belong_to_keys_and_to_one_key_each():
    names = [name for names in ALSO_CALLED.values() for name in names]
    assert ALSO_CALLED.keys() <= config_keys().keys()
    assert len(set(names)) == len(names)


def test_an_override_without_a_value_is_refused():
    assert problems({}, "training.steps") == ("override 'training.steps' is not of the form section.key=value",)
    for empty in ("training.steps=", "training.steps= # 7"):
        assert problems({}, empty) == (f"{empty} has no value; write one, or null for the default",)
    assert RunConfig.from_mapping({}, ["training.steps=null"]) == RunConfig()


def test_a_gpu_type_is_recorded_by_our_name():
    assert RunConfig.from_mapping({}, ["launch.gpu_type=A100-SXM4-80GB"]).launch.gpu_type == "a100"


@pytest.mark.parametrize(
    ("written", "minutes"),
    [("90", 90), ("90:00", 90), ("12:00:00", 720), ("0:10:30", 11), ("1-12", 2160), ("1-12:30:00", 2190)],
)
def test_a_time_limit_may_be_written_as_slurm_does(written, minutes):
    config = RunConfig.from_mapping({}, [f"launch.slurm.time_limit_min={written}"])
    assert config.launch.slurm.time_limit_min == minutes


@pytest.mark.parametrize("written", ["0", "0:00", "-5", "soon", "1:2:3:4"])
def test_a_time_limit_that_is_none_is_refused(written):
    (problem,) = problems({}, f"launch.slurm.time_limit_min={written}")
    assert problem.startswith("launch.slurm.time_limit_min=")


def test_a_key_given_twice_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("model: llama2_7b\nmodel: llama3_8b\n")
    with pytest.raises(ConfigError, match=r"run.yaml: key 'model' is given twice"):
        RunConfig.load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [", "not valid YAML"),
        (b"- 1\n", "is not a mapping"),
        (b"", "is empty; write a key such as 'model: llama3_8b' into it"),
        (b"# model: llama3_8b\n", "is empty"),
        (b"\xff\xfe\x00", "cannot read configuration"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(tmp_path, content, message):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        RunConfig.load(tmp_path / "run.yaml")


def test_a_date_is_text(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {source: 2026-01-31}\n")
    assert RunConfig.load(tmp_path / "run.yaml").data.source == "2026-01-31"
    assert RunConfig.from_mapping({}, ["data.source=2026-13-32"]).data.source == "2026-13-32"


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "1:30", "0o10", "2026-01-31"])
def test_a_word_that_only_yaml_1_1_takes_for_a_boolean_or_a_number_is_text(text):
    assert parse_yaml(f"key: {text}", "here") == {"key": text}


@pytest.mark.parametrize(
    ("written", "number"), [("010", 10), ("08", 8), ("1_000", 1000), ("0x10", 16), ("1e-4", 1e-4), ("5.", 5.0)]
)
def test_a_number_is_what_its_digits_say(written, number):
    assert parse_yaml(f"key: {written}", "here") == {"key": number}


@given(st.text() | st.text("0123456789.eE+-_xb:yesnotruflaN~<=", max_size=8))
def test_every_text_in_a_saved_configuration_is_read_back_as_itself(text):
    saved = write_yaml({"key": text})
    assert parse_yaml(saved, "saved") == yaml.safe_load(saved) == {"key": text}


def test_a_boolean_and_a_text_of_another_type_say_how_to_write_them():
    assert problems({"launch": {"force": "yes"}}) == ("launch.force='yes': input should be true or false",)
    assert problems({}, "data.text_field=2024") == ("data.text_field=2024: input should be text; put it in quotes",)


def test_a_path_may_be_a_path_object(tmp_path):
    assert RunConfig.from_mapping({"data": {"source": tmp_path}}).data.source == str(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        RunConfig.load(tmp_path / "no.yaml")


@pytest.mark.parametrize(
    "override", ["training.learning_rate=1e-5", "data.source=other.jsonl", "model=tiny_llama3_150m"]
)
def test_the_fingerprint_changes_with_the_training(override):
    config = RunConfig()
    assert config.with_overrides(override).fingerprint() != config.fingerprint()


@pytest.mark.parametrize(
    "override",
    ["launch.launcher=slurm", "training.checkpoint_every=7", "parallel.microbatch_size=2", "tracking.wandb=offline"],
)
def test_the_fingerprint_ignores_settings_that_do_not_change_the_training(override):
    config = RunConfig()
    assert config.with_overrides(override).fingerprint() == config.fingerprint()


def test_sizes_of_a_variant_can_be_changed_for_debugging():
    config = RunConfig.from_mapping(
        {"model": "llama3_8b"}, ["architecture.num_layers=2", "architecture.hidden_size=64"]
    )
    assert (config.spec.num_layers, config.spec.hidden_size, config.spec.num_heads) == (2, 64, 32)
    assert config.fingerprint() != RunConfig(model="llama3_8b").fingerprint()


ROPE = "architecture.rope_scaling"


@pytest.mark.parametrize(
    ("model", "settings", "scaling", "max_context"),
    [
        ("llama3_8b", {}, None, 8192),
        ("llama3_8b", {"factor": 4}, LinearScaling(4.0), 32_768),
        ("llama3_8b", {"kind": "llama3", "factor": 8}, Llama3Scaling(8.0, 8192), 65_536),
        ("qwen3_8b", {"kind": "yarn", "factor": 2}, YarnScaling(2.0, 40_960), 81_920),
        ("llama3_1_8b", {"factor": 16}, Llama3Scaling(16.0, 8192), 262_144),
        ("llama3_1_8b", {"kind": "linear"}, LinearScaling(8.0), 131_072),
        ("llama3_1_8b", {"kind": "none"}, None, 16_384),
        (
            "llama3_2_1b",
            {"low_freq_factor": 2, "high_freq_factor": 8, "original_context": 4096},
            Llama3Scaling(32.0, 4096, 2.0, 8.0),
            131_072,
        ),
    ],
)
def test_rope_scaling_stretches_the_rotary_embedding_and_the_context(model, settings, scaling, max_context):
    spec = RunConfig.from_mapping({"model": model}, [f"{ROPE}.{key}={value}" for key, value in settings.items()]).spec
    assert (spec.rope_scaling, spec.max_context) == (scaling, max_context)
    assert spec.default_seq_len == 8192


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["kind=llama3"], f"{ROPE}.kind=llama3 needs {ROPE}.factor: how many times longer sequences get"),
        (
            ["factor=2", "low_freq_factor=2"],
            f"{ROPE}.low_freq_factor=2 has no effect with {ROPE}.kind=linear; set another kind or leave it out",
        ),
        (
            ["kind=none", "factor=2"],
            f"{ROPE}.factor=2 has no effect with {ROPE}.kind=none; set another kind or leave it out",
        ),
        (
            ["kind=llama3", "factor=2", "low_freq_factor=5"],
            "rope_scaling.high_freq_factor=4 must be at least low_freq_factor=5, and both above 0",
        ),
        (["factor=0.5"], f"{ROPE}.factor=0.5: input should be greater than or equal to 1"),
        (["kind=ntk"], f"{ROPE}.kind='ntk': input should be 'none', 'linear', 'llama3' or 'yarn'"),
        (["kind=yarn"], f"{ROPE}.kind=yarn needs {ROPE}.factor: how many times longer sequences get"),
        (
            ["kind=yarn", "factor=2", "beta_slow=32"],
            "rope_scaling.beta_fast=32 must be above beta_slow=32, and both above 0",
        ),
        (["knd=linear"], f"unknown key '{ROPE}.knd'; did you mean '{ROPE}.kind'?"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused_in_one_line(settings, message):
    assert problems({"model": "llama3_8b"}, *(f"{ROPE}.{setting}" for setting in settings)) == (message,)


@pytest.mark.parametrize(
    "way_out", [["architecture.rope_scaling.factor=3"], ["architecture.max_context=20000"]], ids=lambda keys: keys[0]
)
def test_either_key_named_in_the_refusal_of_a_long_sequence_allows_it(way_out):
    asked, long = {"model": "llama3_8b"}, "training.seq_len=20000"
    (refusal,) = problems(asked, long)
    assert way_out[0] in refusal
    assert RunConfig.from_mapping(asked, [long, *way_out]).seq_len == 20_000


def test_a_shorter_context_shortens_the_default_sequence():
    assert RunConfig.from_mapping({"model": "llama3_8b"}, ["architecture.max_context=1024"]).seq_len == 1024


@pytest.mark.parametrize("setting", ["rope_theta=1e6", "norm_eps=1e-6", "tied_embeddings=true", "instruct=true"])
def test_setting_a_trait_changes_the_model_and_the_fingerprint(setting):
    key, _, value = setting.partition("=")
    plain = RunConfig(model="llama2_7b")
    config = plain.with_overrides(f"architecture.{setting}")
    assert getattr(config.spec, key) == parse_yaml(value, key) != getattr(plain.spec, key)
    assert config.fingerprint() != plain.fingerprint()


def test_every_key_has_a_description():
    assert [key for key, text in config_keys().items() if not text] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads(path):
    assert RunConfig.load(path).spec.num_parameters > 0


def test_the_deployments_are_the_configurations():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    of_runs = [one for one in deployments if "config" in one["parameters"]]
    deployed = {one["name"]: RunConfig.from_mapping(one["parameters"]["config"]) for one in of_runs}
    assert deployed == {path.stem: RunConfig.load(path) for path in CONFIGS if path.stem != "demo"}


@pytest.mark.parametrize(
    ("settings", "steps_per_epoch", "steps"),
    [({}, 144.875, 145), ({}, 144.4, 144), ({}, 0.1, 1), ({"epochs": 2.5}, 4, 10), ({"steps": 7, "epochs": 2}, 4, 7)],
)
def test_a_run_has_the_steps_of_its_epochs_rounded_unless_their_number_is_given(settings, steps_per_epoch, steps):
    assert RunConfig.from_mapping({"training": settings}).training.total_steps(steps_per_epoch) == steps


def test_a_file_is_named_in_its_own_problems_and_not_in_those_of_overrides(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("modle: llama3_8b\ntraining: {steps: many}\n")
    with pytest.raises(ConfigError) as refused:
        RunConfig.load(file, ["training.seed=first"])
    assert sorted(problem.startswith(f"{file}: ") for problem in refused.value.problems) == [False, True, True]
    assert "training.seed='first': input should be a valid integer" in refused.value.problems


FILE = {
    "training": {"seq_len": 4096, "steps": 5, "warmup_steps": 9, "precision": "fp8"},
    "parallel": {"gpus": 8, "cp": 3, "pp": 99},
    "launch": {"nodes": 3, "min_nodes": 4, "device": "cpu"},
    "architecture": {"num_kv_heads": 3},
    "moe": {"num_experts": 1},
}
BEGINNINGS = {
    "training.seq_len=4096 is above": "architecture.max_context=4096",
    "parallel.pp=99 is above": "architecture.num_layers=99",
    "architecture.num_kv_heads=3 does not": "architecture.num_heads=3",
    "parallel.cp=3: the 4096 tokens": "training.seq_len=4098",
    "parallel.gpus=8 cannot be spread": "launch.nodes=4",
    "launch.min_nodes=4 is above": "launch.min_nodes=3",
    "training.precision=fp8 needs": "training.precision=bf16",
    "training.warmup_steps=9 is above": "training.steps=10",
}


def refused(tmp_path, *overrides):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(FILE))
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(file, overrides)
    return [problem.replace(f"{file}: ", "FILE: ") for problem in caught.value.problems]


def test_a_contradiction_of_a_file_names_the_file(tmp_path):
    told = refused(tmp_path, "tracking.tensorboard=false")
    assert [problem for problem in told if not problem.startswith("FILE: ")] == []
    assert [problem for problem in BEGINNINGS if f"FILE: {problem}" not in "\n".join(told)] == []


def test_a_contradiction_with_an_override_does_not_name_the_file(tmp_path):
    told = refused(tmp_path, "parallel.gpus=15", "parallel.cp=1", "parallel.pp=2")
    assert [problem for problem in told if "parallel.gpus=15" in problem] == [
        "parallel.gpus=15 is not a multiple of 2 (pp 2 x cp 1); use 18",  # on 3 nodes
    ]
    assert "parallel.gpus=16 cannot be spread evenly over launch.nodes=3" in refused(tmp_path, "parallel.gpus=16")


def test_an_override_that_changes_nothing_has_no_part_in_a_contradiction(tmp_path):
    assert refused(tmp_path, "parallel.gpus=8", "strategy=standard") == refused(tmp_path)


@pytest.mark.parametrize(("contradiction", "override"), BEGINNINGS.items())
def test_each_contradiction_names_the_settings_that_resolve_it(contradiction, override):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping(FILE)
    (record,) = [record for record in caught.value.records if str(record).startswith(contradiction)]
    with pytest.raises(ConfigError) as changed:
        RunConfig.from_mapping(FILE, [override])
    assert [problem for problem in changed.value.problems if problem.startswith(contradiction)] == []
    assert override.startswith(record.keys)


def test_a_problem_has_its_setting_and_its_value_apart():
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({"training": {"steps": "many"}, "parallel": {"gpus": 8}, "launch": {"nodes": 3}})
    assert [(record.setting, record.value, record.keys) for record in caught.value.records] == [
        ("training.steps", "'many'", ("training.steps",)),
        ("parallel.gpus", "8", ("parallel.gpus", "launch.nodes")),
    ]


def test_a_setting_that_the_weights_bring_is_that_of_whoever_names_them(tmp_path):
    weights = {"model": 3, "architecture": {}, "strategy": "standard", "data": {"tokenizer": "bytes"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(weights))
    file = tmp_path / "mine.yaml"
    file.write_text("training: {steps: 5}\n")
    with pytest.raises(ConfigError) as asked:
        RunConfig.load(file, [f"training.init_from={tmp_path}"])
    file.write_text(f"training: {{init_from: {tmp_path}}}\n")
    with pytest.raises(ConfigError) as written:
        RunConfig.load(file, ["training.steps=5"])
    assert asked.value.problems == ("model=3: input should be text; put it in quotes",)
    assert written.value.problems == (f"{file}: model=3: input should be text; put it in quotes",)


def mixture(**changes):
    sources = {"wiki": {"path": "wiki.jsonl", "weight": 60}, "code": {"path": ["a", "b"], "weight": 40.0}}
    return {"data": {"sources": sources}, "training": {"steps": 10}} | changes


def test_a_mixture_survives_its_file(tmp_path):
    config = RunConfig.from_mapping(mixture())
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert RunConfig.load(tmp_path / "run.yaml") == config
    assert config.data.training_sources == {"code": ("a", "b"), "wiki": "wiki.jsonl"}
    assert config.data.source is None


def test_a_mixture_may_be_read_more_often_on_resume_but_not_with_other_weights():
    config = RunConfig.from_mapping(mixture())
    assert config.with_overrides("data.sources.wiki.max_epochs=3").fingerprint() == config.fingerprint()
    assert config.with_overrides("data.sources.wiki.weight=61").fingerprint() != config.fingerprint()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.sources.wiki.weight=0",
            "data.sources.wiki.weight=0.0 without a stage that reads wiki; raise it, or leave wiki out",
        ),
        ("data.sources.wiki.weight=-1", "data.sources.wiki.weight=-1: input should be greater than or equal to 0"),
        ("data.sources.wiki.weight=.nan", "data.sources.wiki.weight=nan: input should be a finite number"),
        ("data.sources.wiki.weight=1e-9", "is less than a millionth of all weights (40); raise it, or leave wiki out"),
        ("data.sources.wiki.wieght=1", "unknown key 'data.sources.wiki.wieght'"),
        ("data.sources.Wiki={path: a, weight: 1}", "wiki and Wiki differ only in case; give them other names"),
        ("data.sources.a b={path: a, weight: 1}", "a name is up to 40 letters, digits, '_' and '-'"),
        ("data.sources.own={path: dataloader, weight: 1}", "your own dataloader cannot be a source of a mixture"),
        ("data.source=a.jsonl", "data.source=a.jsonl: data.sources has code, wiki; give one or the other"),
        ("training.steps=null", "has no epochs, because each source has its own; give training.steps or"),
    ],
)
def test_a_wrong_mixture_is_reported_in_one_line(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunConfig.from_mapping(mixture(), [override])
