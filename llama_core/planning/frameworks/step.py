"""The time of a step of a job: this engine's time model, with the framework's own kernels and efficiencies.

A job becomes a plan of this engine. The framework's efficiencies then change three parts of its time: matrix products,
what tensor parallelism adds, and a constant for every step. The total is linear in them, so that they can be fitted to
published throughputs.
"""

from dataclasses import dataclass, replace

from llama_core.config.hardware import DeviceSpec
from llama_core.config.models import ModelSpec
from llama_core.config.settings import Precision
from llama_core.errors import PlanError
from llama_core.planning.frameworks.architectures import Architecture
from llama_core.planning.frameworks.job import Job
from llama_core.planning.frameworks.traits import Efficiencies
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.parts import Part
from llama_core.planning.time.step_time import StepTime, step_time
from llama_core.planning.work import Work
from llama_core.schedules.registry import DEFAULT_SCHEDULE

_NO_TIME = 1e9
"""Multiple of a rate at which products take no time."""


@dataclass(frozen=True)
class JobTime:
    """The time of a job's step as this engine would take it, and the part of it that products take."""

    own: StepTime
    """With this engine's efficiencies."""
    products: float
    """Seconds of its compute that matrix products take."""
    waiting_for_products: float
    """Seconds of its bubble in which other pipeline ranks compute products."""

    def total(self, efficiencies: Efficiencies) -> float:
        """Return the seconds of a step under some efficiencies."""
        more = efficiencies.products - 1
        products = more * (self.products + self.waiting_for_products)
        tensor_parallel = (efficiencies.tensor_parallel - 1) * self.own.parts["tp"]
        return self.own.total + products + tensor_parallel + efficiencies.step_seconds

    def under(self, efficiencies: Efficiencies) -> StepTime:
        """Return the time of a step under some efficiencies."""
        more = efficiencies.products - 1
        parts: dict[Part, float] = dict(self.own.parts)
        parts["compute"] += more * self.products
        parts["bubble"] += more * self.waiting_for_products
        parts["tp"] *= efficiencies.tensor_parallel
        parts["host"] = efficiencies.step_seconds
        return replace(self.own, parts=parts)


def time_of(job: Job, device: DeviceSpec) -> JobTime:
    """Return the time of a job's step on ``device``.

    Raises:
        PlanError: if no plan of this engine expresses the job; the message says why.
    """
    work = work_of(job)
    own = step_time(work, device)
    rate = device.matmul_share * _NO_TIME
    without = step_time(work, replace(device, matmul_share=rate))
    return JobTime(
        own=own,
        products=own.parts["compute"] - without.parts["compute"],
        waiting_for_products=own.parts["bubble"] - without.parts["bubble"],
    )


def work_of(job: Job) -> Work:
    """Return a job as this engine's planner describes one.

    Raises:
        PlanError: if no plan of this engine expresses the job; the message says why.
    """
    if job.frozen:
        raise PlanError("no time: adapters of other frameworks are not modelled")
    if job.offloads_states:
        raise PlanError("no time: transfers of states to host memory are not modelled")
    spec = _spec(job.architecture)
    plan = _plan(job)
    precision: Precision = "fp8" if job.float8 else "bf16"
    plan.check(spec, seq_len=job.seq_len, precision=precision)
    return Work(
        spec,
        plan,
        job.seq_len,
        precision,
        # the planner takes the flash kernel for documents, and cuDNN's for a row that is one document
        documents="varlen" if job.framework.attention == "flash" else "none",
    )


def _spec(model: Architecture) -> ModelSpec:
    others = {
        "a mixture of experts": model.experts is not None,
        "latent attention": model.latent is not None,
        "a feed-forward that is not gated": not model.gated,
        f"{model.num_norms} norms in a layer": model.num_norms != 2,
    }
    for name, is_there in others.items():
        if is_there:
            raise PlanError(f"no time: {name} is not modelled for other frameworks")
    return ModelSpec(
        "the model",
        "llama",
        model.hidden_size,
        model.num_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        model.ffn_size,
        model.vocab_size,
        rope_theta=1e4,  # without effect on time
        norm_eps=1e-5,
        max_context=2**20,
        default_seq_len=4096,
        tied_embeddings=model.tied,
        qk_norm=model.norms_queries,
        qk_norm_width=model.qk_norm_width,
    )


def _plan(job: Job) -> ParallelPlan:
    # without ZeRO, ranks that would shard are copies
    shards = job.dp_shard if job.zero_stage else 1
    copies = job.dp_replicate if job.zero_stage else job.dp_replicate * job.dp_shard
    zero_stage = job.zero_stage if shards * job.cp > 1 else 0
    schedule, num_chunks = _schedule(job)
    num_stages = job.pp * num_chunks
    # selective recompute of attention alone has nothing to do: flash attention keeps no scores
    recompute = "none" if _recomputes_only_attention(job) else job.recompute
    every = None
    if recompute != "none" and job.recompute_every > 1:
        every = (max(1, job.architecture.num_layers // num_stages // job.recompute_every),) * num_stages
    return ParallelPlan(
        tp=job.tp,
        pp=job.pp,
        cp=job.cp,
        dp_shard=shards,
        dp_replicate=copies,
        sequence_parallel=job.sequence_parallel,
        zero_stage=zero_stage,
        schedule=schedule,
        num_chunks=num_chunks,
        microbatch_size=job.micro_batch,
        num_microbatches=job.num_microbatches,
        recompute=recompute,
        recomputed_layers=every,
        compile=job.compiles or job.framework.fused_kernels,
    )


def _recomputes_only_attention(job: Job) -> bool:
    return job.recompute == "selective" and job.framework.selective == "attention"


def _schedule(job: Job) -> tuple[str, int]:
    """Return the schedule of this engine, and the stages on one rank."""
    if job.pp == 1:
        return DEFAULT_SCHEDULE, 1
    if job.schedule == "v":
        return "zbv", 1
    if job.num_chunks > 1:
        return "interleaved", job.num_chunks
    return job.schedule, 1
