"""A tokenizer from its files, with the ids of transformers: a vocabulary, and what the files beside it change.

``AutoTokenizer`` makes a tokenizer with a class, which the folder names or ``config.json`` implies. The general class
takes a ``tokenizer.json`` as it is. Those of Llama, Code Llama, Qwen 2, GPT-2 and GPT-NeoX take only its vocabulary and
cut text in a way of their own. Any class then adds the tokens that ``tokenizer_config.json``,
``special_tokens_map.json`` and ``added_tokens.json`` name.
"""

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.data.tokenizers.limits import is_of_tokenizers, refuse_costly, refuse_costly_file
from llama_core.data.tokenizers.sentencepiece import (
    SPACE,
    NotSentencePieceError,
    SentencePieceModel,
    cuts_of,
    listed_merges,
)
from llama_core.errors import DataError, why_unreadable
from llama_core.records.files import read_file
from llama_core.units import MIB

if TYPE_CHECKING:
    import tokenizers

SENTENCEPIECE = Path("tokenizer.model")
"""The file of a SentencePiece model, as Llama 1 and 2 have one."""
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a chat template knows by name, in the order in which transformers adds them."""
MAX_BYTES_OF_VOCABULARY = 256 * MIB
"""Most bytes of a ``tokenizer.json``; Llama 3's has 9 MB, Gemma's 33."""
MAX_BYTES_OF_MODEL = 64 * MIB
"""Most bytes of a ``tokenizer.model``; Llama 2's has 0.5 MB, Gemma's 4."""

_ANY = ""
"""Stands for transformers' general class, which takes a vocabulary as it is."""
_LLAMA = "LlamaTokenizer"
_CODE_LLAMA = "CodeLlamaTokenizer"
_QWEN2 = "Qwen2Tokenizer"
_GPT2 = "GPT2Tokenizer"
_GPT_NEOX = "GPTNeoXTokenizer"
_NOT_READ = (
    "BertTokenizer",
    "CodeGenTokenizer",
    "CohereTokenizer",
    "GemmaTokenizer",
    "Qwen3_5Tokenizer",
    "RobertaTokenizer",
    "T5Tokenizer",
    "WhisperTokenizer",
    "XGLMTokenizer",
    "XLMRobertaTokenizer",
)
"""Other classes that cut text in a way of their own; transformers takes the general one for names that it lacks."""
_GENERAL = (_ANY, "PreTrainedTokenizer", "TokenizersBackend", "LLaMATokenizer")
"""Names of the general class; the last one is unknown to transformers, which then takes it."""
_OF_MODEL_TYPE = {
    "mistral": _ANY,
    "mixtral": _ANY,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
    "qwen3_moe": _QWEN2,
}
"""The class that transformers expects of a model, by ``model_type``; a Llama may have any."""
_DEFAULTS: Mapping[str, Mapping[str, str | None]] = {
    _LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    _CODE_LLAMA: {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "prefix_token": "▁<PRE>",
        "middle_token": "▁<MID>",
        "suffix_token": "▁<SUF>",
        "eot_token": "▁<EOT>",
        "fill_token": "<FILL_ME>",
    },
    _QWEN2: {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    _GPT2: {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    _GPT_NEOX: {
        "unk_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|padding|>",
    },
}
"""The special tokens of a class that its files need not name."""
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers split text before they merge bytes."""
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@dataclass(frozen=True)
class ReadTokenizer:
    """A tokenizer that has been read."""

    backend: "tokenizers.Tokenizer"
    """Gives the ids, and adds what the tokenizer adds to a text."""
    named: Mapping[str, str]
    """The special tokens that its files or its class name, by their names."""
    config: Mapping[str, Any]
    """``tokenizer_config.json``; empty if there is none."""
    content: bytes
    """The file of the vocabulary."""
    changes: str
    """What other files change of its ids, for a digest; empty if nothing."""


def read_tokenizer(file: Path) -> ReadTokenizer:
    """Return the tokenizer of a ``tokenizer.json`` or ``tokenizer.model``, and of what is beside it.

    Raises:
        DataError: if a file cannot be read, or gives other ids than transformers does; names the file.
    """
    return _Files(file).read()


class _Files:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._is_sentencepiece = file.suffix == SENTENCEPIECE.suffix
        self._config = _json(file.with_name(TOKENIZER_CONFIG))
        self._has_config = file.with_name(TOKENIZER_CONFIG).is_file()
        # transformers reads the older files only where the newer one does not list the added tokens
        is_older = "added_tokens_decoder" not in self._config
        self._special = _json(file.with_name(SPECIAL_TOKENS_MAP)) if is_older else {}
        self._added = _json(file.with_name(ADDED_TOKENS)) if is_older else {}

    def read(self) -> ReadTokenizer:
        try:
            most_bytes = MAX_BYTES_OF_MODEL if self._is_sentencepiece else MAX_BYTES_OF_VOCABULARY
            self._content = read_file(self._file, most_bytes=most_bytes)
            self._class = self._find_class()
            backend = self._built()
        except OSError as error:
            raise DataError(f"cannot read tokenizer {str(self._file)!r}: {error.strerror or error}") from None
        except NotSentencePieceError as error:
            raise DataError(f"cannot read tokenizer {str(self._file)!r}: {error}") from None
        except DataError:
            raise
        except BaseException as error:  # the Rust parser's errors have no class of their own
            if not is_of_tokenizers(error):
                raise
            what = "a SentencePiece model" if self._is_sentencepiece else "a Hugging Face tokenizer.json"
            raise DataError(f"{str(self._file)!r} is not {what}: {error}") from None
        before = _state(backend)
        named = self._named()
        self._add_tokens(backend, named)
        self._add_ends(backend, named)
        refuse_costly(backend, str(self._file))
        changes = f"{self._class} {_state(backend)}" if self._is_rebuilt or _state(backend) != before else ""
        if self._is_sentencepiece:
            changes += f" legacy={self._config.get('legacy')} prefix={self._config.get('add_prefix_space')}"
        return ReadTokenizer(backend, named, self._config, self._content, changes)

    def _find_class(self) -> str:
        """Return the name of the class with which transformers opens the folder."""
        described = _json(self._file.with_name("config.json"))
        given = self._config.get("tokenizer_class") or described.get("tokenizer_class") or _ANY
        named = str(given).removesuffix("Fast")
        named = _ANY if named in _GENERAL else named
        model_type = str(described.get("model_type", ""))
        expected = _OF_MODEL_TYPE.get(model_type)
        if named == _LLAMA and model_type != "qwen2" and b'"ByteLevel"' in self._content:
            return _ANY
        if expected is None or not given:
            return named if expected is None else expected
        return expected if model_type == "qwen2" or expected == _ANY else named

    @property
    def _is_rebuilt(self) -> bool:
        return self._class in _DEFAULTS

    def _built(self) -> "tokenizers.Tokenizer":
        """Return the tokenizer before tokens are added."""
        from tokenizers import Tokenizer

        where = str(self._file.with_name(TOKENIZER_CONFIG))
        if self._class in _NOT_READ:
            raise DataError(
                f"{where!r} names tokenizer_class={self._class}, which does not cut text as {self._file.name} says; "
                "set PreTrainedTokenizerFast there if the file is right"
            )
        if not self._is_sentencepiece:
            refuse_costly_file(self._described, str(self._file))
            backend = Tokenizer.from_buffer(self._content)
            return self._rebuilt(self._described, backend) if self._is_rebuilt else backend
        model = self._model
        if self._class == _ANY:
            return model.tokenizer(prefixes_each=bool(self._config.get("legacy", True)))
        if self._class not in (_LLAMA, _CODE_LLAMA):
            raise DataError(
                f"{where!r} names tokenizer_class={self._class}, which is not read from {SENTENCEPIECE}; put the "
                "tokenizer.json of the same model beside it"
            )
        vocab = {piece.text: index for index, piece in enumerate(model.pieces)}
        return self._llama(vocab, listed_merges(_merges(vocab), len(vocab)))

    @cached_property
    def _model(self) -> SentencePieceModel:
        return SentencePieceModel.parse(self._content)

    @cached_property
    def _described(self) -> Any:
        """What a ``tokenizer.json`` holds."""
        try:
            return json.loads(self._content)
        except RecursionError:
            raise DataError(f"tokenizer {str(self._file)!r} is nested too deeply; use another") from None

    def _rebuilt(self, described: dict[str, Any], backend: "tokenizers.Tokenizer") -> "tokenizers.Tokenizer":
        """Return a tokenizer with the vocabulary of a ``tokenizer.json`` that cuts text as its class does."""
        model = described["model"]
        if model.get("type", "BPE") != "BPE":
            raise DataError(
                f"{str(self._file)!r} holds a model of type {model['type']}, not the BPE of a {self._class}; correct "
                f"tokenizer_class in {str(self._file.with_name(TOKENIZER_CONFIG))!r}"
            )
        merges = []
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            merges.append((left, right))
        build = self._llama if self._class in (_LLAMA, _CODE_LLAMA) else self._byte_level
        rebuilt = build(model["vocab"], merges)
        if backend.post_processor is not None and self._class != _GPT_NEOX:
            rebuilt.post_processor = backend.post_processor
        return rebuilt

    def _llama(self, vocab: Mapping[str, int], merges: list[tuple[str, str]]) -> "tokenizers.Tokenizer":
        """Return a tokenizer that writes a space before a text, as the classes of Llama and Code Llama do."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        is_code = self._class == _CODE_LLAMA
        unknown = {"unk_token": self._named()["unk_token"]} if is_code else {}
        backend = Tokenizer(models.BPE(dict(vocab), merges, fuse_unk=True, byte_fallback=True, **unknown))
        prefix = self._config.get("add_prefix_space")
        has_prefix = prefix is None or bool(prefix)
        # a legacy tokenizer writes one after each special token, too
        each = bool(self._config.get("legacy", False)) and not is_code
        scheme = ("always" if each else "first") if has_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(" ", left=1)] if has_prefix or is_code else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _byte_level(self, vocab: Mapping[str, int], merges: list[tuple[str, str]]) -> "tokenizers.Tokenizer":
        """Return a tokenizer of bytes, as the classes of GPT-2, GPT-NeoX and Qwen 2 do."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        backend = Tokenizer(models.BPE(dict(vocab), merges, continuing_subword_prefix="", end_of_word_suffix=""))
        if self._class != _GPT2:
            backend.normalizer = normalizers.NFC()
        has_prefix = bool(self._config.get("add_prefix_space"))
        split = self._class != _QWEN2
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix, use_regex=split)
        if not split:
            words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([words, backend.pre_tokenizer])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _named_values(self) -> dict[str, Any]:
        """Return the special tokens as files spell them, by name, in the order in which they are added."""
        defaults = dict(_DEFAULTS.get(self._class, {}))
        if self._is_sentencepiece and self._class == _ANY:
            defaults = dict(self._model.names)
        given = defaults | self._config | self._special
        extra = given.get("extra_special_tokens")
        own = extra if isinstance(extra, dict) else {}
        others = {key: value for key, value in given.items() if key.endswith("_token") and key not in NAMED_TOKENS}
        ordered = {key: given[key] for key in NAMED_TOKENS if key in given} | others | own
        return {key: value for key, value in ordered.items() if _name(value)}

    def _named(self) -> dict[str, str]:
        return {key: _name(value) for key, value in self._named_values().items()}

    def _extra(self) -> list[Any]:
        """Return the special tokens without a name."""
        for key in ("extra_special_tokens", "additional_special_tokens"):
            found = self._config.get(key)
            if isinstance(found, list) and found:
                return found
        if self._is_sentencepiece:
            return list(self._model.control)
        found = self._special.get("extra_special_tokens") or self._special.get("additional_special_tokens")
        return found if isinstance(found, list) else []

    def _declared(self) -> Iterator[tuple[Path, int, Any]]:
        """Yield the added tokens that a file gives an id: the file, the id and the token."""
        if "added_tokens_decoder" in self._config:
            decoder = self._config["added_tokens_decoder"]
            for index, token in decoder.items():
                yield self._file.with_name(TOKENIZER_CONFIG), int(index), token
            return
        special = {_name(value) for value in (*self._named_values().values(), *self._extra())}
        for content, index in self._added.items():
            is_special = content in special
            flags = {"content": content, "special": is_special, "normalized": not is_special}
            yield self._file.with_name(ADDED_TOKENS), operator.index(index), flags
        if not self._is_sentencepiece:
            for token in self._described["added_tokens"]:
                yield self._file, token["id"], token

    def _add_tokens(self, backend: "tokenizers.Tokenizer", named: Mapping[str, str]) -> None:
        """Add the tokens that files name, in the order of transformers, which is that of the ids of new ones.

        Raises:
            DataError: if a token gets another id than its file gives it, or BOS or EOS is unknown.
        """
        from tokenizers import AddedToken

        try:
            declared = {index: (file, _added(token)) for file, index, token in self._declared()}
            extra = [_added(token) for token in self._extra()]
            values = [_added(value) for value in self._named_values().values()]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(
                f"the added tokens in {str(self._file.with_name(TOKENIZER_CONFIG))!r} or {ADDED_TOKENS} cannot be read "
                f"({error}); copy both again"
            ) from None
        plain = self._is_sentencepiece and self._class == _ANY and self._model.adds_prefix
        tokens = [_added(token, normalized=False) if plain else token for _, (_, token) in sorted(declared.items())]
        known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *tokens)}
        self._refuse_unknown(backend, known, named)
        for token in (*values, *extra):
            if token.content not in known:
                tokens.append(token)
                known.add(token.content)
        names = set(named.values())
        backend.add_tokens([_added(token, special=token.special or token.content in names) for token in tokens])
        if self._class == _QWEN2:
            backend.add_tokens([AddedToken(token.content, special=True) for token in (*values, *extra)])
        for index, (file, token) in declared.items():
            found = backend.token_to_id(token.content)
            if found != index:
                raise DataError(
                    f"{str(file)!r} gives the token {token.content!r} the id {index}, but its ids would follow those "
                    f"of {self._file.name}, where it gets {found}; convert the folder with the version of "
                    "transformers that wrote it"
                )

    def _refuse_unknown(self, backend: "tokenizers.Tokenizer", known: set[str], named: Mapping[str, str]) -> None:
        defaults = _DEFAULTS.get(self._class, {})
        for key in ("bos_token", "eos_token"):
            token = named.get(key)
            if token is None or token in known or token == defaults.get(key):
                continue
            if backend.token_to_id(token) is None:
                where = SPECIAL_TOKENS_MAP if key in self._special else TOKENIZER_CONFIG
                raise DataError(
                    f"{str(self._file.with_name(where))!r} names the token {token!r}, which {str(self._file)!r} does "
                    "not hold; the two files belong to different tokenizers"
                )

    def _add_ends(self, backend: "tokenizers.Tokenizer", named: Mapping[str, str]) -> None:
        """Let the tokenizer add BOS and EOS to a text if its files say so.

        A ``tokenizer.json`` says so itself, whatever ``tokenizer_config.json`` says. A ``tokenizer.model`` that is
        alone cannot say it; Meta's own code puts BOS before its texts.
        """
        if not self._is_sentencepiece and self._class != _CODE_LLAMA:
            return
        flags = self._config if self._is_sentencepiece else {}
        adds_bos = bool(flags.get("add_bos_token", self._class == _CODE_LLAMA or not self._has_config))
        bos = named.get("bos_token") if adds_bos else None
        eos = named.get("eos_token") if flags.get("add_eos_token") else None
        frame_texts(backend, [bos] if bos else [], [eos] if eos else [])


def frame_texts(backend: "tokenizers.Tokenizer", before: Iterable[str], after: Iterable[str]) -> None:
    """Let a tokenizer add these tokens before and after each text."""
    from tokenizers import processors

    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    first, last = list(before), list(after)
    special = {token: {"id": token, "ids": [backend.token_to_id(token)], "tokens": [token]} for token in first + last}
    framed = processors.TemplateProcessing(single="$A")
    # in the strings that the constructor takes, a token such as "$A" or "a:1" would mean something else
    described = {
        "type": "TemplateProcessing",
        "single": [*map(_special_piece, first), text, *map(_special_piece, last)],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
    framed.__setstate__(json.dumps(described).encode())
    backend.post_processor = framed


def _special_piece(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _merges(vocab: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make a token, in the order of transformers: by its id, the shorter part first."""
    for token in sorted(vocab, key=vocab.__getitem__):
        yield from sorted(cuts_of(token, vocab), key=lambda cut: (len(cut[0]), len(cut[1])))


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        content = json.loads(read_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {str(path)!r}: {why_unreadable(error)}; copy it again") from None
    if not isinstance(content, dict):
        raise DataError(f"{str(path)!r} is not a JSON object")
    return content


def _name(token: object) -> str:
    """Return the spelling of a token in a file; empty if it is none, such as a flag."""
    content = token.get("content") if isinstance(token, dict) else getattr(token, "content", token)
    return content if isinstance(content, str) else ""


def _added(token: Any, **changed: bool) -> "tokenizers.AddedToken":
    """Return a token of a file, or one with other flags."""
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=True)
    if isinstance(token, dict):
        flags = {key: token[key] for key in _FLAGS if key in token}
        return AddedToken(token["content"], **flags)
    return AddedToken(token.content, **({key: getattr(token, key) for key in _FLAGS} | changed))


def _state(backend: "tokenizers.Tokenizer") -> str:
    """Return the added tokens of a tokenizer as text."""
    return repr(sorted((index, repr(token)) for index, token in backend.get_added_tokens_decoder().items()))
