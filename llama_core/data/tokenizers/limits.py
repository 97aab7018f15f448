"""What a tokenizer from somebody may cost: how much longer it makes a text, and how long it may work on one.

The package ``tokenizers`` does what a file says, without limits, and heeds no interrupt meanwhile.
"""

import base64
import json
import math
import os
import re
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from llama_core.errors import DataError

if TYPE_CHECKING:
    import tokenizers

MAX_GROWTH = 256
"""How many times as long the steps of a tokenizer may make a text; that of T5 may make it 72 times as long."""
MAX_ADDED = 1000
"""Most tokens that a tokenizer may add to each text; one or two are usual."""
MAX_CHARACTERS = 4096
"""Most characters of a token; the longest of the known tokenizers are some hundreds of spaces."""
MAX_SECONDS = 60
"""Most time for a text of a few words; see ``SLOWEST``."""
SLOWEST = 10_000
"""Fewest characters of a long text per second; a core tokenises about a million."""
_PROBES = ("a", "b", " ")
"""A pattern that matches nothing does so beside at least two of these."""
_STEPS = ("normalizers", "pretokenizers", "decoders")
"""The keys of the steps of a sequence."""
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
_GROWTH: Mapping[str | None, float] = {"ByteLevel": 4.0, "BertNormalizer": 3.0, "Metaspace": 2.0, "WordPiece": 2.0}
"""A character for each byte of UTF-8; a space on both sides of a Chinese character; one before each word or token."""
_PLACES = re.compile(r"\(\?|\\[bBAzZGKk0-9]|[\^$]")
"""What may match a place and no character in a regular expression, or refers to a part that may be empty."""

Result = TypeVar("Result")
_Order = tuple[Callable[[], Any], Future[Any]]
"""What is to be called, and where its result goes."""


def refuse_costly_file(described: Any, file: str) -> None:
    """Refuse a ``tokenizer.json`` before it is loaded, which normalises its added tokens; see ``refuse_costly``.

    Args:
        described: what it holds.
        file: where it is.

    Raises:
        DataError: with what in it costs too much, or if its steps are nested too deeply.
    """
    try:
        parts = {key: described.get(key) or {} for key in _PARTS}
        vocab = described["model"]["vocab"]
        longest = max((len(piece if isinstance(piece, str) else piece[0]) for piece in vocab), default=0)
        _refuse(parts, file)
    except RecursionError:
        raise DataError(f"tokenizer {file!r} is nested too deeply; use another") from None
    except (AttributeError, KeyError, LookupError, TypeError):
        return  # the package says what is wrong with it
    if longest > MAX_CHARACTERS:
        raise DataError(
            f"tokenizer {file!r} has a token of {longest:,} characters, more than {MAX_CHARACTERS:,}; use another"
        )


def refuse_costly(backend: "tokenizers.Tokenizer", file: str) -> None:
    """Refuse a tokenizer that may make a text much longer, or gives other ids each time.

    Raises:
        DataError: with what in ``file`` does so.
    """
    _refuse({key: _described(getattr(backend, key)) for key in _PARTS}, file)
    if dropout := getattr(backend.model, "dropout", None):
        raise DataError(
            f"the model in tokenizer {file!r} has dropout={dropout:g}, with which a text gets other tokens each time; "
            "set it to null there"
        )


def _described(part: Any) -> Mapping[str, Any]:
    """Return a step as ``tokenizer.json`` has it; an empty object if there is none."""
    described: Mapping[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return described


def _refuse(parts: Mapping[str, Mapping[str, Any]], file: str) -> None:
    for keys in (("normalizer", "pre_tokenizer"), ("decoder",)):
        growth = math.prod(_growth(parts[key]) for key in keys)
        if growth > MAX_GROWTH:
            raise DataError(
                f"the {' and the '.join(keys)} in tokenizer {file!r} may make a text {growth:,.0f} times as long, more "
                f"than {MAX_GROWTH} times; shorten what their steps write, or use another tokenizer"
            )
    num_added, num_texts = _framing(parts["post_processor"])
    if num_added > MAX_ADDED or num_texts > 1:
        repeats = f" and repeats it {num_texts:,} times" if num_texts > 1 else ""
        raise DataError(
            f"the post_processor in tokenizer {file!r} adds {num_added:,} tokens to each text{repeats}; at most "
            f"{MAX_ADDED:,} are added, to one text; leave them out, or use another tokenizer"
        )


def _growth(step: Mapping[str, Any]) -> float:
    """Return an upper bound of how many times as long a step makes a text, for those that lengthen it each time."""
    match step.get("type"):
        case "Sequence":
            return math.prod(_growth(one) for key in _STEPS for one in step.get(key, ()))
        case "Replace":
            written, pattern = len(step["content"]), step["pattern"]
            replaced = len(pattern.get("String", "")) or int(_consumes(pattern.get("Regex", "")))
            return max(1.0, written / replaced) if replaced else 1.0 + written
        case "Prepend":
            return 1.0 + len(step["prepend"])
        case "Precompiled":
            return _longest_replacement(base64.b64decode(step["precompiled_charsmap"] or ""))
        case "BPEDecoder" | "CTC":
            return 1.0 if step.get("suffix", step.get("word_delimiter_token")) else 2.0
    return _GROWTH.get(step.get("type"), 1.0)


def _consumes(pattern: str) -> bool:
    """Return whether a regular expression surely matches no empty place, as between any two characters."""
    from tokenizers import Regex, normalizers

    if not pattern or _PLACES.search(pattern.replace("(?:", "(")):
        return False
    step = normalizers.Replace(Regex(pattern), "x")
    return all(len(step.normalize_str(text)) == 1 for text in _PROBES)


def _longest_replacement(charsmap: bytes) -> float:
    """Return the length of the longest text that SentencePiece's table has for one character.

    Source: ``Normalizer::DecodePrecompiledCharsMap`` in normalizer.cc of https://github.com/google/sentencepiece: the
    size of a trie, the trie, and texts that end with a zero.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return float(max(len(text.decode(errors="replace")) or 1 for text in texts.split(b"\0")))


def _framing(step: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many tokens a step adds to each text, and how often the text itself is in what it makes."""
    if step.get("type") == "Sequence":
        inner = [_framing(one) for one in step["processors"]]
        return sum(added for added, _ in inner), math.prod(max(1, texts) for _, texts in inner)
    tokens = step.get("special_tokens")
    if not isinstance(tokens, dict):
        return 0, 1
    named = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
    return sum(len(tokens[name]["ids"]) for name in named), len(step["single"]) - len(named)


class Limited:
    """Calls functions of ``tokenizers`` so that they may be interrupted, and have a limit of time.

    All run in one thread, since the package is faster in the one that it has begun in. Nothing can end it: a function
    that takes too long goes on until the process ends, and no other is begun.

    Args:
        name: the tokenizer, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Future[Any] | None = None
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._process = 0

    def __call__(self, work: Callable[[], Result], num_characters: int) -> Result:
        """Return what a function returns.

        Args:
            work: the function. What takes long in it must release the lock of Python's interpreter, as ``encode_batch``
                does, and ``encode`` does not.
            num_characters: how long its texts are.

        Raises:
            DataError: if it fails, or takes too long.
        """
        seconds = MAX_SECONDS + num_characters / SLOWEST
        if self._last is not None and not self._last.done():
            raise DataError(f"tokenizer {self._name!r} still works on another text; use another")
        answer = self._last = Future[Result]()
        if self._process != os.getpid():  # a fork has no threads
            self._begin()
        self._orders.put((work, answer))
        try:
            return answer.result(timeout=seconds)
        except TimeoutError:
            raise DataError(
                f"tokenizer {self._name!r} has worked for more than {seconds:.0f} s on {num_characters:,} characters; "
                "use another"
            ) from None
        except BaseException as error:
            if not is_of_tokenizers(error):
                raise
            raise DataError(f"tokenizer {self._name!r} does not work: {error}; copy it again") from None

    def _begin(self) -> None:
        self._process = os.getpid()
        self._orders = SimpleQueue()
        Thread(target=_work, args=(self._orders,), name="tokenizer", daemon=True).start()
        weakref.finalize(self, self._orders.put, None)


def _work(orders: "SimpleQueue[_Order | None]") -> None:
    while (order := orders.get()) is not None:
        work, answer = order
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        del order, work, answer  # they hold the tokenizer, at whose end this thread ends


def is_of_tokenizers(error: BaseException) -> bool:
    """Return whether something raised by ``tokenizers`` is an error of it: a panic of its Rust is no ``Exception``."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
