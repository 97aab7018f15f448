"""What a run takes from the Hugging Face Hub: found before the run is planned, and downloaded before its job begins."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from shutil import disk_usage

from llama_core.config.config_json.reading import ignored_settings
from llama_core.config.overrides import Override
from llama_core.config.run import RunConfig
from llama_core.config.settings import DataConfig, DataSource, paths_of
from llama_core.data.file_kinds.kinds import kind_of
from llama_core.data.files.splits import is_held_out
from llama_core.data.find import is_data_file
from llama_core.errors import HubError
from llama_core.hub import HubCommit, HubName, RepositoryKind, at_revision, download, folder_of, look_up
from llama_core.hugging_face.peft import ADAPTER_CONFIG, ADAPTERS
from llama_core.hugging_face.weight_files import INDEX, PICKLED, WHOLE, weight_map
from llama_core.records.checkpoints import recorded_sums
from llama_core.records.directory import RunDirectory
from llama_core.records.file_owners import own_folder
from llama_core.records.files import DAMAGE, cache_directory, no_room, read_file, user_path, write_json
from llama_core.records.hub import HubRecord, HubSource
from llama_core.runs.console import say
from llama_core.storage.copies import copy_of_run, fetch_described
from llama_core.storage.stores import is_url
from llama_core.units import counted, format_bytes

INITIAL_WEIGHTS = "training.init_from"
_VALIDATION = "data.validation"
DOCUMENTS = ("data.source", "data.sources", _VALIDATION)
"""The settings that say where documents are, themselves or in the keys within them."""


@dataclass(frozen=True)
class Source:
    """What a setting takes from a repository."""

    setting: str
    """Its dotted key."""
    snapshot: HubCommit
    files: tuple[str, ...]
    """The files, by their paths in the repository."""
    folder: Path
    """The value of the setting: the snapshot's folder, or one of links to ``files`` if others must not be in it."""

    @property
    def missing(self) -> list[str]:
        """The files that are not in the cache."""
        return self.snapshot.missing(self.files)

    @property
    def missing_bytes(self) -> int:
        """Their bytes."""
        return sum(self.snapshot.sizes[file] for file in self.missing)

    def fetch(self) -> None:
        """Download what is missing, with a bar on a terminal, else a line for each file.

        Raises:
            HubError: if it cannot be downloaded, or there is no room for it.
        """
        name = self.snapshot.name
        if missing := self.missing:
            cache = self.snapshot.folder.parents[1]
            existing = next(path for path in (cache, *cache.parents) if path.exists())
            num_bytes = self.missing_bytes
            if num_bytes > disk_usage(existing).free:
                part = f", or name a part of it, such as {name.repository}/{_some_folder(self.files)}"
                remedy = f"set HF_HOME to a folder on a larger disk{part if name.kind == 'dataset' else ''}"
                raise HubError(f"{name}: {no_room(cache, num_bytes)}; {remedy}")
            say("download", f"{counted(len(missing), 'file')} of {name}, {format_bytes(num_bytes)}, to {cache}")
            for number, file in enumerate(missing, start=1):
                download(self.snapshot, [file])
                if not say.can_redraw:
                    say("download", f"{number}/{len(missing)} {file}")
        self.link()

    def link(self) -> None:
        """Make the links of ``folder``, if it is one of links."""
        if self.folder == self.snapshot.folder:
            return
        for file in self.files:
            link = self.folder / file
            if not link.exists():  # or its file was in a cache that is gone
                link.unlink(missing_ok=True)
                link.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):  # another process has made it
                    link.symlink_to(self.snapshot.folder / file)

    @property
    def name(self) -> str:
        """Where the files come from, for people."""
        return str(self.snapshot.name)

    def record(self) -> HubSource:
        """Return what a run remembers."""
        return HubSource(self.setting, str(self.snapshot.name), self.snapshot.commit, len(self.files))


@dataclass(frozen=True)
class MirroredWeights:
    """The weights that a setting takes from a run in an object store: its newest checkpoint."""

    setting: str
    """Its dotted key."""
    name: str
    """The address of the run."""
    folder: Path
    """Where the checkpoint is in the cache, with what says what it is."""

    @property
    def missing(self) -> list[str]:
        """The files that are not in the cache."""
        return [file for file in recorded_sums(self.folder) if not (self.folder / file).exists()]

    @property
    def missing_bytes(self) -> int:
        """Their bytes."""
        sums = recorded_sums(self.folder)
        return sum(sums[file].num_bytes for file in self.missing)

    def fetch(self) -> None:
        """Copy what is missing, and compare it with its checksums.

        Raises:
            StorageError: if it cannot be copied, or is damaged.
        """
        fetch_described(self.name, partial(say, "download"))

    def link(self) -> None:
        """Do nothing: the folder holds the files themselves."""

    def record(self) -> HubSource:
        """Return what a run remembers."""
        return HubSource(self.setting, self.name, self.folder.name, len(recorded_sums(self.folder)))


@dataclass(frozen=True)
class Resolved:
    """A configuration with a folder for every name of the Hub and every address, whose files may still be missing."""

    config: RunConfig
    sources: tuple[Source | MirroredWeights, ...]
    notes: tuple[str, ...]
    """A sentence for each folder here that has the name of a repository, and for what is left out of one or ignored."""

    def waits_for(self, *settings: str) -> list[str]:
        """Return a sentence for each setting whose files are still missing, if it is one of some or within one."""
        return [
            f"{source.setting}: training first downloads {counted(len(source.missing), 'file')} of "
            f"{source.name}, {format_bytes(source.missing_bytes)}"
            for source in self.sources
            if source.missing and any(f"{source.setting}.".startswith(f"{setting}.") for setting in settings)
        ]


def resolve(config: RunConfig) -> Resolved:
    """Find what a run takes from the Hub and from mirrors. Copies at most what says what a model is, and its tokenizer.

    Raises:
        HubError, StorageError: if a name or an address stands for nothing, or nothing that can be used.
    """
    notes = list(_folders_that_win(config))
    sources: list[Source | MirroredWeights] = []
    folders: list[Override] = []
    if (name := HubName.of(config.model)) is not None:
        sources.append(_described("model", name))
        folders.append(Override("model", str(sources[-1].folder)))
    if (name := HubName.of(config.data.tokenizer)) is not None:
        sources.append(_described("data.tokenizer", name))
        folders.append(Override("data.tokenizer", str(sources[-1].folder)))
    if config.training.init_from is not None:
        sources += _of_weights(config.training.init_from)
        folders.append(Override("training.init_from", str(folder_of(config.training.init_from))))
    teacher = config.training.teacher
    if teacher is not None and is_url(teacher):
        sources.append(MirroredWeights("training.teacher", teacher, folder_of(teacher)))
        folders.append(Override("training.teacher", str(sources[-1].folder)))
    for setting, given in _data_settings(config.data):
        data = _of_data_source(setting, given, config.data.cache_dir)
        folders.append(Override(setting, data.paths))
        sources += data.sources
        notes += data.notes
    for source in sources:
        if not source.missing:
            source.link()
    resolved = config.with_overrides(*folders) if sources else config
    if config.architecture.recorded_from is None:
        notes += ignored_settings(resolved.model)
    return Resolved(resolved, tuple(sources), tuple(notes))


def fetch_weights(source: str, step: int | str | None = None, tell: Callable[[str], None] | None = None) -> Path:
    """Return the folder of weights, of adapters, or of a run; what a name or an address stands for is copied first.

    With the weights of a name comes their base.

    Args:
        source: a path, a name of the Hub, or the address of a run on a mirror.
        step: the checkpoint of a run that is asked for: of a step, one of all that there are, or the newest.
        tell: called with a line about each checkpoint of a mirror that is copied or passed over; by default, they are
            printed.

    Raises:
        HubError, StorageError: if they cannot be had.
    """
    if is_url(source):
        of_step = step if isinstance(step, int) else None
        return copy_of_run(source, tell or partial(say, "download"), of_step, every=isinstance(step, str))
    for needed in _of_weights(source):
        needed.fetch()
    return folder_of(source)


def record_sources(run: RunDirectory, resolved: Resolved) -> None:
    """Record in a run what it has from the Hub; a run that is resumed without names keeps its record."""
    if resolved.sources or resolved.notes:
        sources = tuple(source.record() for source in resolved.sources)
        write_json(run.hub, HubRecord(sources, resolved.notes))


def _folders_that_win(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each setting whose folder here has the name of what may be a repository."""
    settings: dict[str, tuple[DataSource | None, RepositoryKind]] = {
        "model": (config.model, "model"),
        INITIAL_WEIGHTS: (config.training.init_from, "model"),
        "data.tokenizer": (config.data.tokenizer, "model"),
    }
    settings |= {setting: (given, "dataset") for setting, given in _data_settings(config.data)}
    for setting, (given, kind) in settings.items():
        for value in paths_of(given or ()):
            if HubName.parse(value, kind) is None or not user_path(value).is_dir():
                continue
            if not RunDirectory(user_path(value)).config.exists():
                yield f"{setting}={value} is the folder here, not a repository of the Hub"


def _data_settings(data: DataConfig) -> Iterator[tuple[str, DataSource]]:
    """Yield each setting that says where documents are, training before held-out ones, and its value."""
    if data.source is not None:
        yield "data.source", data.source
    for name, mixed in data.sources.items():
        yield f"data.sources.{name}.path", mixed.path
    for name, held_out in data.validation_sources.items():
        yield f"{_VALIDATION}.{name}" if name else _VALIDATION, held_out


def _described(setting: str, name: HubName) -> Source:
    snapshot = look_up(name)
    files = tuple(snapshot.description)
    download(snapshot, files)
    return Source(setting, snapshot, files, snapshot.folder)


def _of_weights(init_from: str) -> Iterator[Source | MirroredWeights]:
    """Yield the repository of initial weights and, if they are adapters, that of their base; neither may be one."""
    if is_url(init_from):
        yield MirroredWeights(INITIAL_WEIGHTS, init_from, folder_of(init_from))
        return
    folder = user_path(init_from)
    if (name := HubName.of(init_from)) is not None:
        yield _weights(name)
        folder = look_up(name).folder
    base = _base_of_adapters(folder)
    if base is not None and (name := HubName.of(base)) is not None:
        yield _weights(name)


def _base_of_adapters(folder: Path) -> str | None:
    """Return what adapters call the model that they belong to; None if ``folder`` holds none, or they do not say."""
    try:
        described = json.loads(read_file(folder / ADAPTER_CONFIG))
        base = described["base_model_name_or_path"]
        return at_revision(base, described.get("revision")) if isinstance(base, str) else None
    except (OSError, *DAMAGE):  # the check of the weights says what is wrong
        return None


def _weights(name: HubName) -> Source:
    described = _described(INITIAL_WEIGHTS, name)
    snapshot = described.snapshot
    if INDEX in snapshot.sizes and WHOLE not in snapshot.sizes:
        files = sorted(set(weight_map(snapshot.folder / INDEX).values()))
    else:
        files = [file for file in (WHOLE, ADAPTERS) if file in snapshot.sizes][:1]
    lacking = [file for file in files if file not in snapshot.sizes]
    if lacking:
        raise HubError(f"{name} lacks {lacking[0]}, which its {INDEX} names; name another revision or repository")
    if not files:
        pickled = [file for file in snapshot.sizes if any(fnmatchcase(file, pattern) for pattern in PICKLED)]
        only = f", only pickled ones ({pickled[0]}), which can run code when they are read" if pickled else ""
        raise HubError(f"{name} has no weights in safetensors{only}; name another revision or repository")
    return Source(INITIAL_WEIGHTS, snapshot, (*described.files, *files), snapshot.folder)


@dataclass(frozen=True)
class _DataOfHub:
    """The paths of a source of data, some of which are of the Hub."""

    paths: tuple[str, ...]
    """Those of the source, with a folder in place of each name."""
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    """A sentence for what is left out of each data set."""


def _of_data_source(setting: str, given: DataSource, cache_dir: str | None) -> _DataOfHub:
    """Find the data sets among the paths of a source of training or held-out documents; a file is taken once."""
    is_held_out = setting.startswith(_VALIDATION)
    paths: list[str] = []
    sources: list[Source] = []
    notes: list[str] = []
    taken = set[Path]()
    for path in paths_of(given):
        name = _data_set(path)
        if name is None:
            paths.append(path)
            continue
        training, held_out = _data_files(name)
        if not is_held_out and training and held_out:
            notes.append(
                f"{name}: {counted(len(held_out), 'file')} for validation or tests, such as {held_out[0]}, left out"
            )
        files = (held_out or training) if is_held_out else (training or held_out)
        folder = look_up(name).folder
        new = [file for file in files if folder / file not in taken]
        taken.update(folder / file for file in new)
        if len(new) < len(files):
            repeated = sorted(set(files) - set(new))
            notes.append(
                f"{name}: {counted(len(repeated), 'file')} of several names, such as {repeated[0]}, taken once"
            )
        if new:
            sources.append(_of_data(setting, name, new, cache_dir))
            paths.append(str(sources[-1].folder))
    return _DataOfHub(tuple(paths), tuple(sources), tuple(notes))


def _data_set(path: str) -> HubName | None:
    name = HubName.of(path, "dataset")
    is_path = name is not None and not name.path and kind_of(Path(name.repository)) is not None  # one misspelled
    return None if is_path else name


def _data_files(name: HubName) -> tuple[list[str], list[str]]:
    """Return the files of a data set that are for training, and those that are for validation or tests."""
    files = [file for file in look_up(name).sizes if _is_data(file)]
    if not files:
        raise HubError(
            f"{name.repository} holds no file in a format that is read here; its revision refs/convert/parquet may: "
            f"{name.repository}@refs/convert/parquet"
        )
    asked = sorted(file for file in files if _is_in(file, name.path))
    if not asked:
        some = ", ".join(dict.fromkeys(_some_folder([file]) for file in files[:1000]))
        raise HubError(f"{name.repository} holds no data in {name.path!r}; it has some in {some}")
    held_out = [file for file in asked if is_held_out(file)]
    return sorted(set(asked) - set(held_out)), held_out


def _is_data(file: str) -> bool:
    is_inside = not file.startswith("/") and not any(part.startswith(".") for part in PurePosixPath(file).parts)
    return is_inside and is_data_file(Path(file))


def _is_in(file: str, path: str) -> bool:
    """Return whether a file is ``path``, in the folder ``path``, or matches the pattern ``path``; '' is everything."""
    folder = path.rstrip("/")
    return not folder or file == folder or file.startswith(f"{folder}/") or fnmatchcase(file, folder)


def _some_folder(files: Sequence[str]) -> str:
    """Return the first of some files, or its folder."""
    return files[0].rpartition("/")[0] or files[0]


def _of_data(setting: str, name: HubName, files: Sequence[str], cache_dir: str | None) -> Source:
    snapshot = look_up(name)
    digest = hashlib.sha256("\n".join(files).encode()).hexdigest()[:8]
    links = own_folder(cache_directory(cache_dir)) / "hub" / name.repository.replace("/", "--")
    return Source(setting, snapshot, tuple(files), links / f"{snapshot.commit[:12]}-{digest}")
