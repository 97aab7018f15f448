import pytest

from llama_core.config.hardware import gpu_spec
from llama_core.errors import ConfigError
from llama_core.planning.frameworks.estimate import FrameworkEstimate
from llama_core.planning.frameworks.megatron_arguments import read_megatron
from llama_core.units import GIB

SCRIPT = """#!/bin/bash
# starts a job of mine
GPUS_PER_NODE=8
NODES=${NODES:-4}
TP="4"
WORLD=$((GPUS_PER_NODE * NODES))
MODEL_ARGS=(
    --num-layers 80        # of 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --untie-embeddings-and-output-weights
    --seq-length 8192
    --vocab-size 128256
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 64
    --bf16 --use-distributed-optimizer
    --lr 1e-4)
if [[ $DTYPE == fp8 ]]; then
    TRAINING_ARGS+=("--fp8-format hybrid")
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size $TP --sequence-parallel \\
    --pipeline-model-parallel-size=4 --num-layers-per-virtual-pipeline-stage 4
"""
LINES = """
--num-layers 32
--hidden-size 4096
--num-attention-heads 32
--seq-length 4096
--tokenizer-type Llama2Tokenizer
--micro-batch-size 2
--swiglu
--bf16
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text, gpus=None, name="mine.sh"):
        file = tmp_path / name
        file.write_text(text)
        return read_megatron(file, gpus)

    return read_text


def test_a_script_is_read_as_the_job_that_it_starts(read):
    job = read(SCRIPT).job
    assert (job.tp, job.pp, job.dp_shard, job.world_size) == (4, 4, 2, 32)
    assert (job.num_chunks, job.micro_batch, job.num_microbatches, job.global_batch) == (5, 1, 32, 64)
    assert (job.zero_stage, job.sequence_parallel, job.float8, job.recompute) == (1, True, True, "none")
    model = job.architecture
    assert (model.num_layers, model.num_kv_heads, model.ffn_size, model.tied, model.gated) == (
        80,
        8,
        28672,
        False,
        True,
    )
    assert model.vocab_size == 128512  # a multiple of 128 on each of four ranks


def test_every_argument_is_named_once_as_read_or_as_ignored(read):
    asked = read(SCRIPT)
    assert asked.ignored == ("lr",)
    assert len(asked.read) == len(set(asked.read)) == 21


def test_the_same_arguments_in_yaml_make_the_same_job(read):
    values = "\n".join(
        f"  {name}: {value or 'true'}" for name, _, value in (line.partition(" ") for line in LINES.split("\n") if line)
    )
    yaml = f"ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n{values}\n  --tp-comm-overlap: false\n"
    assert read(yaml, 8, "model_config.yaml").job == read(LINES, 8).job


MIXTRAL = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096
--group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights
--tokenizer-type Llama2Tokenizer --num-experts 8 --moe-router-topk 2 --bf16
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
--expert-tensor-parallel-size 1
--num-layers-per-virtual-pipeline-stage 1 --sequence-parallel --use-distributed-optimizer
--micro-batch-size 1 --global-batch-size 256
"""


def test_the_arguments_of_a_published_row_give_its_figure(read):
    # M510: Megatron-LM's release test of Mixtral 8x7B printed 33.07 GiB
    estimate = FrameworkEstimate(read(MIXTRAL, 64), gpu_spec("h100"))
    assert estimate.printed.statistic == "allocated"
    assert estimate.printed.num_bytes / GIB == pytest.approx(33.07, rel=0.03)
    assert estimate.no_time == "a mixture of experts is not modelled for other frameworks"


def test_tensor_parallel_ranks_divide_every_expert_unless_the_arguments_say_otherwise(read):
    whole = read(MIXTRAL, 64).job
    divided = read(MIXTRAL.replace("--expert-tensor-parallel-size 1", ""), 64).job
    assert (whole.expert_parts, divided.expert_parts) == (8, 16)


def test_the_vocabulary_may_be_that_of_the_model_that_the_tokenizer_is_named_after(read):
    text = LINES.replace("--tokenizer-type Llama2Tokenizer", "--tokenizer-model meta-llama/Llama-3.1-8B")
    asked = read(text, 8)
    assert asked.job.architecture.vocab_size == 128_256
    assert "--vocab-size not given: 128256, that of Llama-3.1-8B" in asked.assumed


def test_sizes_that_are_left_out_are_those_of_megatron(read):
    model = read(LINES, 8).job.architecture
    assert (model.ffn_size, model.num_kv_heads, model.head_dim, model.tied) == (10880, 32, 128, True)
    assert read(LINES.replace("--swiglu\n", ""), 8).job.architecture.ffn_size == 16384


@pytest.mark.parametrize(
    ("arguments", "master", "moments", "gradients"),
    [
        ("", 4, 8, 4),
        ("--use-precision-aware-optimizer", 2, 8, 4),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16", 2, 6, 2),
        ("--grad-reduce-in-bf16", 4, 8, 2),
        ("--optimizer-cpu-offload", 0, 0, 4),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", 2, 4, 4),
    ],
)
def test_the_states_of_an_optimizer_are_those_that_the_arguments_state(read, arguments, master, moments, gradients):
    job = read(f"{LINES}{arguments}\n", 8).job
    assert (job.framework.master_bytes, job.moment_bytes, job.framework.gradient_bytes) == (master, moments, gradients)


@pytest.mark.parametrize(
    ("arguments", "recompute"),
    [
        ("", ("none", 1)),
        ("--recompute-activations", ("selective", 1)),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ("full", 1)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", ("full", 4)),
    ],
)
def test_recomputation_is_that_of_the_arguments(read, arguments, recompute):
    job = read(f"{LINES}{arguments}\n", 8).job
    assert (job.recompute, job.recompute_every) == recompute


def test_tensor_parallelism_is_hidden_only_where_the_arguments_say_so(read):
    text = f"{LINES}--tensor-model-parallel-size 2\n"
    plain, hidden = read(text, 8), read(f"{text}--tp-comm-overlap\n", 8)
    assert plain.job.framework.efficiencies.tensor_parallel == 1
    assert hidden.job.framework.efficiencies.tensor_parallel < 0.5
    assert any("--tp-comm-overlap" in sentence for sentence in plain.assumed)
    assert not hidden.assumed


def test_of_an_argument_that_is_given_twice_the_last_one_counts_and_that_is_said(read):
    asked = read(f"{LINES}--micro-batch-size 4\n", 8)
    assert asked.job.micro_batch == 4
    assert asked.assumed == ("--micro-batch-size is given as 2 and as 4; the last one counts",)


def test_variables_that_hold_each_other_do_not_grow_forever(read):
    doubling = "\n".join(f"V{n + 1}='$V{n}$V{n}'" for n in range(60))
    assert read(f"V0=xx\n{doubling}\n{LINES}--lr $V60$V60\n", 8).job == read(LINES, 8).job
    later = "\n".join(f"V{n}='{f'$V{n + 1}' * 30}'" for n in range(60))
    assert read(f"{later}\nV60=x\n{LINES}--lr $V0\n", 8).job == read(LINES, 8).job


def test_a_script_is_never_run(read, tmp_path):
    read(f"{LINES}touch {tmp_path}/touched; --lr $(touch {tmp_path}/touched)\n", 8)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("text", "gpus", "problem"),
    [
        ("echo nothing here", 8, "has no --arguments"),
        (LINES, None, "add --gpus"),
        (LINES.replace("--num-layers 32", ""), 8, "num-layers is missing"),
        (LINES.replace("--num-layers 32", "--num-layers 9999"), 8, "num-layers is 9999, more than 256"),
        (LINES.replace("--num-layers 32", "--num-layers $LAYERS"), 8, "num-layers is '$LAYERS'; a whole number"),
        (LINES.replace("--tokenizer-type Llama2Tokenizer", ""), 8, "--vocab-size is missing"),
        (LINES.replace("--bf16", "--fp16"), 8, "--bf16 is missing"),
        (f"{LINES}--tensor-model-parallel-size 3\n", 8, "8 GPUs are no multiple of the 3 ranks"),
        (f"{LINES}--global-batch-size 12\n", 8, "no multiple of 2 sequences on each of 8"),
        (f"{LINES}--optimizer sgd\n", 8, "optimizer is 'sgd'; known are adam"),
        (f"{LINES}--optimizer-cpu-offload --optimizer-offload-fraction all\n", 8, "a number from 0 to 1 is wanted"),
        (f"{LINES}--multi-latent-attention\n", 8, "a model with --multi-latent-attention is not modelled"),
        (f"{LINES}--num-experts 8 --moe-layer-freq 2\n", 8, "experts in every layer"),
        (MIXTRAL.replace("parallel-size 8", "parallel-size 3"), 64, "16 ranks of a pipeline stage are no multiple of"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line_that_names_the_file(read, text, gpus, problem):
    with pytest.raises(ConfigError) as refusal:
        read(text, gpus)
    assert problem in str(refusal.value)
    assert "mine.sh" in str(refusal.value)
    assert "\n" not in str(refusal.value)
