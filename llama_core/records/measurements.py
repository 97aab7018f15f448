"""Measurements of training: each step, the whole run, and timed steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import quantiles
from typing import Annotated, Literal

from pydantic import Field

from llama_core.records.held_out import Difference, HeldOutRows
from llama_core.units import format_bytes, format_count, format_duration

MAX_WAITING = 0.1
"""Share of the time that computing threads wait for a core, above which a measurement is called disturbed."""
OF_LAYER = "/layer_"
"""What stands between the name of a metric and the number of the layer that it is of."""
NAMED_LOSS = "eval_loss/"
"""What the name of a named held-out loss begins with: in TensorBoard, Weights & Biases and a sweep's objective."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A time above zero, so that it can be a divisor."""
RatesOrigin = Literal["operations", "data sheet", "few rates", "unmodelled", "assumed"]
"""Where the rates of a predicted step come from: the machine's operations, each measured; the device's data sheet; the
machine's matrix products, attention and copies alone; these because no others are modelled for such a run; or those of
any CPU."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, as every metrics sink gets it."""

    step: int
    """Optimizer step, from 1."""
    total_steps: int
    """The run's last step."""
    loss: float
    """Mean loss of the step: for the next token, the cross-entropy of its targets, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on since the run began, this step included."""
    tokens_per_second: float
    """Tokens of this step on all devices, divided by ``step_seconds``."""
    step_seconds: float
    """Wall time of the whole step."""
    data_seconds: float
    """Part of the step spent waiting for data."""
    forward_backward_seconds: float
    """Part of the step spent in forward and backward passes and, except with DeepSpeed, on the gradient's norm."""
    backward_seconds: float
    """Part of ``forward_backward_seconds`` from the start of each backward to the next forward or the update, with the
    waits for other ranks and the gradient's norm."""
    optimizer_seconds: float
    """Part of the step spent clipping the gradient and updating the weights."""
    mfu: float | None
    """Model FLOP/s divided by the devices' peak or, on the CPU, their rate of matrix products. Attention counts in
    full. None if the peak is unknown."""
    memory_allocated_bytes: int
    """Memory alive now: what the CUDA allocator or, on the CPU, the C library has handed out."""
    memory_peak_bytes: int
    """Most memory alive since this attempt's training began."""
    memory_reserved_bytes: int
    """Most memory reserved so far: taken by the CUDA allocator from the device or, on the CPU, the resident set."""
    loss_scale: float
    """Factor the loss was scaled by; 1 except in fp16."""
    skipped: bool
    """Whether the update was skipped because the loss or the gradient was not finite."""
    spike: bool
    """Whether the loss or the gradient norm was far above those of the steps before: ``loss_spike_threshold``."""
    eval_loss: float | None
    """Mean loss on held-out tokens after this step; None if not measured."""
    time: float
    """Seconds since the epoch at the end of the step."""
    eval_losses: Mapping[str, float] = field(default_factory=dict)
    """``eval_loss`` of each named part of the held-out tokens; empty if not measured, or if they have no names."""
    measured: Mapping[str, float | None] = field(default_factory=dict)
    """What the model, the objective and the parts of the loop measured beside, by name (docs/metrics.md); None where a
    step has no value. In Parquet, each name is a column."""
    shown: str = ""
    """Some of these in words, as the console shows them."""
    eval_shown: str = ""
    """The same of the held-out rows, whose names begin with ``eval_``; empty if not measured."""
    memory_baseline_bytes: int = 0
    """Memory alive before the model was built, which ``memory_allocated_bytes`` and ``memory_peak_bytes`` contain."""
    expert_shares: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Which share of a layer's routed tokens each of its experts got, by the layer's number: of evaluated steps and the
    last, if the model has experts."""

    def __post_init__(self) -> None:
        if taken := sorted(set(self.measured) & _FIELDS_OF_STEPS):
            raise ValueError(f"a metric cannot be called {taken[0]}: the record of a step has that already")

    @property
    def memory_added_bytes(self) -> int:
        """Most memory alive so far beyond that before the model was built, which the estimate predicts."""
        return self.memory_peak_bytes - self.memory_baseline_bytes

    @property
    def held_out(self) -> str:
        """The held-out loss after this step in words, with that of each name; empty if not measured."""
        if self.eval_loss is None:
            return ""
        details = [f"{name} {loss:.4f}" for name, loss in self.eval_losses.items()]
        if self.eval_shown:
            details.append(self.eval_shown)
        told = f" ({', '.join(details)})" if details else ""
        return f"held-out loss {self.eval_loss:.4f}{told}"


_FIELDS_OF_STEPS = frozenset(one.name for one in fields(StepRecord))


@dataclass(frozen=True)
class ExpectedProduct:
    """How long the product of matrices should take that ranks time before the first step."""

    seconds: Seconds
    limit_seconds: Seconds
    """From when on a rank counts as slow."""
    told_by: str
    """Where the time is from: the profile of a machine, or a data sheet."""


@dataclass(frozen=True)
class ExpectedStep:
    """How long a step should take, told before the run."""

    seconds: Seconds
    flops: float
    """Of a whole step, over all ranks."""
    told_by: str
    """What that follows from, in a clause: times of operations that were measured, a rate of matrix products, or a data
    sheet."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The seconds of its parts, by kind of work (``step_parts``); empty if only the whole is known."""
    rates: RatesOrigin = "few rates"
    """Where the rates come from."""
    product: ExpectedProduct | None = None
    """What a rank's device should take by itself; None for a processor of which no product was measured."""

    @property
    def is_rough(self) -> bool:
        """Whether it follows from few rates of a CPU alone."""
        return self.rates not in {"operations", "data sheet"}

    @property
    def flops_per_second(self) -> float:
        """The rate of a whole step."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class Sample:
    """What the trained model wrote after a prompt."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Samples:
    """What the trained model wrote after each of ``tracking.prompts``."""

    step: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class TrainingSummary:
    """The results of training."""

    steps: int
    tokens: int
    train_loss: float
    """Mean loss of the last step."""
    eval_loss: float | None
    """Mean loss on the held-out tokens after the last step."""
    eval_tokens: int
    """Over how much it is the mean: tokens, or what else ``counted`` says."""
    unigram_entropy: float | None
    """Unigram entropy of the corpus, in nats per token; only for the byte tokenizer."""
    bigram_entropy: float | None
    """Entropy of a token of the corpus given the previous one, in nats; only for the byte tokenizer."""
    memory_baseline_bytes: int
    """Memory alive before the model was built, measured as ``StepRecord.memory_peak_bytes``."""
    memory_peak_bytes: int
    """Most memory alive while training."""
    memory_reserved_bytes: int
    """Most memory reserved: taken by the CUDA allocator from the device or, on the CPU, the resident set."""
    memory_process_bytes: int
    """The resident set before the model was built, on the CPU; 0 on CUDA."""
    memory_by_rank_bytes: tuple[int, ...] = field(repr=False)
    """Most memory alive on each rank, less that before its model was built."""
    seconds: float
    """Wall time of the training loop of this attempt."""
    loss_unit: str = "nats/token"
    """Unit of the losses."""
    eval_rows: HeldOutRows | None = None
    """``eval_loss`` by held-out row; None if not evaluated."""
    named_eval_rows: Mapping[str, HeldOutRows] = field(default_factory=dict)
    """The same of each named part of the held-out tokens; empty if they have no names."""
    ended_early: str = ""
    """Why the run ended before its last step, as a clause; empty if it did not."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """What was measured of the held-out rows after the last step beside, by names as in ``StepRecord.measured``."""
    shown: str = ""
    """Some of these in words."""

    @property
    def held_out_weights(self) -> dict[str, float]:
        """How much each named part weighs in ``eval_loss``: its share of what is held out, not of training."""
        counts = {name: rows.count for name, rows in self.named_eval_rows.items()}
        whole = sum(counts.values())
        return {name: count / whole for name, count in counts.items()} if whole else {}

    @property
    def counted(self) -> str:
        """What the losses are means over, as a plural: tokens, pairs or answers."""
        return f"{self.loss_unit.rpartition('/')[2]}s"

    @property
    def memory_added_bytes(self) -> int:
        """Most memory alive while training beyond that before the model was built, which the estimate predicts."""
        return self.memory_peak_bytes - self.memory_baseline_bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_by_rank_bytes", tuple(self.memory_by_rank_bytes))  # JSON has lists

    def of_part(self, name: str) -> "TrainingSummary":
        """Return the same results with the held-out loss of one named part, or of all held-out tokens if it is empty.

        The loss is None if the part was not evaluated.
        """
        if not name:
            return self
        rows = self.named_eval_rows.get(name)
        return replace(
            self, eval_loss=rows.mean if rows else None, eval_tokens=rows.count if rows else 0, eval_rows=rows
        )

    def eval_above(self, other: "TrainingSummary") -> Difference:
        """Return how far this held-out loss lies above another; both must have been evaluated."""
        if self.eval_rows is not None and other.eval_rows is not None:
            return self.eval_rows.above(other.eval_rows)
        return Difference((self.eval_loss or 0.0) - (other.eval_loss or 0.0), None)

    def summary(self) -> str:
        """Return the results in one line."""
        parts = [f"{self.steps} steps, {format_count(self.tokens)} tokens in {format_duration(self.seconds)}"]
        if self.ended_early:
            parts.append(f"ended early: {self.ended_early}")
        if self.eval_loss is not None:
            details = [
                f"{name} {entropy:.4f}"
                for name, entropy in (("byte-unigram", self.unigram_entropy), ("byte-bigram", self.bigram_entropy))
                if entropy is not None
            ]
            weights = self.held_out_weights
            details += [f"{name} {rows.mean:.4f} x {weights[name]:.0%}" for name, rows in self.named_eval_rows.items()]
            if self.shown:
                details.append(f"{self.shown} over {self.eval_tokens:,} {self.counted}")
            told = f" ({', '.join(details)})" if details else ""
            parts.append(f"held-out loss {self.eval_loss:.4f} {self.loss_unit}{told}")
        parts.append(f"peak {format_bytes(self.memory_added_bytes)}")
        if self.memory_process_bytes:
            parts[-1] += f", {format_bytes(self.memory_reserved_bytes)} with the whole process"
        elif self.memory_reserved_bytes:
            parts[-1] += f", {format_bytes(self.memory_reserved_bytes)} reserved"
        return "; ".join(parts)


@dataclass(frozen=True)
class BenchmarkRecord:
    """Timed optimizer steps, after untimed warm-up steps."""

    device: str
    """The maker's name for the device."""
    warmup_steps: int
    step_seconds: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    """Wall time of each timed step."""
    median_seconds: Seconds
    spread_seconds: float
    """Interquartile range of ``step_seconds``."""
    tokens_per_step: int
    tokens_per_second: float
    """Tokens of a step on all devices, divided by the median."""
    mfu: float | None
    memory_peak_bytes: int
    """Most memory alive during the timed steps, measured as ``StepRecord.memory_peak_bytes``."""
    memory_reserved_bytes: int = 0
    """Most memory reserved: taken by the CUDA allocator from the device or, on the CPU, the resident set."""
    num_threads: int = 0
    """Threads with which a rank computes on the CPU; 0 on a GPU."""
    waiting_threads: float | None = None
    """Threads that could run but had no core, on average over the timed steps, in the rank where that is most. Other
    programs, or too many threads of the run, share the cores then. None where the system does not say."""
    num_timings: int = 1
    """How often steps were timed. More than once if other programs had the cores: the record is of those steps during
    which fewest threads waited."""
    host: str = ""
    """The machine of the first rank."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The software that was measured: python, torch, this package, its commit and the GPU's driver."""
    memory_baseline_bytes: int = 0
    """Memory alive before the model was built, measured as ``memory_peak_bytes``; 0 if not recorded."""

    @property
    def memory_added_bytes(self) -> int:
        """Most memory alive in the timed steps beyond that before the model was built, which the estimate predicts."""
        return self.memory_peak_bytes - self.memory_baseline_bytes

    @property
    def waiting_share(self) -> float | None:
        """Share of the time that a computing thread was ready to run without a core; None if unknown.

        On a GPU, one thread counts.
        """
        return None if self.waiting_threads is None else self.waiting_threads / max(1, self.num_threads)

    @property
    def disturbance(self) -> str | None:
        """In a clause, how long threads waited for a core; None if they hardly did, or nobody knows."""
        return disturbance(self.waiting_share)

    @property
    def throughput_quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the timed steps' tokens/s."""
        rates = [self.tokens_per_step / seconds for seconds in self.step_seconds]
        if len(rates) == 1:
            return rates[0], rates[0]
        slow, _, fast = quantiles(rates, n=4, method="inclusive")
        return slow, fast

    def why_not_told_apart(self, slower: "BenchmarkRecord") -> str:
        """Return in a clause why slower steps may be as fast as these on another day; empty if they are slower."""
        if self.throughput_quartiles[0] <= slower.throughput_quartiles[1]:
            return "the middle halves of their steps overlap"
        waiting = max(self.waiting_share or 0.0, slower.waiting_share or 0.0)
        return disturbance(waiting) or ""  # the steps of one run are alike on a shared machine, but not those of two

    def is_told_apart(self, slower: "BenchmarkRecord") -> bool:
        """Return whether these steps are faster than slower ones by more than their noise."""
        return not self.why_not_told_apart(slower)

    @property
    def relative_spread(self) -> float:
        """Interquartile range of the timed steps over their median."""
        return self.spread_seconds / self.median_seconds

    def summary(self) -> str:
        """Return the speed in one line."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        return (
            f"{self.tokens_per_second:,.0f} tokens/s{mfu}: median step {self.median_seconds:.3f} s, "
            f"quartiles {self.spread_seconds:.3f} s apart, {len(self.step_seconds)} steps on {self.device}"
        )


def disturbance(waiting_share: float | None) -> str | None:
    """Return a clause that says how long threads waited for a core; None if they hardly did, or nobody knows."""
    if waiting_share is None or waiting_share <= MAX_WAITING:
        return None
    return f"threads waited for a core {waiting_share:.0%} of the time: the machine was shared"
