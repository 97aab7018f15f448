"""The built-in sample: real text that every machine has, made from Python's standard library."""

import hashlib
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from llama_core.errors import DataError
from llama_core.records.files import atomic_write

TEXT_FIELD = "text"

SAMPLE_VOCABULARY = 2048
"""Tokens of the sample's tokenizer."""
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3's tokenizer splits text before it merges bytes."""
_BOS = "<|begin_of_text|>"

# Installed packages, tests, bundled applications, and the generated tables of encodings.
_LEFT_OUT = frozenset(
    {
        "__phello__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def sample_file(directory: Path, standard_library: Path | None = None) -> Path:
    """Return a .jsonl file of Python's standard library, writing it into ``directory`` the first time.

    It has one document per module, its source with its docstrings, in order of the modules' paths: about ten megabytes
    of code and prose. Another version of Python gives another file.

    Args:
        directory: where the file is kept.
        standard_library: the folder to read; default: the running Python's.

    Raises:
        DataError: if this Python lacks the source of its standard library.
        OSError: if the file cannot be written.
    """
    library = standard_library or Path(sysconfig.get_path("stdlib"))
    modules = sorted(_modules(library))
    if not modules:
        raise DataError(f"no module source in {str(library)!r} to make the sample from; give your own data.source")
    listing = "\n".join(f"{path.relative_to(library).as_posix()} {path.stat().st_size}" for path in modules)
    digest = hashlib.sha256(listing.encode()).hexdigest()[:8]
    sample = directory / f"sample-python-{platform.python_version()}-{digest}.jsonl"
    if not sample.exists():
        # another node may make it too, and read it already
        with atomic_write(sample, replaces=False) as temporary, temporary.open("w", encoding="utf-8") as lines:
            for path in modules:
                text = _source(path)
                if text.strip():
                    lines.write(json.dumps({TEXT_FIELD: text}) + "\n")
    return sample


def sample_tokenizer(directory: Path) -> Path:
    """Return the ``tokenizer.json`` of a byte-level BPE trained on the sample, training it the first time.

    It splits text as Llama 3's tokenizer does, has the names of its special tokens, and begins a text with BOS.

    Args:
        directory: where the sample and the tokenizer are kept.

    Raises:
        DataError: if this Python lacks the source of its standard library.
        OSError: if a file cannot be written.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    sample = sample_file(directory)
    file = sample.with_name(f"{sample.stem}-bpe-{SAMPLE_VOCABULARY}-bos.json")
    if not file.exists():
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=SAMPLE_VOCABULARY,
            special_tokens=[_BOS, "<|end_of_text|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with sample.open(encoding="utf-8") as lines:
            tokenizer.train_from_iterator((json.loads(line)[TEXT_FIELD] for line in lines), trainer)
        special = [(_BOS, tokenizer.token_to_id(_BOS))]
        tokenizer.post_processor = processors.TemplateProcessing(f"{_BOS} $A", special_tokens=special)
        with atomic_write(file, replaces=False) as temporary:
            tokenizer.save(str(temporary))
    return file


def _modules(library: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def _source(path: Path) -> str:
    """Return a module's source, or an empty string if its encoding is invalid."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
