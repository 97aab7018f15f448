"""Read a SentencePiece model, as Llama 1 and 2 have one, into a tokenizer of the package ``tokenizers``.

The file is a protocol buffer: a message of numbered fields, some of which are messages.

Source: sentencepiece_model.proto of https://github.com/google/sentencepiece, for the fields and their defaults;
``bpe_model.cc`` beside it for the order of merges; https://protobuf.dev/programming-guides/encoding for the bytes.
"""

import re
import struct
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import tokenizers

SPACE = "\u2581"
"""Stands for a space in pieces."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Kinds of pieces; of the last, one spells each byte that no piece has."""
_PIECES, _TRAINER, _NORMALIZER = range(1, 4)
"""The fields of a model."""
_NAMED = {"unk_token": (40, b"<unk>"), "bos_token": (41, b"<s>"), "eos_token": (42, b"</s>")}
"""The field of the trainer with the id of each, which is negative if there is none, and the usual piece; the field five
after it names another piece."""
_BPE = 2
"""The kind of model that Llama has."""
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/=]+ [0-9]+\n")
"""How a file begins that has the bytes of a token in base64, and its id, on each line."""
_LONGEST_PIECE = 256
"""Most characters of a piece; SentencePiece itself makes none of more than 16 unless it is told to."""
_MAX_MERGES = 32
"""Most pairs that make a piece, over all pieces; Llama 2 has two for each."""
_CONVERSION = (
    'convert it with: pip install transformers sentencepiece; python -c "from transformers import AutoTokenizer; '
    "AutoTokenizer.from_pretrained('FOLDER').save_pretrained('FOLDER')\""
)


class NotSentencePieceError(Exception):
    """A file that is no SentencePiece model, or one that is not supported: why, and what to do."""


class Piece(NamedTuple):
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model says."""

    names: Mapping[str, str]
    """The pieces of BOS, EOS and of what is unknown, as ``bos_token``, ``eos_token`` and ``unk_token``."""
    pieces: tuple[Piece, ...]
    charsmap: bytes
    """How characters are normalised, compiled; empty if they stay as they are."""
    adds_prefix: bool
    """Whether a text begins with a space that it does not have."""
    removes_spaces: bool
    """Whether spaces at the ends, and all but one between words, are dropped."""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Return the model in the bytes of a file.

        Raises:
            NotSentencePieceError: if it is none, or one whose ids a tokenizer of ``tokenizers`` would not give.
        """
        if _TIKTOKEN.match(content):
            raise NotSentencePieceError(
                "it is in the format of Llama 3's own code (tiktoken); use the tokenizer.json of the same model"
            )
        try:
            pieces = []
            parts: dict[int, bytes] = {}
            for number, value in _fields(content):
                if number == _PIECES:
                    pieces.append(_piece(_bytes(value)))
                elif number in (_TRAINER, _NORMALIZER):
                    parts[number] = _bytes(value)
            trainer = dict(_fields(parts[_TRAINER]))
            normalizer = dict(_fields(parts[_NORMALIZER]))
            model = cls(
                {
                    name: _bytes(trainer.get(field + 5, usual)).decode()
                    for name, (field, usual) in _NAMED.items()
                    if not _is_negative(trainer.get(field, 0))
                },
                tuple(pieces),
                _bytes(normalizer.get(2, b"")),
                bool(normalizer.get(3, 1)),
                bool(normalizer.get(4, 1)),
            )
        except (IndexError, KeyError, TypeError, ValueError, struct.error):
            raise NotSentencePieceError("it is no SentencePiece model; copy it again") from None
        longest = max((len(piece.text) for piece in pieces), default=0)
        if longest > _LONGEST_PIECE:
            raise NotSentencePieceError(
                f"it has a piece of {longest:,} characters, more than {_LONGEST_PIECE}; copy it again"
            )
        own = [piece.text for piece in pieces if piece.kind == _USER_DEFINED]
        if trainer.get(3, 1) != _BPE:
            raise NotSentencePieceError(f"it is no BPE model, as Llama's are; {_CONVERSION}")
        if own or trainer.get(24, 0) or not normalizer.get(5, 1):
            what = f"user-defined symbols ({own[0]})" if own else "another way to write spaces than Llama's"
            raise NotSentencePieceError(f"it has {what}; {_CONVERSION}")
        return model

    @property
    def control(self) -> tuple[str, ...]:
        """The pieces that no text gives, such as BOS."""
        return tuple(piece.text for piece in self.pieces if piece.kind == _CONTROL)

    def tokenizer(self, *, prefixes_each: bool = True) -> "tokenizers.Tokenizer":
        """Return a tokenizer that gives the same ids.

        Args:
            prefixes_each: whether the space that a text begins with also follows each special token in it.
        """
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
        from tokenizers.models import BPE

        vocab = {piece.text: index for index, piece in enumerate(self.pieces)}
        unknown = next((piece.text for piece in self.pieces if piece.kind == _UNKNOWN), None)
        has_bytes = any(piece.kind == _BYTE for piece in self.pieces)
        merges = listed_merges(self._merges(), len(vocab))
        tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes))
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.removes_spaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.adds_prefix and prefixes_each:
            steps.append(normalizers.Prepend(SPACE))
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        if self.adds_prefix and not prefixes_each:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
        spaces = [decoders.Strip(" ", left=1)] if self.adds_prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *spaces]
        )
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in self.control])
        return tokenizer

    def _merges(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of pieces that make a piece, in the order in which they are merged: by its score."""
        scores = {piece.text: piece.score for piece in self.pieces if piece.kind == _NORMAL}
        places = {text: place for place, text in enumerate(scores)}
        for text in sorted(scores, key=lambda text: -scores[text]):
            yield from sorted(cuts_of(text, scores), key=lambda cut: (places[cut[0]], places[cut[1]]))


def cuts_of(text: str, known: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield each way to make a piece of two that are known."""
    for at in range(1, len(text)):
        if text[:at] in known and text[at:] in known:
            yield text[:at], text[at:]


def listed_merges(merges: Iterable[tuple[str, str]], num_pieces: int) -> list[tuple[str, str]]:
    """Return the merges of a vocabulary.

    Raises:
        NotSentencePieceError: if there are many more than pieces.
    """
    most = _MAX_MERGES * num_pieces
    listed = list(islice(merges, most + 1))
    if len(listed) > most:
        raise NotSentencePieceError(f"its {num_pieces:,} pieces have more than {most:,} merges; copy it again")
    return listed


def _piece(content: bytes) -> Piece:
    found = dict(_fields(content))
    (score,) = struct.unpack("<f", _bytes(found.get(2, bytes(4))))
    return Piece(_bytes(found[1]).decode(), score, int(found.get(3, _NORMAL)))


def _is_negative(value: int | bytes) -> bool:
    """Return whether an integer, which is written without its sign, is negative."""
    return isinstance(value, int) and value >= 2**31


def _bytes(value: int | bytes) -> bytes:
    """Return the value of a field that is no integer."""
    if isinstance(value, int):
        raise TypeError("an integer")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message: an integer, or the bytes of anything else."""
    at = 0
    while at < len(message):
        key, at = _integer(message, at)
        if key >> 3 == 0:
            raise ValueError("no field has the number 0")
        if key & 7 == 0:
            value, at = _integer(message, at)
            yield key >> 3, value
            continue
        if key & 7 == 2:
            length, at = _integer(message, at)
        else:
            length = {1: 8, 5: 4}[key & 7]
        if at + length > len(message):
            raise ValueError("cut short")
        yield key >> 3, message[at : at + length]
        at += length


def _integer(message: bytes, at: int) -> tuple[int, int]:
    """Return the integer at a place, of 7 bits in each byte, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("an integer without an end")
