"""The loss of weights on named data, to choose among checkpoints and models by."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, UNNAMED, DataConfig, DataSource, paths_of
from llama_core.data.datasets import batches_of_rows, load_datasets, refuse_other_data, rows_spread_evenly
from llama_core.data.end_tokens import learnt_template, trains_on_conversations
from llama_core.data.files.remote import is_remote
from llama_core.data.packing import PackedDataset, pack
from llama_core.data.selection import everything
from llama_core.data.tokenising import tokenised
from llama_core.data.tokenizer import model_tokenizer
from llama_core.errors import ConfigError, DataError
from llama_core.evaluation.generate import own_tokenizer, tokenizer_of
from llama_core.evaluation.questions import ONE_DEVICE, All, AskedModel, Devices, OnProgress, Tell, ask
from llama_core.hugging_face.pretrained import is_checkpoint
from llama_core.imports import importing_torch
from llama_core.planning.inference import TOKENS_OF_A_FORWARD
from llama_core.records.checkpoints import data_digest, run_of
from llama_core.records.data_changes import read_data_changes
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import other_owner
from llama_core.records.held_out import HeldOutRows
from llama_core.runs.checkpoints import Best

HELD_OUT = "held-out"
"""What the held-out documents of a run are called that have no name."""


@dataclass(frozen=True)
class Evaluation:
    """The loss of one model on one set of data."""

    weights: Path
    step: int | None
    """The step of the checkpoint; None for a folder."""
    data: str
    """The name of the data."""
    rows: HeldOutRows
    seq_len: int
    """Tokens of a row."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        try:
            return math.exp(self.rows.mean)
        except OverflowError:
            return math.inf

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as a record."""
        return {
            "weights": str(self.weights),
            "step": self.step,
            "data": self.data,
            "loss": self.rows.mean,
            "standard_error": self.rows.standard_error,
            "perplexity": self.perplexity,
            "tokens": self.rows.count,
            "seq_len": self.seq_len,
        }

    def as_record(self) -> dict[str, Any]:
        """Return everything about the evaluation, with the loss of each row, for another process."""
        rows = {"losses": self.rows.losses, "counts": self.rows.counts}
        return vars(self) | {"weights": str(self.weights), "rows": rows}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Evaluation":
        """Return what ``as_record`` describes."""
        rows = HeldOutRows(tuple(record["rows"]["losses"]), tuple(record["rows"]["counts"]))
        return cls(**(dict(record) | {"weights": Path(record["weights"]), "rows": rows}))

    def summary(self) -> str:
        """Return the loss, how far chance moves it, its perplexity and the tokens it is over, in one line."""
        spread = "" if self.rows.spread is None else f" ± {self.rows.spread:.4f}"
        of_step = "" if self.step is None else f"step {self.step:,}  "
        return (
            f"{of_step}{self.data}  loss {self.rows.mean:.4f}{spread} nats/token  perplexity {self.perplexity:,.2f}  "
            f"{self.rows.count:,} tokens"
        )


def evaluate(
    source: Path,
    data: Mapping[str, DataSource] | None = None,
    *,
    steps: int | Best | All | None = None,
    seq_len: int | None = None,
    num_sequences: int | None = None,
    tokenizer: str | None = None,
    devices: Devices = ONE_DEVICE,
    tell: Tell = lambda text: None,
) -> Iterator[Evaluation]:
    """Yield the loss of the next token on each of the data, for each of the checkpoints asked for.

    Args:
        source: a run's directory, one of its checkpoints, or a folder with a Hugging Face Llama or PEFT's adapters.
        data: what to evaluate on, by name, as ``data.source`` takes it; by default what the run has held out.
        steps: the step of a run's checkpoint, ``best`` or ``all``; by default the newest intact one.
        seq_len: tokens of a row; by default those of the run, or the model's default.
        num_sequences: most rows of each of the data, spread evenly over them; 0 for all. By default as many as in an
            evaluation of the run while it trains, so that the figures are comparable.
        tokenizer: 'bytes' or a path; by default the run's or the folder's.
        devices: what computes.
        tell: called with a line about what is evaluated, and about each damaged checkpoint that is passed over.

    Raises:
        ConfigError: if a number is out of range, or a folder has nothing held out.
        PlanError: if the devices cannot divide the model.
        RunDirectoryError: if the run has no such checkpoint.
        CheckpointError, WeightsError: if weights are damaged or cannot be read.
        DataError: if the data or the tokenizer cannot be used, or a run's own data or template have changed.
        EnvironmentMismatchError, DoesNotFitError: if there is no such device, or it is too small.
    """
    yield from ask(
        LossOnData(data, seq_len=seq_len, num_sequences=num_sequences, tokenizer=tokenizer),
        source,
        steps=steps,
        devices=devices,
        tell=tell,
        on_progress=lambda name, done, total: None,
    )


class LossOnData:
    """The question what loss models have on data, on the same rows for all of them: those for the first one.

    Args:
        data: see ``evaluate``, also for the others.
        seq_len: tokens of a row.
        num_sequences: most rows of each of the data.
        tokenizer: 'bytes' or a path.

    Raises:
        ConfigError: if a number is out of range.
    """

    kind: ClassVar[str] = "data"

    def __init__(
        self,
        data: Mapping[str, DataSource] | None,
        *,
        seq_len: int | None,
        num_sequences: int | None,
        tokenizer: str | None,
    ) -> None:
        if seq_len is not None and seq_len < 2:
            raise ConfigError(f"seq_len={seq_len}: a row needs at least 2 tokens")
        if num_sequences is not None and num_sequences < 0:
            raise ConfigError(f"sequences={num_sequences}: give a number of rows, or 0 for all")
        self.tokenizer = tokenizer
        self._data = data
        self._seq_len = seq_len
        self._num_sequences = num_sequences
        self._rows: dict[str, PackedDataset] = {}
        self._notes: list[str] = []
        self._most = 0

    def check(self, weights: Path, config: RunConfig) -> None:
        """Tokenise the data, and refuse what has no rows."""
        if not self._rows:
            self._rows = self.rows_for(weights, config)
            self._most = _most_rows(config, self._num_sequences, len(self._rows), by_default=self._data is None)

    def rows_for(self, weights: Path, config: RunConfig) -> dict[str, PackedDataset]:
        """Return the rows to evaluate on, by name."""
        length = self._seq_len or config.first_seq_len
        if self._data is not None:
            return self._named_rows(self._data, weights, config, length)
        if not is_checkpoint(weights):
            raise ConfigError(f"{weights} is no run, so nothing is held out; name data with --data")
        if config.data.source == DATALOADER:
            raise ConfigError("this run was trained on a dataloader; name data with --data")
        if config.objective.records.holds_answers:
            raise ConfigError(
                f"this run was trained for {config.objective.name} on {config.objective.reads}, which have no loss of "
                "the next token; name texts or conversations with --data"
            )
        _refuse_addresses(run_of(weights), config.data)
        held_out = self._held_out_rows(weights, config, length)
        if not held_out:
            raise ConfigError("this run holds no documents out; name data with --data")
        return {HELD_OUT if name == UNNAMED else name: packed for name, packed in held_out.items()}

    def _held_out_rows(self, weights: Path, config: RunConfig, seq_len: int) -> Mapping[str, PackedDataset]:
        """Return the rows of what a checkpoint's run has held out; refuse another template and other data."""
        tokenizer = own_tokenizer(weights, config, self.tokenizer)
        if trains_on_conversations(weights):
            learnt_template(weights, config, tokenizer)
        load = partial(load_datasets, self._data_of(weights, config), config.spec)
        trained_on = data_digest(weights)
        if trained_on is None or self.tokenizer is not None:  # other tokens, on purpose
            return load(seq_len=seq_len).validation
        own = load(seq_len=config.first_seq_len, stages=config.stages)
        if trained_on not in read_data_changes(run_of(weights)).may_follow:
            refuse_other_data(trained_on, own.train, config.training.seed, "name data with --data")
        return own.validation if seq_len == config.first_seq_len else load(seq_len=seq_len).validation

    def _named_rows(
        self, sources: Mapping[str, DataSource], weights: Path, config: RunConfig, seq_len: int
    ) -> dict[str, PackedDataset]:
        """Return the rows of each of the data, and note what may be unintended in them; refuse another template."""
        data = self._data_of(weights, config)
        tokenizer = model_tokenizer(data, config.spec)
        self._notes = []
        rows = {}
        for name, source in sources.items():
            made = tokenised(source, data, tokenizer, config.spec, None, held_out=True)
            if made.cache.conversations.num_conversations:
                learnt_template(weights, config, tokenizer)
            self._notes += made.notes
            rows[name] = pack(everything(made.cache), seq_len, document_mask=data.document_mask)
            if not len(rows[name]):
                raise DataError(f"no conversation of {name} has a token that counts among its first {seq_len + 1:,}")
        return rows

    def _data_of(self, weights: Path, config: RunConfig) -> DataConfig:
        """Return how data are read: as the run does, with the tokenizer that is asked for, and into a cache of ours."""
        changed: dict[str, Any] = {"tokenizer": tokenizer_of(weights, config, self.tokenizer)}
        if is_checkpoint(weights) and other_owner(run_of(weights)) is not None:
            changed["cache_dir"] = None  # who made the run could read there what we evaluate on
        return config.data.model_copy(update=changed)

    def prepare(self, weights: Path, config: RunConfig, tell: Tell) -> None:
        """Read the rows."""
        self.check(weights, config)
        for note in self._notes:
            tell(note)
        self._notes.clear()

    def answers(self, asked: AskedModel, tell: Tell, on_progress: OnProgress) -> Iterator[Evaluation]:
        """Yield the loss on each of the data; data-parallel ranks share the rows."""
        with importing_torch():
            from llama_core.evaluation.inference.row_losses import losses_of_rows

        for name, packed in self._rows.items():
            at_once = max(1, TOKENS_OF_A_FORWARD // packed.seq_len)

            def losses(rows: Sequence[int], packed: PackedDataset = packed, at_once: int = at_once) -> list[Any]:
                return losses_of_rows(asked.model, batches_of_rows(packed, rows, at_once))

            found = asked.ranks.shared(rows_spread_evenly(packed, self._most or len(packed)), losses)
            rows = HeldOutRows.of([loss for loss, _ in found], [count for _, count in found])
            yield Evaluation(asked.weights, asked.step, name, rows, packed.seq_len)

    def as_record(self) -> dict[str, Any]:
        """Return the question for another process."""
        return {
            "data": None if self._data is None else dict(self._data),
            "seq_len": self._seq_len,
            "num_sequences": self._num_sequences,
            "tokenizer": self.tokenizer,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "LossOnData":
        """Return what ``as_record`` describes."""
        data = record["data"]
        if data is not None:
            data = {name: source if isinstance(source, str) else tuple(source) for name, source in data.items()}
        own = {name: record[name] for name in ("seq_len", "num_sequences", "tokenizer")}
        return cls(data, **own)

    def answer(self, record: Mapping[str, Any]) -> Evaluation:
        """Return the loss that a record describes."""
        return Evaluation.from_record(record)


def _refuse_addresses(run: RunDirectory, data: DataConfig) -> None:
    """Refuse to send requests to where somebody else's run says."""
    owner = other_owner(run)
    sources = (*data.training_sources.values(), *data.validation_sources.values())
    addresses = [path for source in sources for path in paths_of(source) if is_remote(path)]
    if owner is not None and addresses:
        raise ConfigError(f"{run.path} belongs to {owner}, and its data are at {addresses[0]}; name data with --data")


def _most_rows(config: RunConfig, asked: int | None, num_names: int, *, by_default: bool) -> int:
    """Return the most rows of each of the data; 0 for all."""
    if asked is not None:
        return asked
    of_evaluation = config.training.eval_sequences
    return -(-of_evaluation // num_names) if by_default else of_evaluation
