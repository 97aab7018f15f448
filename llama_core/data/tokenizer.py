"""Text to token ids and back: bytes, built in, or a Hugging Face tokenizer from disk."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from llama_core.config.models import ModelSpec
from llama_core.config.settings import SAMPLE, DataConfig
from llama_core.data.sample import sample_tokenizer
from llama_core.data.tokenizers.files import SENTENCEPIECE, TOKENIZER_CONFIG, frame_texts, read_tokenizer
from llama_core.data.tokenizers.limits import Limited
from llama_core.errors import DataError, EnvironmentMismatchError
from llama_core.hub import CHAT_TEMPLATES, folder_of
from llama_core.imports import how_to_install
from llama_core.records.files import cache_directory, read_file

BYTES = "bytes"
LLAMA_BOS_TOKENS = ("<s>", "<|begin_of_text|>")  # Llama 1 and 2, then Llama 3
LLAMA_EOS_TOKENS = ("</s>", "<|end_of_text|>")
_TOOL_TEMPLATE = "tool_use"
"""The name of a tokenizer's chat template for conversations with tools, if it has one of its own for them."""
_SHOWN_AS_THEMSELVES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""The bytes that a byte-level BPE writes as the character of their number; the others follow from 0x100 on.

Source: ``bytes_to_unicode`` in src/encoder.py of github.com/openai/gpt-2.
"""
PROBES = ("The fox; 12,345 of 6.7\n\n\tx = y", "  two  spaces ", "é漢☕ ﬁ e\u0301", "<s>a</s> b")
"""Texts that tokenizers cut otherwise if they have other rules."""
_REPLACEMENT = "\ufffd"
"""Ends the text of tokens whose last character is incomplete."""


class Encoded(NamedTuple):
    """The tokens of a text, and their places in it."""

    ids: npt.NDArray[Any]
    """uint16 or uint32 [tokens]."""
    begins: npt.NDArray[np.int64]
    """The character at which each token begins, [tokens], ascending."""
    ends: npt.NDArray[np.int64]
    """The character after each token, [tokens], ascending; tokens that share a character all span it."""


class TemplateSource(NamedTuple):
    """A chat template that comes with a tokenizer."""

    template: str
    """The Jinja text."""
    name: str
    """The file it is in."""
    with_tools: str | None = None
    """Another one for conversations with tools, as some tokenizers have."""


class Tokenizer(Protocol):
    """The interface that the data pipeline needs."""

    @property
    def name(self) -> str:
        """How a user chooses it: 'bytes' or a path."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_id(self) -> int | None:
        """Id of BOS; None if the tokenizer has none."""

    @property
    def eos_id(self) -> int:
        """Id that ends each document."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The ids of all tokens, by their text."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens that text can spell, in ``encode_rendered``."""

    @property
    def fingerprint(self) -> str:
        """Digest that two tokenizers share only if they give the same ids."""

    @property
    def before(self) -> tuple[int, ...]:
        """Ids that begin each text: BOS, or nothing."""

    @property
    def after(self) -> tuple[int, ...]:
        """Ids that end each text: EOS."""

    @property
    def beyond(self) -> Mapping[int, str]:
        """Added tokens beyond the model's vocabulary, which no text may spell; see ``model_tokenizer``."""

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return the ids of each text, between ``before`` and ``after``."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The special tokens as text, by the names that chat templates know."""

    @property
    def chat_template(self) -> TemplateSource | None:
        """The chat template that comes with it; None if there is none."""

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of each rendered conversation, which spells its own special tokens; none are added."""

    def encode_input(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Return the ids of a text as transformers gives them to a model: text that spells a special token is one.

        Args:
            text: the text.
            adds_special: whether to add what the tokenizer itself adds to a text, such as BOS.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``, without special tokens."""


def byte_symbols() -> dict[str, int]:
    """Return the number of each byte by the character that stands for it."""
    others = count(0x100)
    return {chr(byte if byte in _SHOWN_AS_THEMSELVES else next(others)): byte for byte in range(0x100)}


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, then BOS and EOS. The markers of a conversation are ordinary bytes.

    Args:
        adds_bos: whether a text begins with BOS.
    """

    name = BYTES
    vocab_size = 258
    bos_id = 256
    eos_id = 257
    after = (eos_id,)
    vocabulary: Mapping[str, int] = byte_symbols() | {LLAMA_BOS_TOKENS[0]: bos_id, LLAMA_EOS_TOKENS[0]: eos_id}
    special_ids = frozenset[int]()
    beyond: Mapping[int, str] = {}
    named_tokens: Mapping[str, str] = {"bos_token": LLAMA_BOS_TOKENS[0], "eos_token": LLAMA_EOS_TOKENS[0]}
    chat_template = None

    def __init__(self, *, adds_bos: bool = True) -> None:
        self.before = (self.bos_id,) if adds_bos else ()
        self.fingerprint = "bytes-256-257" if adds_bos else "bytes-257"

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return uint16 ids of each text, between ``before`` and ``after``."""
        return [self._encode(text.encode()) for text in texts]

    def _encode(self, data: bytes) -> npt.NDArray[Any]:
        ids = np.empty(len(self.before) + len(data) + 1, np.uint16)
        ids[: len(self.before)] = self.bos_id
        ids[-1] = self.eos_id
        ids[len(self.before) : -1] = np.frombuffer(data, np.uint8)
        return ids

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Return uint16 ids of each text: its bytes."""
        return [self._encode_rendered(text) for text in texts]

    def _encode_rendered(self, text: str) -> Encoded:
        code_points = np.frombuffer(text.encode("utf-32-le"), "<u4")
        num_bytes = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
        begins = np.repeat(np.arange(len(text)), num_bytes)
        return Encoded(np.frombuffer(text.encode(), np.uint8).astype(np.uint16), begins, begins + 1)

    def encode_input(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Return the bytes of a text, after ``before`` if ``adds_special``."""
        return [*(self.before if adds_special else ()), *text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; ids that are not bytes are left out, invalid UTF-8 is replaced."""
        return bytes(index for index in ids if 0 <= index < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, or SentencePiece's ``tokenizer.model``, for the package ``tokenizers``.

    BOS and EOS are those that the files beside it name, else Llama's. In a document, text that spells a special token,
    such as ``</s>``, is encoded as plain characters.

    Args:
        path: one of these files, or a folder that holds one.
        adds_bos: whether a text begins with BOS; None if the files say so.

    Raises:
        DataError: if there is no readable tokenizer, or it makes no tokens, or its EOS, or a BOS that is to be added,
            cannot be found.
        EnvironmentMismatchError: if the package ``tokenizers`` is missing.
    """

    def __init__(self, path: Path, *, adds_bos: bool | None = None) -> None:
        if find_spec("tokenizers") is None:
            raise EnvironmentMismatchError(
                f"tokenizer {str(path)!r} needs the package 'tokenizers'; {how_to_install('tokenizers')}"
            )
        self.name = str(path)
        self._limited = Limited(self.name)
        file = tokenizer_file(path)
        read = read_tokenizer(file)
        config = read.config
        self._tokenizer = read.backend
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(self.vocabulary.values(), default=-1)
        self._splits_special_tokens = config.get("split_special_tokens") is True
        self.chat_template = _chat_template(file.parent, config.get("chat_template"))
        self.bos_id = self._named_id(read.named.get("bos_token"), LLAMA_BOS_TOKENS)
        eos_id = self._named_id(read.named.get("eos_token"), LLAMA_EOS_TOKENS)
        if eos_id is None:
            raise DataError(
                f"tokenizer {str(file)!r} has no end-of-text token: it holds none of {', '.join(LLAMA_EOS_TOKENS)}; "
                f"name it as 'eos_token' in {str(file.with_name(TOKENIZER_CONFIG))!r}"
            )
        self.eos_id = eos_id
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        usual = {} if self.bos_id is None else {"bos_token": self._spelled(self.bos_id)}
        usual["eos_token"] = self._spelled(eos_id)
        self.named_tokens = usual | dict(read.named)
        self.beyond: Mapping[int, str] = {}
        self.before, after = self._frame()
        if adds_bos is not None:
            self._force_bos(after, adds_bos=adds_bos)
        self.after = after if eos_id in after else (*after, eos_id)
        digest = hashlib.sha256(read.content)
        digest.update(f"{self.bos_id} {self.eos_id}{' split' if self._splits_special_tokens else ''}".encode())
        digest.update(f"{read.changes} {self.before} {self.after}".encode())
        self.fingerprint = digest.hexdigest()

    def _named_id(self, name: str | None, usual: Sequence[str]) -> int | None:
        """Return the id of a named token, else of the first usual one that exists, else None."""
        ids = (self._tokenizer.token_to_id(token) for token in (usual if name is None else [name]))
        return next((index for index in ids if index is not None), None)

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the tokenizer adds before and after a text.

        Raises:
            DataError: if a text itself becomes none.
        """
        for texts in (["a"], list(self.vocabulary)):  # most tokenizers know an a
            for encoding in self._encoded(texts):
                own = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
                if own:
                    return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])
        raise DataError(
            f"tokenizer {self.name!r} makes no token of any text; if its post_processor is a TemplateProcessing, put "
            "$A, which stands for the text, into its 'single', or choose another tokenizer"
        )

    def _force_bos(self, after: Sequence[int], *, adds_bos: bool) -> None:
        """Let a text begin with BOS, or not, whatever the files say."""
        if adds_bos and self.bos_id is None:
            raise DataError(
                f"data.add_bos_token=true: tokenizer {self.name!r} has no BOS; name it as 'bos_token' in its "
                f"{TOKENIZER_CONFIG}, or leave the key out"
            )
        others = tuple(index for index in self.before if index != self.bos_id)
        self.before = (self.bos_id, *others) if adds_bos and self.bos_id is not None else others
        frame_texts(self._tokenizer, map(self._spelled, self.before), map(self._spelled, after))

    def _spelled(self, index: int) -> str:
        return str(self._tokenizer.id_to_token(index))

    @property
    def post_processor(self) -> Any:
        """What adds tokens before and after a text, as ``tokenizer.json`` has it."""
        return json.loads(self._tokenizer.to_str())["post_processor"]

    def fit(self, vocab_size: int) -> None:
        """Refuse from now on each text that spells an added token beyond a model's vocabulary.

        Raises:
            DataError: if other tokens are beyond it.
        """
        if self.vocab_size <= vocab_size:
            return
        added = self._tokenizer.get_added_tokens_decoder()
        beyond = {index: token for token, index in self.vocabulary.items() if index >= vocab_size}
        needed = {*self.before, *self.after}
        if not beyond.keys() <= added.keys() - needed:
            raise too_large(self, vocab_size, "the model's own tokenizer, or 'bytes'")
        self.beyond = beyond
        self.vocab_size = vocab_size
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} below {vocab_size}".encode()).hexdigest()

    def _within(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the ids of a text.

        Raises:
            DataError: if one is beyond the model's vocabulary.
        """
        if self.beyond and len(ids) and (largest := int(ids.max())) >= self.vocab_size:
            raise DataError(
                f"a text spells {self.beyond[largest]!r}, token {largest} of tokenizer {self.name!r}, but the model "
                f"has only {self.vocab_size}; take it out of the data or the chat template, or choose a model with it"
            )
        return ids

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Return uint32 ids of each text, between ``before`` and ``after``; runs on all cores."""
        encodings = self._limited(
            lambda: self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False), _num_characters(texts)
        )
        framed = ([*self.before, *encoding.ids, *self.after] for encoding in encodings)
        return [self._within(np.array(ids, np.uint32)) for ids in framed]

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Return uint32 ids of each text, which spells its own special tokens; runs on all cores.

        As in transformers, ``split_special_tokens`` in ``tokenizer_config.json`` makes them plain text.
        """
        encodings = self._encoded(texts, adds_special=False, reads_special=True)
        tokens = ((encoding.ids, np.array(encoding.offsets, np.int64).reshape(-1, 2)) for encoding in encodings)
        return [
            Encoded(self._within(np.array(ids, np.uint32)), offsets[:, 0], offsets[:, 1]) for ids, offsets in tokens
        ]

    def encode_input(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Return the ids of a text, with what the tokenizer adds."""
        ids: list[int] = self._encoded([text], adds_special=adds_special, reads_special=True)[0].ids
        self._within(np.array(ids, np.uint32))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special and unknown ids are left out."""
        tokens = list(ids)
        (text,) = self._limited(lambda: self._tokenizer.decode_batch([tokens], skip_special_tokens=True), len(tokens))
        return str(text)

    def _encoded(self, texts: Sequence[str], *, adds_special: bool = True, reads_special: bool = False) -> list[Any]:
        """Return what ``tokenizers`` makes of some texts: their ids, and what comes with these.

        Args:
            texts: the texts.
            adds_special: whether the tokenizer adds what it adds to a text.
            reads_special: whether a text may spell special tokens, unless the tokenizer's files say that none does.
        """

        def encoded() -> list[Any]:
            self._tokenizer.encode_special_tokens = not reads_special or self._splits_special_tokens
            try:
                return list(self._tokenizer.encode_batch(list(texts), add_special_tokens=adds_special))
            finally:
                self._tokenizer.encode_special_tokens = True

        return self._limited(encoded, _num_characters(texts))


def _num_characters(texts: Iterable[str]) -> int:
    return sum(map(len, texts))


def tokenizer_file(path: Path) -> Path:
    """Return the file of a tokenizer: the one in a folder, or ``path`` itself. It need not exist."""
    if not path.is_dir():
        return path
    files = [path / "tokenizer.json", path / SENTENCEPIECE]
    return next((file for file in files if file.is_file()), files[0])


def model_tokenizer(data: DataConfig, spec: ModelSpec) -> Tokenizer:
    """Return the tokenizer of a run, which fits the vocabulary of its model.

    Added tokens beyond it, such as a ``<pad>`` that was never trained, are kept: ``beyond`` has them, and a text that
    spells one is refused.

    Raises:
        DataError: if there is no such tokenizer, or its ids exceed the vocabulary.
        HubError, EnvironmentMismatchError: as ``load_tokenizer``.
    """
    tokenizer = load_tokenizer(data.tokenizer, adds_bos=data.add_bos_token)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.fit(spec.vocab_size)
    elif tokenizer.vocab_size > spec.vocab_size:
        raise too_large(tokenizer, spec.vocab_size, "a model with more")
    return tokenizer


def too_large(tokenizer: Tokenizer, vocab_size: int, remedy: str) -> DataError:
    """Return the error of a tokenizer with more tokens than a model has."""
    return DataError(
        f"tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} tokens, more than the model's vocabulary of "
        f"{vocab_size}; choose {remedy}"
    )


def load_tokenizer(source: str, *, adds_bos: bool | None = None) -> Tokenizer:
    """Return the tokenizer that ``source`` names: 'bytes', 'sample', a file, its folder, or a repository of the Hub.

    Args:
        source: its name.
        adds_bos: whether a text begins with BOS; None for the tokenizer's own rule.

    Raises:
        DataError: if there is no such tokenizer.
        HubError: if a repository cannot be had.
        EnvironmentMismatchError: if it needs a package that is missing.
    """
    if source == BYTES:
        return ByteTokenizer(adds_bos=adds_bos is not False)
    if source == SAMPLE:
        return HuggingFaceTokenizer(sample_tokenizer(cache_directory(None)), adds_bos=adds_bos)
    path = folder_of(source)
    wanted = tokenizer_file(path)
    if not wanted.is_file():
        raise DataError(
            f"no tokenizer {source!r}: {str(wanted)!r} does not exist; use 'bytes', or the path of a Hugging Face "
            f"tokenizer.json, of SentencePiece's {SENTENCEPIECE}, or of a folder that holds one"
        )
    return HuggingFaceTokenizer(path, adds_bos=adds_bos)


def decode_stream(tokenizer: Tokenizer, before: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ``ids`` piece by piece; a character of several tokens comes whole.

    Args:
        tokenizer: the tokenizer.
        before: the ids that precede them; needed because some tokenizers drop a space at the beginning of a text.
        ids: the ids, as they become known.
    """
    recent = list(before)
    shown = len(tokenizer.decode(before))
    num_known = len(recent)
    for index in ids:
        recent.append(index)
        text = tokenizer.decode(recent)
        if len(text) > shown and not text.endswith(_REPLACEMENT):
            yield text[shown:]
            # only the last piece is decoded again, so that a long text does not become slow
            recent = recent[num_known:]
            num_known = len(recent)
            shown = len(tokenizer.decode(recent))
    if rest := tokenizer.decode(recent)[shown:]:
        yield rest


def difference(tokenizer: Tokenizer, other: Tokenizer) -> str:
    """Return what a tokenizer changes of the ids that ``other`` gives, for a sentence; empty if they are the same."""
    if tokenizer.fingerprint == other.fingerprint:
        return ""
    if num_moved := num_moved_tokens(tokenizer, other):
        return f"{num_moved:,} of {len(other.vocabulary):,} tokens have other ids or none"
    num_more = len(tokenizer.vocabulary) - len(other.vocabulary)
    if num_more:
        return f"it has {num_more:,} more"
    is_same = all(tokenizer.encode_input(text) == other.encode_input(text) for text in PROBES)
    return "" if is_same else "the tokens are the same, but a text is cut otherwise"


def num_moved_tokens(tokenizer: Tokenizer, other: Tokenizer) -> int:
    """Return how many tokens of ``other`` have another id in a tokenizer, or none."""
    return sum(tokenizer.vocabulary.get(token) != index for token, index in other.vocabulary.items())


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the smallest type that holds the ids of a tokenizer."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _chat_template(folder: Path, configured: object) -> TemplateSource | None:
    """Return a tokenizer's chat template from where transformers takes it: its own file, else the configuration.

    Raises:
        DataError: if the file cannot be read, or there are several templates and none is the default.
    """
    file = folder / "chat_template.jinja"
    for_tools = folder / CHAT_TEMPLATES / f"{_TOOL_TEMPLATE}.jinja"
    with_tools = read_template(for_tools) if for_tools.is_file() else None
    if file.is_file():
        return TemplateSource(read_template(file), str(file), with_tools)
    name = str(folder / "tokenizer_config.json")
    if isinstance(configured, list):
        by_name = {str(entry.get("name")): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = by_name.get("default")
        with_tools = with_tools or by_name.get(_TOOL_TEMPLATE)
        if configured is None:
            raise DataError(
                f"{name!r} has the chat templates {', '.join(map(str, by_name))}, and none is the default; "
                "name the file of one as data.chat_template"
            )
    if configured is None:
        return None
    return TemplateSource(str(configured), name, None if with_tools is None else str(with_tools))


def read_template(file: Path) -> str:
    """Return the text of a chat template's file.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return read_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"cannot read chat template {str(file)!r}: {reason}; "
            "name a Jinja file, 'llama2' or 'llama3' as data.chat_template"
        ) from None
