"""Find the files of a source, which is one or several paths: of files, of folders, or with wildcards.

What somebody names must be usable. What is only found, in a folder or by a wildcard, is left out if it is not, and
``FoundFiles.notes`` says so.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path

from llama_core.data.file_kinds.kinds import FileKind, companions, index_of, kind_of, known_kinds
from llama_core.data.files.remote import RemotePath, path_of
from llama_core.data.files.source_file import SourceFile, SourcePlace, accessing
from llama_core.data.files.splits import OF_DATASETS, is_held_out, not_of_data_sets
from llama_core.data.undivided import has_llmc_header
from llama_core.errors import DataError
from llama_core.units import counted

_MAX_NAMED = 5
"""Most files that a sentence names."""
_ABOUT_THE_DATA = ("readme", "license", "licence", "copying", "notice", "changelog", "citation")
"""Names of texts that describe a folder and are not part of what is in it."""
_IN_CACHE = ("blobs", "snapshots")
"""Where Hugging Face's cache keeps the files of a repository."""


_WITHOUT_INDEX = "of tokens without an index beside it"
"""What a file is whose documents may be anywhere."""


@dataclass(frozen=True)
class IgnoredFile:
    """A file that was found and is not read."""

    path: Path
    reason: str
    """Why, as it follows a number of files."""


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source."""

    files: tuple[SourceFile, ...]
    """Those to read, in order of the source's paths and, below each, of their own."""
    left_out: tuple[IgnoredFile, ...] = ()
    """Those that are not read."""
    repeated: tuple[Path, ...] = ()
    """Those that several of the source's paths lead to."""

    def notes(self) -> Iterator[str]:
        """Yield a sentence on files that are one document each, on files left out, and on those found repeatedly."""
        kinds = [(file.path, kind_of(file.path)) for file in self.files]
        documents = [path.name for path, kind in kinds if kind is not None and kind.is_document]
        if documents:
            yield f"{counted(len(documents), 'file')} of plain text: a file is a document"
        if self.left_out:
            yield f"left out {_described(self.left_out)}"
        if self.repeated:
            names = [path.name for path in self.repeated]
            yield f"{counted(len(names), 'file')} of several paths, taken once: {_first(names)}"


def find_files(*paths: str, held_out: bool = False) -> FoundFiles:
    """Return the files of a source: each path's own, or all files below a folder, or those that a wildcard matches.

    Files and folders whose names begin with a dot are skipped, but for those that are named. If some of the files that
    a path leads to are for validation or tests, by their paths below it, only the others are taken, or only these.

    Args:
        paths: the paths of the source.
        held_out: take those for validation or tests.

    Raises:
        DataError: if a path leads to no file, or one cannot be accessed.
    """
    taken: dict[Path, SourceFile] = {}
    left_out: list[IgnoredFile] = []
    repeated: list[Path] = []
    for source in paths:
        path = path_of(source)
        with accessing(path):
            places, found, others = _look(path, held_out=held_out)
            left_out += others
            for file in found:
                if file in taken:
                    repeated.append(file)
                else:
                    taken[file] = _as_found(file, places)
    return FoundFiles(tuple(taken.values()), tuple(left_out), tuple(repeated))


def is_data_file(file: Path) -> bool:
    """Return whether a file that is found in a folder is one of its data, by its name."""
    return not file.name.startswith(".") and not _why_not_by_name(file, kind_of(file))


def _look(path: Path, *, held_out: bool) -> tuple[Mapping[Path, SourcePlace], list[Path], list[IgnoredFile]]:
    """Return where the files of one path are, unless it is that of a file; the files; and what is left out."""
    folder = path
    if path.is_dir():
        found = sorted(_walk(path))
        where = f"folder {str(path)!r} holds"
    elif path.exists():
        kind = kind_of(path)
        if kind is None:
            raise DataError(f"data source {str(path)!r} is of an unknown kind; use a {known_kinds()}")
        if why := _only_local(path, kind):
            raise DataError(f"data source {str(path)!r} is {why}; copy it to this machine")
        if _lacks_index(path, kind) and not kind.may_lack_index:
            raise DataError(f"data source {str(path)!r} is {_WITHOUT_INDEX}: {index_of(path)} does not exist")
        return {}, [path], []
    elif has_magic(str(path)):
        folder, pattern = _divided(path)
        found = sorted(_matches(folder, pattern))
        where = f"data source {str(path)!r} matches"
    else:
        raise DataError(
            f"data source {str(path)!r} does not exist; "
            f"use 'sample', or the path of a {known_kinds()}, or of a folder of them"
        )
    belonging = {other for file in found for other in companions(file)}
    found = [file for file in found if file not in belonging]
    places: dict[Path, SourcePlace] = {}
    own = Path(os.path.realpath(folder))
    left_out = [IgnoredFile(file, reason) for file in found if (reason := _why_not(file, folder, own, places))]
    files = _without(found, left_out)
    left_out += [IgnoredFile(file, reason) for file, reason in not_of_data_sets(files, folder)]
    files = _without(files, left_out)
    if not files:
        only = f"; left out {_described(left_out)}" if left_out else ""
        raise DataError(f"{where} no {known_kinds()}{only}")
    not_asked = _of_other_splits(files, folder, held_out=held_out)
    return places, _without(files, not_asked), [*left_out, *not_asked]


def _without(files: Sequence[Path], left_out: Sequence[IgnoredFile]) -> list[Path]:
    others = {one.path for one in left_out}
    return [file for file in files if file not in others]


def _of_other_splits(files: Sequence[Path], folder: Path, *, held_out: bool) -> list[IgnoredFile]:
    """Return the files below a folder that are for the other purpose; none if all are for one."""
    for_training = [file for file in files if not is_held_out(str(file.relative_to(folder)))]
    for_others = [file for file in files if is_held_out(str(file.relative_to(folder)))]
    if not (for_training and for_others):
        return []
    if held_out:
        return [IgnoredFile(file, "for training") for file in for_training]
    return [IgnoredFile(file, "for validation or tests") for file in for_others]


def _why_not(file: Path, folder: Path, own: Path, places: dict[Path, SourcePlace]) -> str:
    """Return why a file that was found below a folder is not read; empty if it is: then ``places`` gets its own.

    ``own`` is the folder without links.
    """
    kind = kind_of(file)
    if kind is None:
        return "of an unknown kind"
    why = _why_not_by_name(file, kind) or _only_local(file, kind)
    if not why and _lacks_index(file, kind) and not (kind.may_lack_index and file.is_file() and has_llmc_header(file)):
        why = _WITHOUT_INDEX  # others also write .bin, such as weights of a model
    if why or isinstance(file, RemotePath):
        return why
    index = None if kind.index is None else kind.index(file)
    for part in [file] if index is None or not index.exists() else [file, index]:
        place = _place(part, folder, own, is_of_records=kind.holds_records)
        if place is None:
            return "behind a link out of the folder"
        places[part] = place
    return ""


def _why_not_by_name(file: Path, kind: FileKind | None) -> str:
    if kind is None:
        return "of an unknown kind"
    is_about = kind.is_document and file.name.partition(".")[0].lower() in _ABOUT_THE_DATA
    return "about the others" if is_about or file.name in OF_DATASETS else ""


def _only_local(file: Path, kind: FileKind) -> str:
    """Return what a file elsewhere is that cannot be read from there; empty if it can."""
    is_mapped = kind.is_mapped and isinstance(file, RemotePath)
    return "of tokens that are read from local disks only" if is_mapped else ""


def _lacks_index(file: Path, kind: FileKind) -> bool:
    """Return whether the files of a kind have an index, and this one has none."""
    return kind.index is not None and not kind.index(file).exists()


def _place(file: Path, folder: Path, own: Path, *, is_of_records: bool) -> SourcePlace | None:
    """Return where a file of a folder is; None if who made the folder may not give it to others.

    It is below the folder wherever links lead, or in a data set of Hugging Face's cache. A file of records may also be
    elsewhere, if whoever made the links owns it, or has made them for themselves. But any file is a text, and the ids
    of one: even links of one's own, which an archive may have held, could put a private file into the model.
    """
    target = Path(os.path.realpath(file))  # followed once: somebody could change a link meanwhile
    root = own if target.is_relative_to(own) else _in_cache(target)
    if root is not None:
        return SourcePlace(target, root)
    if not is_of_records:
        return None
    ways = (file, *file.parents[: len(file.relative_to(folder).parts) - 1])
    owners = {way.lstat().st_uid for way in ways if way.is_symlink()}
    is_given = owners <= {os.geteuid(), 0} or owners == {target.lstat().st_uid}
    return SourcePlace(target, target.parent) if is_given else None


def _in_cache(target: Path) -> Path | None:
    """Return the folder of a data set in Hugging Face's cache that a file is in; None if it is in none."""
    folders = (one for one in target.parents if one.name in _IN_CACHE and one.parent.name.startswith("datasets--"))
    return next(folders, None)


def _as_found(path: Path, places: Mapping[Path, SourcePlace]) -> SourceFile:
    place = places.get(path)
    if place is not None:
        found = place.file.lstat()
    else:
        found = path.as_listed() if isinstance(path, RemotePath) else path.stat()
    if not stat.S_ISREG(found.st_mode):  # such as a pipe, where reading would wait
        raise DataError(f"{path} is not a regular file; write the data into a file")
    index = index_of(path)
    index_file = None if index is None or not index.exists() else _as_found(index, places)
    return SourceFile(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, index_file, place)


def _divided(path: Path) -> tuple[Path, str]:
    """Return the folder before the wildcards of a path, and the pattern from them on."""
    first = next(place for place, part in enumerate(path.parts) if has_magic(part))
    return type(path)(*path.parts[:first]), "/".join(path.parts[first:])


def _matches(folder: Path, pattern: str) -> set[Path]:
    """Return the files below a folder that a pattern matches, and those below the folders that it matches."""
    try:
        matched = set(folder.glob(pattern))
    except ValueError as error:
        raise DataError(f"data source {str(folder / pattern)!r} is not a pattern: {error}") from None
    found = set[Path]()
    for path in matched:
        if not any(part.startswith(".") for part in path.relative_to(folder).parts):
            found.update(_walk(path) if path.is_dir() else [path])
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder; no link to a folder is followed."""
    if isinstance(folder, RemotePath):
        yield from folder.files()
        return

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(parent, name)


def _described(left_out: Sequence[IgnoredFile]) -> str:
    """Return files that are left out by the reason, each with the first names."""
    by_reason: dict[str, list[str]] = {}
    for one in left_out:
        by_reason.setdefault(one.reason, []).append(one.path.name)
    return ", ".join(f"{counted(len(names), 'file')} {reason} ({_first(names)})" for reason, names in by_reason.items())


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
