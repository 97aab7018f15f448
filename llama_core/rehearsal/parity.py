"""Parity of a plan: a small copy of it that fits this machine, trained for real and compared with one process.

The copy has the plan's schedule, ZeRO stage, recomputation and kinds of ranks, and a tiny model of the same family with
one layer per stage (at least two). It trains on the CPU over gloo in float64: summing in another order changes a result
by about 1e-16, a mistake in dividing the work by far more.
"""

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from llama_core.config.run import RunConfig
from llama_core.errors import PlanError
from llama_core.models.batch import IGNORE_INDEX, Batch, ones_per_token
from llama_core.planning.plan import ParallelPlan
from llama_core.rehearsal.dry_run import RankResult, rehearse
from llama_core.rehearsal.rank_processes import run_ranks
from llama_core.rehearsal.small_plan import shrunk
from llama_core.rehearsal.trace import trace_steps
from llama_core.training.engine import NativeEngine, build_model, train_step
from llama_core.training.optimizer import build_optimizer
from llama_core.units import format_duration

MAX_RANKS = 16
TIMEOUT_S = 300
LARGEST_DIFFERENCE = 1e-8
"""Relative difference of losses and gradient norms up to which two runs agree."""
LARGEST_BYTES_DIFFERENCE = 0.01
"""The same for peak bytes."""
LARGEST_BYTES_DIFFERENCE_OF_EXPERTS = 0.03
"""The same with experts on several ranks, which a dry run takes to be chosen evenly; new routers do not quite do so."""
_SEED = 1


@dataclass(frozen=True)
class ParityResult:
    """A comparison of training under a plan with training on one process."""

    plan: ParallelPlan
    """The plan that was run."""
    changes: tuple[str, ...]
    """Its differences from the requested plan."""
    num_steps: int
    loss_difference: float
    """The largest relative difference of a step's loss on any rank."""
    grad_norm_difference: float
    """The same for gradient norms."""
    measured_bytes: tuple[int, ...]
    """Peak bytes of tensors in a step, on the first rank at every pipeline position."""
    rehearsed_bytes: tuple[int, ...]
    """The same peaks, counted by the dry run of this plan."""
    seconds: float

    @property
    def bytes_difference(self) -> float:
        """The largest relative difference between measured and rehearsed bytes."""
        pairs = zip(self.measured_bytes, self.rehearsed_bytes, strict=True)
        return max(abs(measured / rehearsed - 1) for measured, rehearsed in pairs)

    @property
    def agrees(self) -> bool:
        """Whether every difference is within its limit."""
        differences = (self.loss_difference, self.grad_norm_difference)
        limit = LARGEST_BYTES_DIFFERENCE_OF_EXPERTS if self.plan.ep > 1 else LARGEST_BYTES_DIFFERENCE
        return max(differences) <= LARGEST_DIFFERENCE and self.bytes_difference <= limit

    def summary(self) -> str:
        """Return the verdict in one line."""
        return (
            f"{'agrees' if self.agrees else 'DIFFERS'} with one process over {self.num_steps} steps of "
            f"{self.plan.summary()}: losses within {self.loss_difference:.1e}, gradient norms within "
            f"{self.grad_norm_difference:.1e}, bytes within {self.bytes_difference:.2%} of the dry run; "
            f"took {format_duration(self.seconds)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a record."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        return record | {
            "plan": self.plan.as_dict(),
            "changes": list(self.changes),
            "measured_bytes": list(self.measured_bytes),
            "rehearsed_bytes": list(self.rehearsed_bytes),
            "bytes_difference": self.bytes_difference,
            "agrees": self.agrees,
        }


def check_parity(
    config: RunConfig, plan: ParallelPlan, *, num_steps: int = 3, max_ranks: int = MAX_RANKS, timeout_s: int = TIMEOUT_S
) -> ParityResult:
    """Train a tiny model under ``plan`` on processes of this machine, and on one, and compare them.

    Args:
        config: the resolved configuration; the copy takes its model family, document mask and optimizer settings.
        plan: the plan to run; it is shrunk to at most ``max_ranks`` processes.
        num_steps: optimizer steps to compare.
        max_ranks: most processes to start.
        timeout_s: seconds they may take.

    Raises:
        PlanError: if DeepSpeed shards the model, or no smaller plan has few enough ranks.
        TrainingFailedError: if a process fails or does not answer in time; no process is left behind.
    """
    if plan.zero_backend == "deepspeed":
        raise PlanError("the parity check runs torch's own ZeRO, not DeepSpeed's; use parallel.zero_backend=native")
    started = time.perf_counter()
    small = shrunk(plan, max_ranks)
    tiny = _tiny_config(config, small)
    alone = _train(tiny, ParallelPlan(num_microbatches=small.batch_size), num_steps)
    ranks = run_ranks(small.world_size, _train_rank, tiny, small, num_steps, timeout_s=timeout_s)
    rehearsed: tuple[RankResult, ...] = rehearse(tiny, small).ranks
    return ParityResult(
        plan=small,
        changes=tuple(_changes(plan, small)),
        num_steps=num_steps,
        loss_difference=max(_difference(rank["losses"], alone["losses"]) for rank in ranks),
        grad_norm_difference=max(_difference(rank["norms"], alone["norms"]) for rank in ranks),
        measured_bytes=tuple(ranks[result.rank]["peak_bytes"] for result in rehearsed),
        rehearsed_bytes=tuple(result.profile.peak_bytes for result in rehearsed),
        seconds=time.perf_counter() - started,
    )


def _changes(plan: ParallelPlan, small: ParallelPlan) -> Iterator[str]:
    """Yield every size and setting that differs between ``plan`` and ``small``."""
    before = asdict(plan)
    after = asdict(small)
    for name, value in before.items():
        if after[name] != value:
            yield f"{name} {value} -> {after[name]}"


def _tiny_config(config: RunConfig, plan: ParallelPlan) -> RunConfig:
    """Return the configuration of a model of the same family that ``plan`` divides evenly."""
    training = config.training
    seq_len = 16 * plan.cp * plan.tp
    num_layers = max(2, plan.num_stages)
    experts = config.architecture.spec(config.model).with_few_layers(num_layers).moe
    of_model = {"moe": experts.with_widths(32 * plan.tp, 32 * plan.tp).model_dump()} if experts else {}
    return RunConfig.from_mapping(
        {
            "model": config.model,
            "architecture": config.architecture.model_dump(exclude_none=True)
            | {
                "num_layers": num_layers,
                "hidden_size": 64,
                "num_heads": 4 * plan.ranks_of_heads,
                "num_kv_heads": 2 * plan.ranks_of_heads,
                "head_dim": 8,
                "ffn_size": 64 * plan.tp,
                "vocab_size": 256 * plan.tp,
                "max_context": seq_len,
                "sliding_window": min(config.spec.sliding_window, seq_len // 2),
                "windowed_layers": [1] if config.spec.windowed_layers else [],
                "attention_chunk": min(config.spec.attention_chunk, seq_len // 2),
                "nope_layers": [1] if config.spec.nope_layers else [],
                "query_temperature_floor": min(config.spec.query_temperature_floor, seq_len // 4),
            }
            | config.spec.latents_of_heads(8, 4 * plan.ranks_of_heads),
            "training": {
                "precision": "fp32",
                "seq_len": seq_len,
                "learning_rate": training.learning_rate,
                "weight_decay": training.weight_decay,
                "max_grad_norm": training.max_grad_norm,
            },
            "data": {"document_mask": config.data.document_mask},
            "launch": {"device": "cpu"},
        }
        | of_model
    )


def _train_rank(config: RunConfig, plan: ParallelPlan, num_steps: int) -> dict[str, Any]:
    """Return one rank's losses, gradient norms, and the peak bytes of a step."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")  # advice on how to use fully_shard
    counted = build_model(config, plan, torch.device("cpu"))
    peaks = trace_steps(counted, config, in_full=True).counter.peaks
    return _train(config, plan, num_steps) | {"peak_bytes": max(peak.num_bytes for peak in peaks.values())}


def _train(config: RunConfig, plan: ParallelPlan, num_steps: int) -> dict[str, Any]:
    """Train in float64 and return the loss and gradient norm of every step."""
    wide = torch.float64
    parallel = build_model(config, plan, torch.device("cpu"), compute_dtype=wide, weight_dtype=wide).materialize()
    engine = NativeEngine(parallel, build_optimizer(parallel.model, config.training))
    engine.initialize_weights(_SEED)
    steps = [
        train_step(
            engine,
            _own_microbatches(config, plan, step),
            learning_rate=config.training.learning_rate,
            max_grad_norm=config.training.max_grad_norm,
        )
        for step in range(num_steps)
    ]
    return {"losses": [float(step.loss) for step in steps], "norms": [float(step.grad_norm) for step in steps]}


def _own_microbatches(config: RunConfig, plan: ParallelPlan, step: int) -> list[Batch]:
    """Return this rank's microbatches of a global batch that depends only on the step."""
    generator = torch.Generator().manual_seed(step)
    shape = (plan.batch_size, config.seq_len)
    tokens = torch.randint(0, config.spec.vocab_size, shape, generator=generator)
    targets = torch.randint(0, config.spec.vocab_size, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.1] = IGNORE_INDEX
    starts = (torch.rand(shape, generator=generator) < 0.1).long()
    index = torch.arange(config.seq_len)
    positions = index - (starts * index).cummax(1).values
    own_positions = positions if config.data.document_mask else None
    batch = Batch(tokens, targets, own_positions, per_token=ones_per_token(tokens, config.objective.values_per_token))
    rank = plan.dp_rank(dist.get_rank()) if dist.is_initialized() else 0
    own = batch.split(plan.batch_size // plan.dp)[rank]
    return own.split(plan.rows_per_forward)


def _difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference; infinite if one is not a number."""
    differences = (abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
    return max(math.inf if math.isnan(difference) else difference for difference in differences)
