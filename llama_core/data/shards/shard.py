"""A shard: the tokens of some files of a source, in memory-mapped files that never change.

Documents stand in the order of a hash of their text. It is uniform, so this is a shuffle, and it depends on the texts
alone. The documents with the lowest hashes, which are held out, come first, and a document is found by its hash without
a list of all. Equal texts are neighbours.
"""

import shutil
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import BadLines
from llama_core.data.chat import ConversationCounts
from llama_core.data.formats import FormatCounts
from llama_core.errors import DataError

RECORD = "shard.json"
TOKENS = "tokens.bin"
OFFSETS = "offsets.bin"
TEXT_HASHES = "text_hashes.bin"
IGNORED = "ignored.bin"
IS_CONVERSATION = "is_conversation.bin"
SECONDS = "seconds.bin"
MAX_MAPPED = 512
"""Files of shards that a process keeps open: half of what it may open where nobody has raised the limit."""


class Array(NamedTuple):
    """How one file of a shard is read."""

    dtype: np.dtype[Any]
    length: int


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a run must know of a shard before it reads any of it."""

    num_documents: int
    num_tokens: int
    has_conversations: bool
    digest: str
    """What two shards share only if they hold the same tokens."""
    has_pairs: bool = field(default=False, kw_only=True)
    """Whether every document is a pair of answers, each with the prompt, one after the other. A labelled answer is the
    first or the second of a pair that lacks the other one."""


@dataclass(frozen=True)
class ShardRecord(ShardFacts):
    """The contents of ``shard.json``."""

    tokenizer: str
    files: list[str]
    """Where its files were, in order."""
    bad_lines: BadLines
    formats: FormatCounts
    conversations: ConversationCounts


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The tokens of some files of a source. Its arrays are opened when they are first asked for.

    Every array raises ``DataError`` if its file is missing or has another size.
    """

    path: Path
    facts: ShardFacts
    token_dtype: np.dtype[Any]

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """Ids of all documents, one after another, uint16 or uint32 [tokens].

        Texts are between BOS and EOS, conversations as their template renders them.
        """
        return self.array(TOKENS)

    @property
    def offsets(self) -> npt.NDArray[Any]:
        """Where each document begins, and the end of the last, int64 [documents + 1]."""
        return self.array(OFFSETS)

    @property
    def text_hashes(self) -> npt.NDArray[Any]:
        """A hash of each document's text or messages, uint64 [documents], ascending."""
        return self.array(TEXT_HASHES)

    @property
    def ignored(self) -> npt.NDArray[np.bool_] | None:
        """Tokens that do not count in the loss, a mask [tokens]; None if all documents are texts, where all do."""
        return self.array(IGNORED) if self.facts.has_conversations else None

    @property
    def is_conversation(self) -> npt.NDArray[np.bool_] | None:
        """Which documents are conversations, a mask [documents]; None if there are none."""
        return self.array(IS_CONVERSATION) if self.facts.has_conversations else None

    @property
    def seconds(self) -> npt.NDArray[Any]:
        """Tokens of each pair before its second answer's document, int64 [documents]; only if there are pairs.

        They are 0 of a bad answer alone, and all of a good one.
        """
        return self.array(SECONDS)

    @property
    def layout(self) -> dict[str, Array]:
        """How each of its files is read."""
        num_documents = self.facts.num_documents
        arrays = {
            TOKENS: Array(self.token_dtype, self.facts.num_tokens),
            OFFSETS: Array(np.dtype("<i8"), num_documents + 1),
            TEXT_HASHES: Array(np.dtype("<u8"), num_documents),
        }
        if self.facts.has_conversations:
            arrays[IGNORED] = Array(np.dtype(np.bool_), self.facts.num_tokens)
            arrays[IS_CONVERSATION] = Array(np.dtype(np.bool_), num_documents)
        if self.facts.has_pairs:
            arrays[SECONDS] = Array(np.dtype("<i8"), num_documents)
        return arrays

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return the contents of one of its files."""
        return _mapped(self, name)

    def damage(self) -> str:
        """Return what is wrong with its files, by their sizes; empty if nothing is."""
        for name, (dtype, length) in self.layout.items():
            try:
                num_bytes = (self.path / name).stat().st_size
            except OSError as error:
                return f"{name}: {error.strerror or error}"
            if num_bytes != length * dtype.itemsize:
                return f"{name} holds {num_bytes:,} bytes instead of {length * dtype.itemsize:,}"
        return ""

    def removed(self, damage: str) -> DataError:
        """Remove the shard, which is damaged, so that the next start builds it again; return the error for this one."""
        remove_entry(self.path)
        return DataError(f"shard {self.path} of the token cache is damaged ({damage}); start again to build it again")


@lru_cache(maxsize=MAX_MAPPED)
def _mapped(shard: Shard, name: str) -> npt.NDArray[Any]:
    dtype, length = shard.layout[name]
    if not length:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    try:
        mapped = np.asarray(np.memmap(shard.path / name, dtype, mode="r"))
    except (OSError, ValueError) as error:
        raise shard.removed(f"{name}: {error}") from None
    if len(mapped) != length:
        raise shard.removed(f"{name} holds {len(mapped):,} entries instead of {length:,}")
    return mapped


def remove_entry(entry: Path) -> None:
    """Remove what is in the place of a shard, as far as that is allowed."""
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
    shutil.rmtree(entry, ignore_errors=True)
