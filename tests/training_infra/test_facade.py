"""The public names beside the orchestrator: their arguments are checked and take effect."""

import json
import subprocess
import sys

import pytest
import torch

import training_infra
from llama_core.errors import ConfigError, EnvironmentMismatchError, PlanError, RunDirectoryError, StoppedError
from llama_core.schedules.clock import simulate
from training_infra import TrainingConfig
from training_infra.distributed import ConfigurationFactory, MicrobatchScheduler, create_distributed_trainer
from training_infra.models.llama import ParallelLlama, create_llama_7b_parallel, create_tiny_llama3_parallel
from training_infra.spelling import in_python, python_spelling

FEW_PARAMETERS = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_importing_the_facade_loads_neither_torch_nor_pydantic():
    packages = ("training_infra", "training_infra.distributed", "training_infra.models", "training_infra.parallelism")
    code = f"import sys, {', '.join(packages)}; assert not {{'torch', 'pydantic'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["training_infra", "training_infra.distributed", "training_infra.parallelism"])
def test_every_exported_name_of_a_package_exists(package):
    module = __import__(package, fromlist=["__all__"])
    assert set(module.__all__) == set(module._HOMES)
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(dir(module)) > set(module.__all__)


@pytest.mark.parametrize(
    ("create", "arguments", "model"),
    [
        ("create_tiny_llama3_orchestrator", {}, "tiny_llama3_50m"),
        ("create_tiny_llama3_orchestrator", {"size": "150m"}, "tiny_llama3_150m"),
        ("create_llama3_8b_orchestrator", {}, "llama3_8b"),
        ("create_llama3_8b_orchestrator", {"instruct": True}, "llama3_8b_instruct"),
        ("create_llama3_70b_orchestrator", {}, "llama3_70b"),
        ("create_llama3_70b_orchestrator", {"instruct": True, "strategy": "lora"}, "llama3_70b_instruct"),
        ("create_llama3_405b_orchestrator", {}, "llama3_405b"),
    ],
)
def test_orchestrators_are_created_by_the_name_of_their_model(create, arguments, model):
    one = getattr(training_infra, create)(**arguments, num_gpus=8)
    assert (one.config.model, one.config.parallel.gpus) == (model, 8)


def test_an_instruct_405b_is_trained_on_conversations():
    assert training_infra.create_llama3_405b_orchestrator(64, instruct=True).config.spec.instruct


def test_an_unknown_size_suggests_the_nearest_one():
    with pytest.raises(ConfigError, match="unknown model 'tiny_llama3_51m'; did you mean 'tiny_llama3_50m'"):
        training_infra.create_tiny_llama3_orchestrator(size="51m")


def test_a_training_config_takes_short_setting_names_and_names_the_run():
    config = TrainingConfig(model_name="mine", batch_size=4, learning_rate=1e-5)
    assert (config.model_name, config.batch_size, config.learning_rate, config.epochs) == ("mine", 4, 1e-5, 1.0)
    one = training_infra.LlamaTrainingOrchestrator("tiny_llama3_50m", training_config=config, batch_size=8)
    assert (one.config.training.batch_size, one.config.training.learning_rate) == (8, 1e-5)
    assert one.config.tracking.run_name == "mine"
    with pytest.raises(AttributeError, match="unknown setting 'batchsize'; did you mean 'batch_size'"):
        _ = config.batchsize


def test_a_wrong_training_config_is_refused_when_built():
    with pytest.raises(ConfigError, match="unknown setting 'learning_rat'; did you mean 'learning_rate'"):
        TrainingConfig(learning_rat=1)
    with pytest.raises(ConfigError, match=r"training\.epochs=0"):
        TrainingConfig(epochs=0)


CONFIGURATIONS = {
    "data": (ConfigurationFactory.create_data_parallel_config(num_gpus=4), {"gpus": 4, "tp": 1, "pp": 1}),
    "tensor": (ConfigurationFactory.create_tensor_parallel_config(4), {"gpus": 4, "tp": 4, "pp": 1}),
    "pipeline": (
        ConfigurationFactory.create_pipeline_parallel_config(pipeline_stages=4, microbatch_size=2, schedule="1f1b"),
        {"gpus": 4, "pp": 4, "microbatch_size": 2, "schedule": "1f1b"},
    ),
    "pipelines": (ConfigurationFactory.create_pipeline_parallel_config(2, num_gpus=4), {"gpus": 4, "pp": 2}),
    "hybrid": (
        ConfigurationFactory.create_hybrid_parallel_config(2, 2, 2, use_zero=True, zero_stage=2),
        {"gpus": 8, "tp": 2, "pp": 2, "cp": 1, "zero_stage": 2},
    ),
    "without ZeRO": (ConfigurationFactory.create_hybrid_parallel_config(2, 1, 2, use_zero=False), {"zero_stage": 0}),
}


@pytest.mark.parametrize(("config", "keys"), CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_a_distributed_config_takes_effect_when_assigned(config, keys):
    one = training_infra.quick_start("llama2_7b", num_gpus=1)
    one.distributed_config = config
    assert one.distributed_config == one.config.parallel == config
    assert {key: getattr(one.config.parallel, key) for key in keys} == keys


def test_the_plan_follows_the_distributed_config(capsys):
    one = training_infra.quick_start("llama2_13b", num_gpus=8)
    one.distributed_config = ConfigurationFactory.create_hybrid_parallel_config(4, 2, 1, zero_stage=3)
    one.print_configuration()
    assert "8 ranks (tp 4 x pp 2)" in capsys.readouterr().out


def test_wrong_distributed_configs_are_refused():
    with pytest.raises(ConfigError, match=r"parallel.tp=0: input should be 'auto' or an integer of at least 1"):
        ConfigurationFactory.create_tensor_parallel_config(1, tp=0)
    with pytest.raises(ConfigError, match="'1f1c': choose one of"):
        ConfigurationFactory.create_pipeline_parallel_config(2, schedule="1f1c")
    one = training_infra.quick_start("tiny_llama3_50m", num_gpus=2, batch_size=3)
    with pytest.raises(ConfigError, match="distributed_config is a 'dict'; make it with"):
        one.distributed_config = {"tp": 2}
    with pytest.raises(ConfigError, match="batch_size=3 is not a multiple of 2"):
        one.distributed_config = ConfigurationFactory.create_data_parallel_config(2)


def test_without_auto_configuration_unset_degrees_are_1():
    def degrees(**settings):
        parallel = training_infra.quick_start("llama3_8b", num_gpus=8, **settings).config.parallel
        return parallel.tp, parallel.pp, parallel.cp

    assert degrees() == ("auto", "auto", "auto")
    assert degrees(auto_configure=False) == (1, 1, 1)
    assert degrees(auto_configure=False, tp=2) == (2, 1, 1)
    one = training_infra.quick_start("llama3_8b", num_gpus=8, auto_configure=False)
    one.distributed_config = ConfigurationFactory.create_tensor_parallel_config(2, gpus=8, pp="auto")
    assert (one.config.parallel.tp, one.config.parallel.pp) == (2, 1)


def test_a_configuration_is_planned_without_its_devices(capsys):
    training_infra.create_llama3_70b_orchestrator(num_gpus=8).print_configuration()
    printed = capsys.readouterr().out
    assert "default   launch.gpu_type=h100 (no device here)" in printed
    assert "8 ranks" in printed
    assert "does not fit" in printed


def test_training_without_the_devices_is_refused_in_python_spelling():
    with pytest.raises(EnvironmentMismatchError) as caught:
        training_infra.create_llama3_8b_orchestrator(num_gpus=4).launch_training()
    assert str(caught.value).startswith('num_gpus=4: this machine has no CUDA device; add device="cpu" for 4 CPU')
    assert "--" not in str(caught.value)


SPELLINGS = {
    "add --device cpu for 2 CPU processes, or --launcher slurm": (
        'add device="cpu" for 2 CPU processes, or launcher="slurm"'
    ),
    "gpus=8: this machine has 2; use --gpus 2": "num_gpus=8: this machine has 2; use num_gpus=2",
    "holds files that are not a run; choose another --run-dir": (
        "holds files that are not a run; choose another run_dir"
    ),
    "already holds this run; add --resume to continue it": "already holds this run; add resume=True to continue it",
    "or run it anyway with --force (launch.force=true)": "or run it anyway with force=True (launch.force=true)",
    "the plan assumes this one; --gpu-type chooses another": "the plan assumes this one; gpu_type chooses another",
    "use --activation-checkpointing": 'use recompute="full"',
    "continue with: training-infra train --run-dir runs/x --resume": (
        "continue with: launch_training(..., run_dir='runs/x', resume=True)"
    ),
    "continue with: training-infra train --run-dir 'my runs/x' --resume": (
        "continue with: launch_training(..., run_dir='my runs/x', resume=True)"
    ),
    "install with pip install --editable .": "install with pip install --editable .",
}


@pytest.mark.parametrize(("told", "spelled"), SPELLINGS.items())
def test_flags_become_arguments(told, spelled):
    assert in_python(told) == spelled


def test_an_error_keeps_its_kind_its_code_and_its_problems():
    with pytest.raises(ConfigError) as caught, python_spelling():
        raise ConfigError("use --gpus 2", "use --seed 3")
    assert caught.value.problems == ("use num_gpus=2", "use seed=3")
    with pytest.raises(StoppedError, match="use seed=3") as caught, python_spelling():
        raise StoppedError("use --seed 3")
    assert caught.value.exit_code == 130
    with pytest.raises(RunDirectoryError, match="another run_dir"), python_spelling():
        raise RunDirectoryError("choose another --run-dir")


def test_a_model_takes_no_memory_before_it_is_trained():
    model = create_llama_7b_parallel(tensor_parallel_size=2, use_checkpointing=True)
    assert {parameter.device.type for _, parameter in model.named_parameters()} == {"meta"}
    assert sum(parameter.numel() for _, parameter in model.named_parameters()) == model.num_parameters
    asked = model.divided(None)
    assert (asked.gpus, asked.tp, asked.recompute) == (2, 2, "full")


def test_a_model_without_flash_attention_is_trained_with_the_math_kernel():
    model = create_tiny_llama3_parallel(use_flash_attention=False)
    trainer = create_distributed_trainer(model)
    assert trainer.orchestrator.config.parallel.attention == "math"


def test_a_model_and_a_configuration_that_disagree_are_refused():
    model = create_llama_7b_parallel(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 of the model, but 4 in distributed_config"):
        create_distributed_trainer(model, distributed_config=ConfigurationFactory.create_tensor_parallel_config(4))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"model": torch.nn.Linear(3, 3)}, "model is a 'Linear'; make one with ParallelLlama"),
        ({"model": "tiny_llama3_50m"}, "model is a 'str'; make one with ParallelLlama"),
        ({"config": {"batch_size": 4}}, "config is a 'dict'; make it with TrainingConfig"),
        ({"distributed_config": {"tp": 2}}, "distributed_config is a 'dict'; make it with a method of Configuration"),
    ],
)
def test_a_trainer_of_something_else_is_refused_by_name(wrong, problem):
    with pytest.raises(ConfigError, match=problem):
        create_distributed_trainer(**({"model": create_tiny_llama3_parallel()} | wrong))


def test_an_adaptive_trainer_searches_open_settings_and_a_standard_one_fixes_them():
    def parallel(kind):
        return create_distributed_trainer(create_tiny_llama3_parallel(), trainer_type=kind).orchestrator.config.parallel

    assert (parallel("adaptive").pp, parallel("standard").pp) == ("auto", 1)
    with pytest.raises(ConfigError, match="unknown trainer_type 'adaptiv'; choose one of adaptive, standard"):
        parallel("adaptiv")


@pytest.mark.wide
def test_a_trainer_without_data_says_it_uses_the_sample_and_fills_the_model(capsys, tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"} | heads | sizes))
    model = ParallelLlama(str(tmp_path / "model"))
    quickly = {"steps": 2, "seq_len": 16, "batch_size": 2, "eval_sequences": 2, "tensorboard": False}
    trainer = create_distributed_trainer(model, TrainingConfig(model_name="quick", device="cpu", **quickly))
    assert trainer.fit().steps == 2
    assert "no data was given: this trains on the sample" in capsys.readouterr().out
    assert model.run_dir.name.startswith("quick-")
    assert {parameter.device.type for _, parameter in model.named_parameters()} == {"cpu"}


def scheduler(schedule_type="1f1b", stage=1, **options):
    return MicrobatchScheduler(8, 2, 4, stage, schedule_type, **options)


@pytest.mark.parametrize(
    ("schedule_type", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("chimera", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2)],
)
def test_callbacks_run_once_for_each_chunk_and_microbatch_in_the_order_of_the_stage(schedule_type, chunks):
    calls = []
    one = scheduler(schedule_type)
    results = one.execute_schedule(
        lambda microbatch: calls.append(f"F{microbatch}") or ("out", microbatch),
        lambda output: calls.append(f"B{output[1]}"),
        lambda: calls.append("step"),
        range(8),
    )
    assert results == [("out", number) for number in range(8)]
    spelled = [f"{action.kind}{action.microbatch}".replace("I", "B") for action in one.get_execution_schedule()]
    assert calls == [*(call for call in spelled if not call.startswith("W")), "step"]
    assert calls.count("F3") == calls.count("B3") == chunks


def test_results_come_from_the_last_chunk():
    count = iter(range(100))
    one = scheduler("interleaved")
    results = one.execute_schedule(lambda microbatch: next(count), lambda output: None, lambda: None, range(8))
    last = max(action.stage for action in one.get_execution_schedule())
    forwards = [action for action in one.get_execution_schedule() if action.kind == "F"]
    places = {action.microbatch: place for place, action in enumerate(forwards) if action.stage == last}
    assert results == [places[number] for number in range(8)]


def test_the_printed_bubble_matches_the_simulated_one(capsys):
    one = scheduler()
    one.print_metrics()
    assert f"bubble {simulate(one.schedule).bubble_ratio:.1%}" in capsys.readouterr().out
    one.execute_schedule(lambda microbatch: microbatch, lambda output: None, lambda: None, range(8))
    one.print_metrics()
    printed = capsys.readouterr().out
    assert "measured: forward       8 calls" in printed
    assert "measured: optimizer     1 calls" in printed
    assert "stages at the measured speed" in printed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MicrobatchScheduler(8, 2, 4, 4), "current_stage=4: there are 4 stages, counted from 0"),
        (lambda: MicrobatchScheduler(8, 0, 4, 1), "microbatch_size=0 is not at least 1"),
        (lambda: scheduler().execute_schedule(None, None, None, [1]), "1 microbatches for a schedule of 8"),
    ],
)
def test_an_impossible_scheduler_request_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_schedules_that_callbacks_cannot_follow_are_refused():
    with pytest.raises(PlanError, match="schedule_type=chimera_halving splits every microbatch into 2"):
        scheduler("chimera_halving")
    with pytest.raises(PlanError, match="did you mean '1f1b'"):
        scheduler("1f1c")
