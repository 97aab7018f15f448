from dataclasses import replace

import pytest

from llama_core.chain.planned import planned_as
from llama_core.config.run import RunConfig
from llama_core.machine.detect import Machine
from llama_core.planning.memory.host import COMPILERS_BYTES, CUDA_PROCESS_BYTES, host_memory
from llama_core.planning.memory.process import DEFAULT_PROCESS, KERNELS_KEPT
from llama_core.planning.memory.profile import MemoryProfile
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.planning.plan import ParallelPlan
from llama_core.units import GIB


def config(*overrides):
    base = ("launch.device=cuda", "launch.gpu_type=h200", "training.precision=bf16")
    return RunConfig.from_mapping({"model": "llama3_8b"}, [*base, *overrides])


def estimate(*overrides, gpus=(), memory_bytes=GIB):
    machine = Machine(gpus, None, cpu_native_bf16=True, memory_bytes=memory_bytes, available_memory_bytes=1, cores=1)
    return planned_as(config(*overrides), machine).estimate


def parts(told):
    return told.host.parts(told.profile)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_sharding_ranks_of_a_node_copy_12_bytes_a_parameter_in_all_and_replicas_each(zero_stage):
    sharded = estimate("parallel.gpus=8", f"parallel.zero_stage={zero_stage}", "parallel.tp=1", "parallel.pp=1")
    parameters = config().spec.num_parameters
    assert 8 * parts(sharded)["checkpoint copy"] == pytest.approx(12 * parameters, rel=1e-6)
    alone = estimate("parallel.gpus=1")
    assert parts(alone)["checkpoint copy"] == 12 * parameters


def test_adapters_copy_only_what_is_trained():
    told = estimate("parallel.gpus=1", "strategy=lora")
    assert parts(told)["checkpoint copy"] == 12 * config("strategy=lora").spec.num_trainable_parameters


def test_a_node_holds_its_ranks_and_no_others():
    one, two = (estimate("parallel.gpus=16", "parallel.zero_stage=3", f"launch.nodes={n}") for n in (1, 2))
    assert one.host_bytes_of_node == 16 * sum(parts(one).values())
    assert one.host_bytes_of_node == 2 * two.host_bytes_of_node


@pytest.mark.parametrize(
    ("zero_stage", "offload", "most"), [(1, "optimizer", 28), (3, "optimizer", 28), (3, "parameters", 32)]
)
def test_offloaded_states_are_at_least_their_sizes_and_pinned_blocks_at_most_double(zero_stage, offload, most):
    plan = ParallelPlan(dp_shard=8, zero_stage=zero_stage, zero_backend="deepspeed", offload=offload)
    request = config("parallel.gpus=8", "training.batch_size=8")
    shard = request.spec.num_parameters / 8
    states = 4 + 4 + 8 + (2 if offload == "parameters" else 0)
    held = host_memory(request, plan).offloaded_bytes
    assert states * shard <= held <= most * shard
    assert host_memory(request, replace(plan, offload="none")).offloaded_bytes == 0


def test_rows_that_are_read_ahead_grow_with_the_ranks_share_of_the_batch():
    def batches(*overrides):
        return host_memory(config(*overrides), ParallelPlan(dp_replicate=2, num_microbatches=4)).batches_bytes

    tokens = 4 * 1024
    one = batches("training.seq_len=1024", "training.batch_size=8", "parallel.gpus=2")
    assert one == 3 * 24 * tokens, "read, stacked and pinned"
    assert batches("training.seq_len=1024", "training.batch_size=16", "parallel.gpus=2") == 2 * one


def test_a_node_too_small_for_its_ranks_is_refused_in_one_line_with_a_remedy():
    request = ("parallel.gpus=8", "parallel.zero_stage=1")
    unknown = estimate(*request)
    assert unknown.fits
    assert unknown.host.available_bytes is None, "a plan for GPUs that are not here knows no host"
    gpus = ("NVIDIA H200",) * 8
    roomy = estimate(*request, gpus=gpus, memory_bytes=unknown.host_bytes_of_node)
    assert roomy.fits
    assert not roomy.notes
    tight = estimate(*request, gpus=gpus, memory_bytes=unknown.host_bytes_of_node - 1)
    assert not tight.fits
    (note,) = tight.notes
    for word in ("host memory", "8 ranks", "this machine's memory", "checkpoint copy", "launch.nodes"):
        assert word in note
    assert "more than this machine's memory" in tight.summary()


def test_the_processes_that_compile_blocks_take_host_memory_on_cuda():
    parts_of = {
        compiled: parts(estimate("parallel.gpus=8", f"parallel.compile={compiled}")) for compiled in ("true", "false")
    }
    assert parts_of["true"]["compilers"] == COMPILERS_BYTES
    assert parts_of["false"] == {name: size for name, size in parts_of["true"].items() if name != "compilers"}


def on_cpu(*overrides, process=DEFAULT_PROCESS):
    request = RunConfig.from_mapping(
        {"model": "tiny_llama3_50m", "launch": {"device": "cpu"}}, ["training.precision=bf16", *overrides]
    )
    return host_memory(request, ParallelPlan(), process)


def test_kernels_on_a_cpu_are_kept_for_each_shape_of_matrix_and_length_of_keys_but_not_in_fp32():
    assert on_cpu("training.precision=fp32").kernels_bytes == DEFAULT_PROCESS.packed_bytes
    short, long = (on_cpu(f"training.seq_len={tokens}").kernels_bytes for tokens in (256, 2048))
    shapes = len(set(config("model=tiny_llama3_50m").spec.matrix_shapes.values()))
    assert short == (6 * shapes + 14 + 10) * DEFAULT_PROCESS.kernel_bytes
    assert long - short == 7 * 10 * DEFAULT_PROCESS.kernel_bytes


@pytest.mark.parametrize(
    "settings",
    [["strategy=moe"], ["training.seq_len=65536", "architecture.max_context=65536"]],
    ids=["experts", "long"],
)
def test_no_more_kernels_are_kept_than_the_libraries_may_keep(settings):
    assert on_cpu(*settings).kernels_bytes == 2 * KERNELS_KEPT * DEFAULT_PROCESS.kernel_bytes


def test_a_process_that_was_measured_replaces_the_default_one_and_is_recorded():
    profile = MemoryProfile({"optimizer": {"weights": GIB}})
    own = replace(DEFAULT_PROCESS, process_bytes=GIB)
    memory = on_cpu(process=own)
    assert memory.parts(profile)["process"] == GIB
    assert type(memory).from_dict(memory.as_dict(profile)) == memory


def test_the_memory_that_a_slurm_job_asks_for_is_that_of_its_nodes():
    request = ("parallel.gpus=8", "launch.launcher=slurm", "parallel.zero_stage=3")
    assert not estimate(*request, "launch.slurm.memory_gb_per_node=64").fits
    assert estimate(*request, "launch.slurm.memory_gb_per_node=256").fits


def test_host_memory_is_recorded_with_the_estimate():
    told = estimate("parallel.gpus=8")
    record = told.as_dict()
    assert record["host"]["node_bytes"] == told.host_bytes_of_node >= 8 * CUDA_PROCESS_BYTES
    assert record["host"]["parts"] == parts(told)
    assert MemoryEstimate.from_dict(record).host == told.host
