"""A run of this engine as the job that another framework would make of it."""

from dataclasses import replace

from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.planning.frameworks.architectures import from_spec
from llama_core.planning.frameworks.given import ReadJob
from llama_core.planning.frameworks.job import Job, Schedule
from llama_core.planning.frameworks.registry import compiled, framework
from llama_core.planning.plan import ParallelPlan

_SCHEDULES: dict[str, Schedule] = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "1f1b", "zbv": "v"}
"""Schedules that other frameworks have."""


def job_of(config: RunConfig, plan: ParallelPlan, name: str) -> ReadJob:
    """Return the job of a framework with the model, the batch and the degrees of a resolved run.

    Args:
        config: the run.
        plan: how it is divided.
        name: the framework.

    Raises:
        ConfigError: naming everything that the run has and the framework's model has not.
    """
    spec = config.spec
    problems = {
        f"strategy={config.strategy}": config.strategy != "standard",
        f"training.objective={config.training.objective}": config.training.objective != "next_token",
        f"training.precision={config.training.precision}": config.training.precision not in {"auto", "bf16", "fp8"},
        f"training.optimizer={config.training.optimizer}": config.training.optimizer != "adamw",
        f"parallel.schedule={plan.schedule}": plan.pp > 1 and plan.schedule not in _SCHEDULES,
        f"parallel.offload={plan.offload}": plan.offload != "none",
        "a sliding window": bool(spec.sliding_window),
        "chunks of attention": bool(spec.attention_chunk),
        f"norms={spec.norms}": spec.norms != "pre",
    }
    wrong = [what for what, is_there in problems.items() if is_there]
    if wrong:
        raise ConfigError(f"--as {name} knows no {', no '.join(wrong)}")
    traits = framework(name, month="", remarks="")
    assumed = []
    zero_stage = plan.zero_stage
    if traits.sharding == "fully_shard" and 0 < zero_stage < 3:
        assumed.append(f"zero_stage={zero_stage} becomes ZeRO 3, as {traits.name} shards")
        zero_stage = 3
    if traits.sharding == "optimizer" and zero_stage > 1:
        assumed.append(f"zero_stage={zero_stage} becomes ZeRO 1, the distributed optimizer")
        zero_stage = 1
    recompute_every = 1
    if plan.recompute != "none" and plan.recomputed_layers is not None:
        recompute_every = max(1, round(spec.num_layers / max(1, sum(plan.recomputed_layers))))
    job = Job(
        architecture=from_spec(spec),
        framework=compiled(traits) if plan.compile and not traits.fused_kernels else traits,
        seq_len=config.seq_len,
        micro_batch=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel and plan.tp > 1,
        pp=plan.pp,
        schedule=_SCHEDULES[plan.schedule] if plan.pp > 1 else "1f1b",
        num_chunks=2 if plan.schedule == "zbv" and plan.pp > 1 else plan.num_chunks,
        dp_shard=plan.dp_shard,
        dp_replicate=plan.dp_replicate,
        cp=plan.cp,
        ep=plan.ep,
        expert_tp=plan.expert_tp,
        zero_stage=zero_stage,
        weight_bytes=4 if traits.sharding == "fully_shard" else 2,
        moment_bytes=traits.moment_bytes,
        recompute=plan.recompute,
        recompute_every=recompute_every,
        reshards=plan.pp == 1,
        compiles=plan.compile and not traits.fused_kernels,
        float8=config.training.precision == "fp8",
    )
    if traits.sharding == "optimizer" and zero_stage == 1:
        # replicas shard the optimizer too
        job = replace(job, dp_shard=plan.dp_shard * plan.dp_replicate, dp_replicate=1)
    return ReadJob(job, (), (), tuple(assumed))
