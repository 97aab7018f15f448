import pytest

from llama_core.errors import ConfigError
from llama_core.planning.frameworks.torchtitan_file import read_torchtitan

MINE = """
[job]
description = "a job of mine"

[model]
name = "llama3"
flavor = "70B"

[training]
local_batch_size = 4
seq_len = 4096
global_batch_size = 128

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
pipeline_parallel_schedule = "Interleaved1F1B"

[activation_checkpoint]
mode = "full"
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text, gpus=None):
        file = tmp_path / "mine.toml"
        file.write_text(text)
        return read_torchtitan(file, gpus)

    return read_text


def test_a_configuration_is_read_as_the_job_that_torchtitan_would_start(read):
    job = read(MINE, 64).job
    assert (job.tp, job.pp, job.cp, job.dp_shard, job.dp_replicate, job.world_size) == (4, 2, 1, 8, 1, 64)
    assert (job.architecture.num_layers, job.seq_len, job.global_batch) == (80, 4096, 128)
    assert (job.micro_batch, job.num_microbatches) == (2, 8)
    assert (job.schedule, job.num_chunks, job.recompute, job.sequence_parallel) == ("1f1b", 2, "full", True)
    assert (job.zero_stage, job.weight_bytes, job.reshards, job.compiles, job.float8) == (3, 4, False, False, False)


def test_every_key_is_named_once_as_read_or_as_ignored(read):
    asked = read(MINE, 64)
    assert asked.ignored == ("job.description",)
    assert len(asked.read) == len(set(asked.read)) == 11
    assert not set(asked.read) & set(asked.ignored)


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("expert_parallel_degree = 8", 8),
        ("expert_parallel_degree = 8\nexpert_tensor_parallel_degree = 4", 32),
        ("expert_tensor_parallel_degree = 1", 4),
    ],
    ids=str,
)
def test_experts_are_whole_unless_the_file_says_otherwise_or_no_ranks_divide_them(read, lines, parts):
    assert read(MINE.replace("[parallelism]", f"[parallelism]\n{lines}"), 64).job.expert_parts == parts


def test_a_file_without_a_size_has_the_defaults_of_torchtitan(read):
    job = read('[model]\nflavor = "8B"\n', 8).job
    assert (job.micro_batch, job.seq_len, job.recompute, job.dp_shard) == (8, 2048, "selective", 8)


OLD = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 1
data_parallel_degree = 8
tensor_parallel_degree = 2
compile = true
[experimental]
pipeline_parallel_degree = 1
[float8]
enable_float8_linear = true
[optimizer]
name = "AdamW"
fused = false
"""


def test_keys_of_older_versions_are_understood(read):
    job = read(OLD).job
    assert (job.micro_batch, job.dp_shard, job.tp, job.compiles, job.float8) == (1, 8, 2, True, True)
    assert job.framework.foreach_bytes == 4


@pytest.mark.parametrize(
    ("lines", "field", "value"),
    [
        ("training.enable_cpu_offload = true", "offloads_states", True),
        ("activation_checkpoint.selective_ac_option = '2'", "recompute_every", 2),
        ("optimizer.early_step_in_backward = true", "steps_in_backward", True),
        ("parallelism.fsdp_reshard_after_forward = 'never'", "reshards", False),
        ("training.dtype = 'bfloat16'", "weight_bytes", 2),
        ("model.converters = ['quantize.linear.float8']", "float8", True),
        ("compile.enable = true\ncompile.components = ['loss']", "compiles", False),
        ("parallelism.data_parallel_replicate_degree = 8", "zero_stage", 0),
    ],
)
def test_a_condition_that_a_file_states_is_in_the_job(read, lines, field, value):
    assert getattr(read(f"{lines}\nmodel.flavor = '8B'\n", 8).job, field) == value


@pytest.mark.parametrize(
    ("text", "gpus", "problem"),
    [
        ("", 8, "is empty"),
        ("[model", 8, "is no TOML: "),
        ("[training]\nseq_len = 8192", 8, "model.flavor is missing"),
        ("[model]\nflavor = '9B'", 8, "model 'llama3' with flavor '9B' are not known"),
        ("[model]\nflavor = '8B'", None, "add --gpus"),
        ("model.flavor = '8B'\nparallelism.tensor_parallel_degree = 3", 8, "8 GPUs are no multiple of the 3 ranks"),
        ("model.flavor = '8B'\nparallelism.data_parallel_shard_degree = 4", 8, "its degrees make 4 ranks"),
        ("model.flavor = '8B'\ntraining.seq_len = 'long'", 8, "training.seq_len is 'long'; a whole number above 0"),
        ("model.flavor = '8B'\ntraining.seq_len = 9999999999", 8, "training.seq_len is 9999999999, more than"),
        (
            "model.flavor = '8B'\nparallelism.pipeline_parallel_degree = 64",
            64,
            "64 pipeline stages are more than the 32",
        ),
        (f"x = {'[' * 5000}", 8, "is nested too deeply"),
        ("model.flavor = '8B'\ntraining.compile = 'maybe'", 8, "training.compile is 'maybe', which is neither"),
        ("model.flavor = '8B'\nactivation_checkpoint.mode = 'fulll'", 8, "did you mean 'full'"),
        ("model.flavor = '8B'\noptimizer.name = 'Muon'", 8, "optimizer.name is 'Muon'; known are adam, adamw"),
        ("model.flavor = '8B'\nparallelism.expert_tensor_parallel_degree = 2", 8, "takes 1 or the tensor-parallel"),
        ("model.flavor = '8B'\ntraining.global_batch_size = 12", 8, "no multiple of 8 sequences on each of 8"),
        ("model.flavor = '8B'\nparallelism.pipeline_parallel_schedule = 'ZB'", 8, "pipeline_parallel_schedule is 'ZB'"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(read, text, gpus, problem):
    with pytest.raises(ConfigError) as refusal:
        read(text, gpus)
    assert problem in str(refusal.value)
    assert "mine.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        read_torchtitan(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a text in UTF-8"):
        read_torchtitan(binary)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="it is no configuration"):
        read_torchtitan(large)
