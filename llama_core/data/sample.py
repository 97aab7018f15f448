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
                    module = path.relative_to(library).as_posix()
                    lines.write(json.dumps({"module": module, TEXT_FIELD: text}) + "\n")
    return sample


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
