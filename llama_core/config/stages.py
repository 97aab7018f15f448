"""The stages of a run: from some step on, sources have other weights, rows another length, or steps more rows.

``data.stages`` and ``training.batch_ramp`` ask for them, each for itself: a stage begins wherever either says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llama_core.config.settings import UNNAMED, BatchRampStep, DataConfig, DataStage
from llama_core.units import format_count


@dataclass(frozen=True)
class TrainingStage:
    """A stage of a run after the first."""

    number: int
    """Its place among the stages; the first of the run is 1."""
    asked_tokens: int
    """Tokens of the run after which it should begin."""
    num_tokens: int
    """Tokens of the run after which it begins: those of whole steps."""
    num_steps: int
    """Steps before it."""
    first_row: int
    """Rows before it."""
    weights: Mapping[str, float]
    """The weight of every source."""
    batch_size: int
    """Rows of a step."""
    other_len: int | None = None
    """Tokens of a row, if they are not those of the first stage."""
    is_of_ramp: bool = False
    """Whether ``training.batch_ramp`` asks for it, rather than ``data.stages``."""

    @property
    def rounding(self) -> str:
        """A sentence if it begins later than asked, because that is within a step; else empty."""
        if self.num_tokens == self.asked_tokens:
            return ""
        setting = "training.batch_ramp" if self.is_of_ramp else "data.stages"
        return (
            f"{setting}: from_tokens={self.asked_tokens:,} is within step {self.num_steps:,}; stage {self.number} "
            f"begins after that step, at {self.num_tokens:,} tokens"
        )

    @property
    def part_weights(self) -> Mapping[str, float]:
        """The weight of every part that the stage reads: a source, as rows of the stage's length."""
        return {part_name(name, self.other_len): weight for name, weight in self.weights.items()}

    @property
    def parts_of_other_length(self) -> tuple[tuple[str, int], ...]:
        """The sources that the stage reads in rows of a length of its own, each with this length."""
        if self.other_len is None:
            return ()
        return tuple((name, self.other_len) for name, weight in self.weights.items() if weight)

    def __str__(self) -> str:
        """Return where the stage begins, the size of a step, the length of its rows, and the shares of its sources."""
        parts = []
        if self.is_of_ramp:
            parts.append(f"{self.batch_size:,} sequences a step")
        if self.other_len is not None:
            parts.append(f"sequences of {self.other_len:,} tokens")
        if UNNAMED not in self.weights:
            parts.append(shares_of(self.weights))
        return f"after step {self.num_steps:,} ({format_count(self.num_tokens)} tokens): {', '.join(parts)}"


def part_name(source: str, other_len: int | None) -> str:
    """Return the name of a source as rows of a length: its own for those of the first stage."""
    return source if other_len is None else f"{source}@{other_len}"


def source_name(part: str) -> str:
    """Return the name of the source that a part is of."""
    return part.partition("@")[0]


def shares_of(weights: Mapping[str, float]) -> str:
    """Return the share of each source that is read, such as ``code 30 %, wiki 70 %``."""
    total = sum(weights.values())
    read = {name: weights[name] / total for name in sorted(weights) if weights[name]}
    return ", ".join(f"{name} {100 * share:.3g} %" for name, share in read.items())


def later_stages(
    data: DataConfig, ramp: Sequence[BatchRampStep], batch_size: int, seq_len: int
) -> tuple[TrainingStage, ...]:
    """Return the stages after the first. One that should begin within a step begins after it.

    Args:
        data: the data configuration.
        ramp: the other sizes of the batch, in rows of ``seq_len`` tokens.
        batch_size: rows of a step of the first stage.
        seq_len: tokens of such a row.
    """
    data_from = {stage.from_tokens: stage for stage in data.stages}
    rows_from = {step.from_tokens: step.batch_size for step in ramp}
    in_data = DataStage(from_tokens=1)  # the first stage changes nothing
    of_step = batch_size * seq_len
    num_steps = num_tokens = 0
    stages: list[TrainingStage] = []
    for asked_tokens in sorted({*data_from, *rows_from}):
        more_steps = max(0, -(-(asked_tokens - num_tokens) // of_step))
        num_steps += more_steps
        num_tokens += more_steps * of_step
        in_data = data_from.get(asked_tokens, in_data)
        of_step = rows_from.get(asked_tokens, of_step // seq_len) * seq_len
        length = in_data.seq_len or seq_len
        stages.append(
            TrainingStage(
                len(stages) + 2,
                asked_tokens,
                num_tokens,
                num_steps,
                rows_before(num_steps, batch_size, stages),
                weights={**data.weights, **in_data.weights},
                batch_size=of_step // length,
                other_len=None if length == seq_len else length,
                is_of_ramp=asked_tokens in rows_from,
            )
        )
    return tuple(stages)


def rows_before(num_steps: int, batch_size: int, stages: Sequence[TrainingStage]) -> int:
    """Return how many rows are read in the first steps of a run.

    Args:
        num_steps: the number of these steps.
        batch_size: rows of a step of the first stage.
        stages: the stages after it.
    """
    last = _stage_of(num_steps, stages)
    if last is None:
        return num_steps * batch_size
    return last.first_row + (num_steps - last.num_steps) * last.batch_size


def tokens_before(num_steps: int, batch_size: int, seq_len: int, stages: Sequence[TrainingStage]) -> int:
    """Return how many tokens are read in the first steps of a run.

    Args:
        num_steps: the number of these steps.
        batch_size: rows of a step of the first stage.
        seq_len: tokens of such a row.
        stages: the stages after it.
    """
    last = _stage_of(num_steps, stages)
    if last is None:
        return num_steps * batch_size * seq_len
    return last.num_tokens + (num_steps - last.num_steps) * last.batch_size * (last.other_len or seq_len)


def _stage_of(step: int, stages: Sequence[TrainingStage]) -> TrainingStage | None:
    """Return the stage that a step, counted from 1, is in; None for the first of the run."""
    return next((stage for stage in reversed(stages) if stage.num_steps < step), None)
