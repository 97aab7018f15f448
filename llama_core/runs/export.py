"""Export a run's weights to a Hugging Face folder, or its adapters to a PEFT folder, on a machine without GPUs."""

import fcntl
import glob
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from llama_core.config.config_json.writing import config_json, without_unstated_modules
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER, DataConfig
from llama_core.data.byte_level import write_byte_tokenizer
from llama_core.data.end_tokens import end_of_learnt_turn, learnt_template, trains_on_conversations
from llama_core.data.statistics import refuse_other_digest
from llama_core.data.tokenizer import (
    BYTES,
    HuggingFaceTokenizer,
    Tokenizer,
    difference,
    load_tokenizer,
    tokenizer_file,
)
from llama_core.data.tokenizers.files import SENTENCEPIECE, TOKENIZER_CONFIG
from llama_core.errors import CheckpointError, DataError, EnvironmentMismatchError, WeightsError
from llama_core.hub import CHAT_TEMPLATES, repository_in_cache
from llama_core.hugging_face.bases import refuse_other_base_of, refuse_unfit_base
from llama_core.hugging_face.generation_config import GENERATION_CONFIG, end_tokens, generation_config, with_ends
from llama_core.hugging_face.peft import ADAPTER_CONFIG, ADAPTERS, adapter_json
from llama_core.hugging_face.pretrained import Origin, check_pretrained, origin_of, refuse_own_head
from llama_core.imports import importing_torch
from llama_core.records.directory import RunDirectory
from llama_core.records.files import open_file, own_file, read_file, user_path
from llama_core.runs.checkpoints import Best
from llama_core.runs.export_source import ExportSource, find_export_source
from llama_core.runs.model_card import CARD, model_card

CHAT_TEMPLATE = "chat_template.jinja"
"""File of a tokenizer's template, which takes precedence over one in ``tokenizer_config.json``."""
_WITH_TOKENIZER = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that may accompany a ``tokenizer.json``."""
_NAMED = ("bos_token", "eos_token", "unk_token")
"""Special tokens of a ``tokenizer.model``."""
_WRITING = ".writing"
_ABANDONED_AFTER_SECONDS = 60
"""Age from which an unlocked folder is known to be left over, and not one that is about to be locked."""


def export_run(
    run: RunDirectory,
    out: Path,
    *,
    step: int | Best | None = None,
    average: str | None = None,
    dtype: str = "fp32",
    merged: bool = False,
    licence: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write a checkpoint's weights, or the mean of several, and the tokenizer for transformers or PEFT; return ``out``.

    A run that trains nothing but adapters becomes a PEFT folder, unless ``merged`` is set. Adapters of other runs are
    always merged. The folder appears only when it is complete. At most one weight is in memory at a time.

    Args:
        run: a run that trains a full model or adapters, under any plan.
        out: a folder that does not exist or is empty.
        step: step of the checkpoint, or ``best`` for the one with the lowest held-out loss; by default the newest
            intact one.
        average: checkpoints to average in fp32, in place of ``step``: the newest, as in ``last:5``, or those of steps,
            as in ``1000,1200,1400``. Of adapters, each factor is averaged, and merged after that.
        dtype: one of ``config_json.writing.DTYPES``; training keeps its weights in fp32.
        merged: add the adapters to the weights that the run started from, and write a full model.
        licence: that of the weights, for their model card; None to leave it open.
        tell: called with a line for each thing written or left out.

    Raises:
        RunDirectoryError: if there is no such run or checkpoint.
        ConfigError: if ``average`` says neither, or comes with ``step``.
        WeightsError: if ``out`` is not empty, the checkpoint holds neither a full model nor adapters, there is nothing
            to merge, a weight to average is not finite, or the base of adapters has been replaced.
        CheckpointError: if the weights are damaged or cannot be read, or ``out`` cannot be written.
    """
    export = find_export_source(run, step=step, average=average, dtype=dtype, merged=merged, tell=tell)
    refuse_export(export, out)
    return write_export(export, out, licence=licence, tell=tell)


def write_export(
    export: ExportSource,
    out: Path,
    *,
    licence: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write what ``find_export_source`` has found and ``refuse_export`` has let pass; see ``export_run``."""
    config = export.config
    checkpoint = export.newest
    others = export.others
    dtype = export.dtype
    names = ", ".join(path.name for path in others)
    tell(f"{f'the mean of {names} and ' if others else ''}{checkpoint} in {dtype}")
    try:
        with staging_folder(out.absolute()) as writing:
            tokenizer = _own_tokenizer(export.run, config, tell)
            generation = generation_config(checkpoint)
            if tokenizer is not None:
                _write_tokenizer(tokenizer, config.data, writing, tell)
                _write_chat_template(checkpoint, config, tokenizer, writing, tell)
                generation = _with_every_end(generation, checkpoint, config, tokenizer, tell)
            if export.is_adapter:
                if tokenizer is not None:
                    _write_ends_for_adapters(checkpoint, writing, generation, tokenizer, tell)
                _write_adapters(checkpoint, others, config, writing, dtype=dtype, tell=tell)
            else:
                _write_json(writing / GENERATION_CONFIG, generation)
                _write_model(checkpoint, others, config, writing, dtype=dtype, generation=generation, tell=tell)
            if tokenizer is not None:
                _tell_other_ids(tokenizer, config.data, writing, tell)
            (writing / CARD).write_text(model_card(export, licence), encoding="utf-8")
            refuse_files_in(out)  # another export may have come first
            writing.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}; nothing is left there") from None
    return out


@contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder, which is removed at the end unless it has been renamed; remove what killed exports left."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*{_WRITING}"):
        with suppress(OSError):  # another export holds the lock
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                with only_one(left):
                    shutil.rmtree(left)
    writing = out.with_name(f".{out.name}.{uuid4().hex}{_WRITING}")
    writing.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, writing, ignore_errors=True)
        with suppress(OSError):  # a network file system may lock no folders, and then nobody removes any
            stack.enter_context(only_one(writing))
        yield writing


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a folder for the block.

    Raises:
        OSError: if another process has locked it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def refuse_export(export: ExportSource, out: Path) -> None:
    """Refuse what cannot be exported, or not to ``out``.

    Raises:
        ConfigError, WeightsError, CheckpointError: as ``export_run``.
    """
    checkpoint = export.newest
    spec = export.config.spec
    if not export.is_adapter:
        config_json(without_unstated_modules(spec))
    if spec.lora is not None:
        origin = origin_of(checkpoint)
        if not export.is_adapter or spec.lora.take_principal_part:
            check_pretrained(spec, checkpoint)
            refuse_unfit_base(checkpoint)
            refuse_own_head(spec, origin)
        elif origin.base is not None and origin.base.exists():  # adapters alone can be taken from where it is not
            refuse_other_base_of(origin)
    refuse_files_in(out)


def refuse_files_in(out: Path) -> None:
    """Refuse to write to anything but a new or an empty folder.

    Raises:
        WeightsError: if it is something else.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(f"{out} exists and is not an empty folder; choose another --out")


def _write_model(
    checkpoint: Path,
    others: Sequence[Path],
    config: RunConfig,
    folder: Path,
    *,
    dtype: str,
    generation: dict[str, Any],
    tell: Callable[[str], None],
) -> None:
    with importing_torch():
        from llama_core.training.stored_weights import write_hugging_face

    if config.spec.lora is not None:
        tell(f"adapters added to {_base(origin_of(checkpoint), config)}")
    spec = without_unstated_modules(config.spec)
    if spec.mtp_layers < config.spec.mtp_layers:
        tell(f"the modules of mtp_layers={config.spec.mtp_layers} are left out: {spec.model_type.name} has none")
    ends = generation.get("eos_token_id")
    _write_json(folder / "config.json", config_json(spec, dtype, bos_id=generation.get("bos_token_id"), eos_id=ends))
    write_hugging_face(checkpoint, spec, folder, dtype=dtype, others=others, on_file=lambda name: tell(f"wrote {name}"))


def _write_adapters(
    checkpoint: Path,
    others: Sequence[Path],
    config: RunConfig,
    folder: Path,
    *,
    dtype: str,
    tell: Callable[[str], None],
) -> None:
    with importing_torch():
        from llama_core.training.stored_weights import write_adapters

    origin = origin_of(checkpoint)
    tell(f"adapters over {_base(origin, config)}")
    _write_json(
        folder / ADAPTER_CONFIG, adapter_json(config.spec.named_lora or config.lora, str(origin.base or config.model))
    )
    write_adapters(checkpoint, config.spec, folder, dtype=dtype, others=others)
    tell(f"wrote {ADAPTERS}")
    if origin.base is not None and repository_in_cache(origin.base) is None:
        tell(
            f"base_model_name_or_path in {ADAPTER_CONFIG} is that folder; for others, write the repository of the base"
        )


def _base(origin: Origin, config: RunConfig) -> str:
    """Return a name for the base weights of a checkpoint's adapters."""
    if origin.drawn_by is not None:
        return f"{config.model} as seed {origin.drawn_by.training.seed} draws it, which is in no file"
    return str(origin.base)


def _own_tokenizer(run: RunDirectory, config: RunConfig, tell: Callable[[str], None]) -> Tokenizer | None:
    """Return the run's tokenizer; None if it has none that can be read, or that has changed since."""
    data = config.data
    if data.source == DATALOADER:
        tell("no tokenizer: the run trained on a dataloader; add the tokenizer that made its tokens")
        return None
    try:
        tokenizer = load_tokenizer(data.tokenizer, adds_bos=data.add_bos_token)
        if isinstance(tokenizer, HuggingFaceTokenizer):
            tokenizer.fit(config.spec.vocab_size)
        refuse_other_digest(run, "tokenizer", tokenizer.name, tokenizer.fingerprint)
        return tokenizer
    except DataError as error:
        tell(f"no tokenizer: {error}")
        return None


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of EOS and, if there is one, of BOS, by the names of their tokens in files."""
    return {"eos_token": tokenizer.eos_id} | ({} if tokenizer.bos_id is None else {"bos_token": tokenizer.bos_id})


def _write_tokenizer(tokenizer: Tokenizer, data: DataConfig, folder: Path, tell: Callable[[str], None]) -> None:
    """Copy the run's tokenizer to ``folder``."""
    if data.tokenizer == BYTES:
        try:
            write_byte_tokenizer(folder, adds_bos=data.add_bos_token is not False)
        except EnvironmentMismatchError as error:
            tell(f"no tokenizer: {error}")
        return
    file = tokenizer_file(user_path(data.tokenizer))
    is_sentencepiece = file.suffix == SENTENCEPIECE.suffix
    if not _copy(file, folder / (SENTENCEPIECE if is_sentencepiece else "tokenizer.json"), tell):
        return
    for companion in (file.with_name(name) for name in _WITH_TOKENIZER if not (folder / name).exists()):
        if companion.exists():
            _copy(companion, folder / companion.name, tell)
    _copy_other_templates(file.with_name(CHAT_TEMPLATES), folder / CHAT_TEMPLATES, tell)
    if not is_sentencepiece and not (folder / TOKENIZER_CONFIG).exists():
        names = {token["id"]: token["content"] for token in json.loads(read_file(file))["added_tokens"]}
        tokens = {name: names[index] for name, index in _special_ids(tokenizer).items() if index in names}
        _write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _write_bos(tokenizer, folder, is_forced=data.add_bos_token is not None)


def _copy_other_templates(folder: Path, to: Path, tell: Callable[[str], None]) -> None:
    """Copy the templates that a tokenizer has beside its default one."""
    if folder.is_symlink():
        tell(f"left out {folder.name}: it is a link; copy it there if it belongs to the tokenizer")
        return
    for template in sorted(folder.glob("*.jinja")):
        to.mkdir(exist_ok=True)
        _copy(template, to / template.name, tell)


def _write_bos(tokenizer: HuggingFaceTokenizer, folder: Path, *, is_forced: bool) -> None:
    """Let the tokenizer in ``folder`` begin a text as the run's, where its own files do not say so."""
    described = folder / "tokenizer.json"
    config = folder / TOKENIZER_CONFIG
    if described.exists() and is_forced:
        content = json.loads(described.read_bytes())
        described.write_text(json.dumps(content | {"post_processor": tokenizer.post_processor}, ensure_ascii=False))
    elif not described.exists() and (is_forced or not config.exists()):
        named = {name: tokenizer.named_tokens[name] for name in _NAMED if name in tokenizer.named_tokens}
        usual = {"tokenizer_class": "PreTrainedTokenizerFast"} | named
        said = json.loads(config.read_bytes()) if config.exists() else usual
        _write_json(config, said | {"add_bos_token": tokenizer.bos_id in tokenizer.before})


def _with_every_end(
    generation: dict[str, Any], checkpoint: Path, config: RunConfig, tokenizer: Tokenizer, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Return how the exported model generates, with every token that ends a text or a turn."""
    ends = [tokenizer.eos_id]
    if tokenizer.bos_id is not None:
        generation = {"bos_token_id": tokenizer.bos_id} | generation
    try:
        learnt = end_of_learnt_turn(checkpoint, config, tokenizer)
    except DataError as error:
        tell(f"no end of a turn: {error}")
        learnt = frozenset()
    for end in learnt:
        if len(end) == 1:
            ends += end
        else:
            tell(
                f"a turn ends with {len(end)} tokens {list(end)}, which {GENERATION_CONFIG} cannot name; "
                "give their text to the server as a stop string"
            )
    return with_ends(generation, ends)


def _tell_other_ids(tokenizer: Tokenizer, data: DataConfig, folder: Path, tell: Callable[[str], None]) -> None:
    """Tell of a tokenizer that gives other ids in its new folder: beside another ``config.json``, or without a file."""
    if data.tokenizer == BYTES or not has_tokenizer(folder):
        return
    try:
        here = load_tokenizer(str(folder))
        found = "a text begins otherwise" if here.before != tokenizer.before else ""
        if not found and data.add_bos_token is None:
            found = difference(here, tokenizer)
    except DataError as error:
        found = str(error)
    if found:
        tell(f"the tokenizer is another here than in {data.tokenizer}: {found}; check tokenizer_config.json")


def has_tokenizer(folder: Path) -> bool:
    """Return whether an export has a tokenizer."""
    return any((folder / name).exists() for name in ("tokenizer.json", SENTENCEPIECE))


def _write_ends_for_adapters(
    checkpoint: Path, folder: Path, generation: dict[str, Any], tokenizer: Tokenizer, tell: Callable[[str], None]
) -> None:
    """Write the ends of an adapters' model, if there are any that neither its base nor its tokenizer names."""
    known = {*end_tokens(generation_config(checkpoint)), *_special_ids(tokenizer).values()}
    more = [end for end in end_tokens(generation) if end not in known]
    if more:
        _write_json(folder / GENERATION_CONFIG, generation)
        tell(
            f"a turn ends with token {', '.join(map(str, more))}, which {GENERATION_CONFIG} of the base does not name; "
            "name it to a server that reads that one"
        )


def _write_chat_template(
    checkpoint: Path, config: RunConfig, tokenizer: Tokenizer, folder: Path, tell: Callable[[str], None]
) -> None:
    """Give the tokenizer in ``folder`` the template of the run's conversations, if it comes with none or another.

    Templates for other purposes go with the one that they came with: they would not be what the run has learnt.
    """
    if not has_tokenizer(folder):
        return
    if not trains_on_conversations(checkpoint):
        return
    template = learnt_template(checkpoint, config, tokenizer)
    if tokenizer.chat_template is None or tokenizer.chat_template.template != template.source:
        (folder / CHAT_TEMPLATE).write_text(template.source)
        if others := _other_templates(folder):
            names = ", ".join(others)
            tell(f"left out the tokenizer's templates {names}: the run was trained with {template.name} alone")
        shutil.rmtree(folder / CHAT_TEMPLATES, ignore_errors=True)
        _drop_template_of_config(folder)


def _drop_template_of_config(folder: Path) -> None:
    """Take the template out of ``tokenizer_config.json``: llama.cpp's converter prefers it to the file of its own."""
    file = folder / TOKENIZER_CONFIG
    if file.exists():
        settings = json.loads(read_file(file))
        if settings.pop("chat_template", None) is not None:
            _write_json(file, settings)


def _other_templates(folder: Path) -> list[str]:
    """Return the names of the templates that a tokenizer has beside its default one."""
    names = {file.stem for file in (folder / CHAT_TEMPLATES).glob("*.jinja")}
    file = folder / TOKENIZER_CONFIG
    configured = json.loads(read_file(file)).get("chat_template") if file.exists() else None
    if isinstance(configured, list):  # transformers 4 wrote them all there
        names |= {str(entry.get("name")) for entry in configured if isinstance(entry, dict)}
    return sorted(names - {"default"})


def _copy(file: Path, to: Path, tell: Callable[[str], None]) -> bool:
    """Copy a file of a tokenizer, and return whether it is one of the tokenizer's own."""
    try:
        own = own_file(file)
        source = open_file(own, own.parent)
    except OSError as error:
        tell(f"left out {file.name}: {error.strerror}; copy it there if it belongs to the tokenizer")
        return False
    with source, to.open("xb") as target:
        shutil.copyfileobj(source, target)
    return True


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
