"""Which files of a source share a shard.

A large file is a shard by itself. Small files are grouped in the order of their paths. Which of them ends its group
follows from its own name and size, so another file changes the one group that it falls into and no other.
"""

import hashlib
from collections.abc import Sequence

from llama_core.data.files.source_file import SourceFile
from llama_core.units import MIB

ALONE_BYTES = 16 * MIB
"""Bytes from which a file is a shard by itself."""
SHARED_BYTES = 64 * MIB
"""Mean bytes of a group of small files."""


def grouped(files: Sequence[SourceFile]) -> list[tuple[SourceFile, ...]]:
    """Return the files of each shard of a source."""
    groups: list[tuple[SourceFile, ...]] = []
    group: list[SourceFile] = []
    for file in sorted(files, key=lambda file: str(file.path)):
        if file.num_bytes >= ALONE_BYTES:
            groups.append((file,))
            continue
        group.append(file)
        if _ends_its_group(file):
            groups.append(tuple(group))
            group = []
    if group:
        groups.append(tuple(group))
    return groups


def _ends_its_group(file: SourceFile) -> bool:
    """Return whether a group ends after a file: by chance, drawn from its name, in proportion to its size."""
    drawn = hashlib.sha256(f"{file.path.name} {file.num_bytes}".encode(errors="surrogateescape")).digest()
    return int.from_bytes(drawn[:8]) * SHARED_BYTES < file.num_bytes * 2**64
