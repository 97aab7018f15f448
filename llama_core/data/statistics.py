"""What a run's data are: counts of documents, tokens and conversations, and what may be unintended in them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llama_core.config.models import ModelSpec
from llama_core.config.settings import UNNAMED, DataConfig
from llama_core.config.stages import TrainingStage, source_name
from llama_core.data.bad_lines import BadLines
from llama_core.data.chat import ConversationCounts, about_frame, about_vocabulary, notes
from llama_core.data.entropy import Entropies, token_entropies
from llama_core.data.mixture import Mixture
from llama_core.data.packing import PackedConversations, PackedDataset
from llama_core.data.tokenising import TokenisedSource
from llama_core.data.tokenizer import BYTES, Tokenizer
from llama_core.errors import DataError, RunDirectoryError
from llama_core.records.checkpoints import newest_step
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json, read_typed, write_json

_MAX_COUNTED_TOKENS = 2**33
"""Training tokens above which no entropies are counted."""


@dataclass(frozen=True)
class SourceStatistics:
    """Statistics of a source of a mixture."""

    name: str
    share: float
    """Its part of the sequences read, in the first stage."""
    num_documents: int
    """Documents trained on."""
    num_tokens: int
    """Their tokens."""
    num_sequences: int
    """Sequences of an epoch of this source."""
    num_validation_documents: int
    """Documents held out of this source."""
    num_validation_tokens: int
    """Their tokens."""
    epochs: float | None
    """Epochs that the run takes of it; None if its number of steps is unknown."""

    def __str__(self) -> str:
        """Return the source's name, share and epochs, such as ``wiki 60 % (1.4 epochs)``."""
        epochs = "" if self.epochs is None else f" ({self.epochs:.3g} epochs)"
        return f"{self.name} {100 * self.share:.3g} %{epochs}"


@dataclass(frozen=True)
class DataStatistics:
    """Statistics of the training and held-out data."""

    num_documents: int
    """Documents trained on."""
    num_tokens: int
    """Their tokens, including BOS and EOS."""
    num_sequences: int
    """Sequences of ``training.seq_len`` that they make: those of an epoch, or of one epoch of each source."""
    num_validation_documents: int
    """Documents held out."""
    num_validation_tokens: int
    """Their tokens."""
    num_shared_documents: int
    """Documents of the source left out of training because the validation source holds them too."""
    bad_lines: Mapping[str, int]
    """Unusable lines of the source by kind."""
    bad_line_examples: tuple[str, ...]
    """The first problems, as ``file:line: kind (reason)``."""
    entropies: Entropies | None
    """Entropies of the training tokens that count in the loss; only for the byte tokenizer, not of a mixture, and not
    of so many tokens that counting takes minutes."""
    num_targets: int
    """Training tokens that count in the loss."""
    conversations: ConversationCounts
    """The conversations among the documents, held-out ones included."""
    chat_template: str | None
    """The template that rendered the source's conversations; None if it holds none."""
    num_truncated: int
    """Conversations that ``training.seq_len`` truncates, held-out ones included."""
    num_left_out: int
    """Truncated conversations that are left out, because no token left in them counts in the loss."""
    notes: tuple[str, ...]
    """A sentence for each property of the data that may be unintended."""
    sources: tuple[SourceStatistics, ...]
    """The sources of a mixture; empty for a single one."""
    stages: tuple[str, ...]
    """Where each stage of a mixture after the first begins, and the shares of its sources."""
    frame: str
    """What each text begins and ends with; empty if all documents are conversations."""
    unit: str
    """What a row holds whole, as many as fit: conversations, pairs or labelled answers; documents are cut instead."""
    tokenizer_digest: str
    """``Tokenizer.fingerprint``: the files of a tokenizer may be replaced behind a run's back."""
    template_digest: str | None
    """``ChatTemplate.digest`` of ``chat_template``, if that is a file's."""

    def summary(self) -> str:
        """Return the data in one line."""
        held_out = f"{self.num_validation_documents:,} held out" if self.num_validation_documents else "none held out"
        template = f", template: {self.chat_template}" if self.chat_template else ""
        # a source of conversations may hold texts, too
        of_chat = self.unit in {PackedDataset.unit, PackedConversations.unit}
        unit = PackedDataset.unit if of_chat else self.unit
        counts = self.conversations.summary(PackedConversations.unit if of_chat else self.unit)
        conversations = f"; {counts}{template}" if self.conversations.num_conversations else ""
        when = " at first" if self.stages else ""
        mixture = f"; mixture{when}: {', '.join(map(str, self.sources))}" if self.sources else ""
        stages = "".join(f"; {stage}" for stage in self.stages)
        frame = f"; {self.frame}" if self.frame else ""
        return (
            f"{self.num_documents:,} {unit} to train on, {held_out}{conversations}; "
            f"loss on {self.num_targets:,} of {self.num_tokens:,} tokens{mixture}{stages}{frame}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as a record."""
        return asdict(self) | {"summary": self.summary()}


def data_statistics(
    data: DataConfig,
    spec: ModelSpec,
    sources: Mapping[str, TokenisedSource],
    validation_sources: Mapping[str, TokenisedSource],
    *,
    mixture: Mixture,
    train: Mapping[str, PackedDataset],
    validation: Mapping[str, PackedDataset],
    num_shared_documents: int,
    num_sequences: int | None,
    tokenizer: Tokenizer,
) -> DataStatistics:
    """Return the statistics of a run's data.

    Args:
        data: the data configuration.
        spec: the model.
        sources: the sources that are trained on, by name.
        validation_sources: the sources of held-out documents, by name; empty if a part of the others is held out.
        mixture: the rows to train on, in all stages.
        train: those of each source, of the length of the first stage.
        validation: the held-out rows.
        num_shared_documents: documents that are left out because a validation source holds them too.
        num_sequences: rows that the run reads; None if unknown.
        tokenizer: the tokenizer.
    """
    conversations = _conversations(sources)
    with_conversations = [source for source in sources.values() if source.cache.conversations.num_conversations]
    chat = (with_conversations or list(sources.values()))[0].chat
    num_documents = sum(source.cache.num_documents for source in sources.values())
    packed = [rows for rows in (*train.values(), *validation.values()) if isinstance(rows, PackedConversations)]
    bad_lines = sum((source.cache.bad_lines for source in sources.values()), BadLines())
    units = {rows.unit for rows in train.values()}
    return DataStatistics(
        num_documents=sum(rows.num_documents for rows in train.values()),
        num_tokens=sum(rows.num_tokens for rows in train.values()),
        num_sequences=sum(map(len, train.values())),
        num_validation_documents=sum(rows.num_documents for rows in validation.values()),
        num_validation_tokens=sum(rows.num_tokens for rows in validation.values()),
        num_shared_documents=num_shared_documents,
        bad_lines=bad_lines.counts,
        bad_line_examples=tuple(map(str, bad_lines.examples)),
        entropies=_entropies(train, sources, data.tokenizer, tokenizer.vocab_size),
        num_targets=sum(rows.num_targets for rows in train.values()),
        conversations=conversations + _conversations(validation_sources),
        chat_template=chat.template.name if with_conversations else None,
        num_truncated=sum(rows.num_truncated for rows in packed),
        num_left_out=sum(rows.num_left_out for rows in packed),
        notes=(
            *(note for source in (*sources.values(), *validation_sources.values()) for note in source.notes),
            *about_vocabulary(tokenizer),
            *notes(data, spec, chat, conversations, num_documents),
            *_about_stages(mixture.stages, num_sequences),
            *(note for rows in train.values() for note in _losses(rows, f"{rows.unit} to train on")),
            *(note for rows in validation.values() for note in _losses(rows, f"held-out {rows.unit}")),
        ),
        sources=_about(mixture, train, validation, num_sequences) if data.sources else (),
        stages=tuple(map(str, mixture.stages)),
        frame=about_frame(data, chat) if num_documents > conversations.num_conversations else "",
        unit=units.pop() if len(units) == 1 else PackedDataset.unit,
        tokenizer_digest=tokenizer.fingerprint,
        template_digest=chat.template.digest if with_conversations and not chat.template.is_built_in else None,
    )


def write_statistics(run: RunDirectory, statistics: DataStatistics, data: DataConfig) -> None:
    """Write the statistics of a run's data.

    Raises:
        DataError: if the run has a checkpoint, and has trained with another tokenizer or template than it has now. Its
            tokens may be the same all the same.
    """
    if newest_step(run):
        refuse_other_digest(run, "tokenizer", data.tokenizer, statistics.tokenizer_digest)
        if statistics.template_digest is not None:
            refuse_other_digest(run, "template", str(statistics.chat_template), statistics.template_digest)
    write_json(run.data, statistics.as_dict())


def refuse_other_digest(run: RunDirectory, what: Literal["tokenizer", "template"], name: str, digest: str) -> None:
    """Refuse a tokenizer or a chat template that is not the one with which a run has begun.

    Args:
        run: the run; one without a record of it accepts anything.
        what: which of them.
        name: its name.
        digest: as ``DataStatistics`` has it.

    Raises:
        DataError: if its files have changed.
        RunDirectoryError: if the record is damaged.
    """
    recorded = read_json(run.data).get(f"{what}_digest") if run.data.exists() else None
    if recorded and recorded != digest:
        raise DataError(
            f"{what} {name!r} is not the one that {run.path} has trained with: its files have changed since; restore "
            f"them{', or name a tokenizer with --tokenizer' if what == 'tokenizer' else ''}"
        )


def _conversations(sources: Mapping[str, TokenisedSource]) -> ConversationCounts:
    return sum((source.cache.conversations for source in sources.values()), ConversationCounts())


def _about(
    mixture: Mixture,
    train: Mapping[str, PackedDataset],
    validation: Mapping[str, PackedDataset],
    num_sequences: int | None,
) -> tuple[SourceStatistics, ...]:
    """Return the statistics of the sources of a mixture, of which a run reads ``num_sequences`` rows."""
    read = {} if num_sequences is None else mixture.rows_read(num_sequences)
    epochs: dict[str, float] = {}
    for part, count in read.items():
        epochs[source_name(part)] = epochs.get(source_name(part), 0.0) + count / mixture.lengths[part]
    about = []
    for name, rows in train.items():
        held_out_rows = validation.get(name)
        about.append(
            SourceStatistics(
                name=name,
                share=mixture.shares[name],
                num_documents=rows.num_documents,
                num_tokens=rows.num_tokens,
                num_sequences=len(rows),
                num_validation_documents=held_out_rows.num_documents if held_out_rows else 0,
                num_validation_tokens=held_out_rows.num_tokens if held_out_rows else 0,
                epochs=epochs.get(name),
            )
        )
    return tuple(about)


def _about_stages(stages: Sequence[TrainingStage], num_sequences: int | None) -> Iterator[str]:
    """Yield a sentence on each stage that begins later than asked, or that the run does not reach."""
    for stage in stages:
        if stage.rounding:
            yield stage.rounding
        if num_sequences is not None and stage.first_row >= num_sequences:
            yield f"the run ends before stage {stage.number}, which begins after step {stage.num_steps:,}"


def _losses(rows: PackedDataset, which: str) -> Iterator[str]:
    """Yield a sentence about conversations that do not fit into a row."""
    if isinstance(rows, PackedConversations) and rows.num_truncated:
        yield (
            f"{rows.num_truncated:,} of the {which} are longer than training.seq_len={rows.seq_len} and are truncated; "
            f"{rows.num_left_out:,} of them lose every token that counts and are left out"
        )


def _entropies(
    train: Mapping[str, PackedDataset], sources: Mapping[str, TokenisedSource], tokenizer: str, vocab_size: int
) -> Entropies | None:
    """Return the entropies of a single source of bytes, counted only once per cache and choice of documents."""
    if tokenizer != BYTES or UNNAMED not in train:
        return None
    chosen = train[UNNAMED].selection
    if chosen.num_tokens > _MAX_COUNTED_TOKENS or chosen.has_pairs:
        return None
    path = sources[UNNAMED].cache.directory / f"entropy-{chosen.digest}.json"
    with suppress(RunDirectoryError):
        return read_typed(path, Entropies)
    entropies = token_entropies(chosen, vocab_size)
    with suppress(OSError):  # if the cache is not writable, the next run only has to count again
        write_json(path, entropies)
    return entropies
