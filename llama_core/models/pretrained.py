"""Weights to begin with, looked at without torch: a Hugging Face folder, or a checkpoint of a run."""

from dataclasses import asdict
from pathlib import Path

from llama_core.config.hugging_face import read_folder
from llama_core.config.models import ModelSpec, RopeScaling
from llama_core.config.run import RunConfig
from llama_core.errors import CheckpointError, WeightsError
from llama_core.models.hf import check_weights, hugging_face_name, parameter_shapes
from llama_core.models.weight_files import FLOAT_BYTES, StoredTensor, read_tensors
from llama_core.records.checkpoints import LAYOUT, STATE, complete_state, newest_checkpoint
from llama_core.records.directory import RunDirectory

_CONFIG = "config.yaml"
_FIXED = ("num_heads", "tied_embeddings")
"""What shapes do not show, and no training gets over."""
_MOVABLE = ("rope_theta", "rope_scaling", "norm_eps")
"""What shapes do not show either, but may be meant to differ, as for longer sequences."""


def resolve_pretrained(path: str) -> str:
    """Return ``path`` as seen from anywhere; of a run's directory, its newest complete checkpoint.

    So a run's configuration says which weights it began with, even when the other run goes on.
    """
    absolute = Path(path).expanduser().absolute()
    return str(newest_checkpoint(RunDirectory(absolute)) or absolute)


def check_pretrained(spec: ModelSpec, source: Path) -> list[str]:
    """Refuse weights that ``spec`` cannot begin with; of a Hugging Face folder only the files' headers are read.

    Args:
        spec: the model.
        source: a path that ``resolve_pretrained`` returned.

    Returns:
        What the weights were made for and ``spec`` has otherwise, a sentence each: another rotary embedding, say.

    Raises:
        WeightsError: if they are not there, not complete, or another model's.
        ConfigError: if the folder's ``config.json`` is not that of a Llama.
    """
    if not is_checkpoint(source):
        hugging_face_weights(spec, source)
        return _moved(spec, _model_of(source), source)
    try:
        complete_state(source)
    except CheckpointError as error:
        raise WeightsError(f"{source} is damaged ({error}); choose another checkpoint of its run") from None
    theirs = full_model(source)
    _check_fixed(spec, theirs, source)
    shapes = {hugging_face_name(name): shape for name, shape in parameter_shapes(theirs).items()}
    check_weights(spec, shapes, source=str(source))
    return _moved(spec, theirs, source)


def is_checkpoint(source: Path) -> bool:
    """Return whether ``source`` is a checkpoint of a run, rather than a Hugging Face folder."""
    return (source / STATE).exists()


def hugging_face_weights(spec: ModelSpec, folder: Path) -> dict[str, StoredTensor]:
    """Return where each weight of ``spec`` is in a Hugging Face folder, by our names.

    Raises:
        WeightsError: as ``check_pretrained``.
    """
    if not folder.is_dir():
        problem = "is a file; name its folder" if folder.exists() else "does not exist; name a folder on this disk"
        raise WeightsError(f"training.init_from={str(folder)!r} {problem}")
    if (folder / _CONFIG).exists():
        raise WeightsError(f"the run in {folder} has no complete checkpoint yet; let it save one")
    tensors = read_tensors(folder)
    _check_fixed(spec, _model_of(folder), folder)
    check_weights(spec, {name: tensor.shape for name, tensor in tensors.items()}, source=str(folder))
    stored = {name: tensors[hugging_face_name(name)] for name in parameter_shapes(spec)}
    for tensor in stored.values():
        if tensor.dtype not in FLOAT_BYTES:
            raise WeightsError(
                f"{tensor.file} holds weights in {tensor.dtype}; dequantise them to one of {', '.join(FLOAT_BYTES)}"
            )
    return stored


def full_model(checkpoint: Path) -> ModelSpec:
    """Return the model whose weights a checkpoint holds, every one of them.

    Raises:
        WeightsError: if it holds adapters or experts, or DeepSpeed wrote it.
    """
    if (checkpoint / LAYOUT).exists():
        raise WeightsError(
            f"{checkpoint} was written by DeepSpeed, whose checkpoints nothing else reads; train with "
            "parallel.zero_backend=native to take the weights elsewhere"
        )
    config = RunConfig.load(checkpoint / _CONFIG)
    if config.strategy != "standard":
        raise WeightsError(
            f"{checkpoint} was trained with strategy={config.strategy}; only full models (strategy=standard) are read"
        )
    return config.spec


def _model_of(folder: Path) -> ModelSpec | None:
    """Return the model that a folder's ``config.json`` describes, or None if it has none."""
    return read_folder(str(folder)) if (folder / "config.json").exists() else None


def _check_fixed(spec: ModelSpec, theirs: ModelSpec | None, source: Path) -> None:
    for trait in _FIXED if theirs else ():
        ours, given = getattr(spec, trait), getattr(theirs, trait)
        if ours != given:
            raise WeightsError(
                f"the weights in {source} are not those of {spec.name}: {trait}={given} instead of {ours}; "
                "choose the model they were made for"
            )


def _moved(spec: ModelSpec, theirs: ModelSpec | None, source: Path) -> list[str]:
    different = [trait for trait in _MOVABLE if theirs and getattr(theirs, trait) != getattr(spec, trait)]
    return [
        f"architecture.{trait} is {_said(getattr(spec, trait))}, but {source} was made for "
        f"{_said(getattr(theirs, trait))}; leave it if that is meant"
        for trait in different
    ]


def _said(value: float | RopeScaling | None) -> str:
    if value is None:
        return "none"
    return (
        f"{value:g}" if isinstance(value, float) else " ".join(f"{key}={part}" for key, part in asdict(value).items())
    )
