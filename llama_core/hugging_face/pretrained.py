"""Initial weights, inspected without torch: a Hugging Face or PEFT folder, or a checkpoint of a run."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import TypeVar

from llama_core.config.config_json.reading import read_folder
from llama_core.config.model_weights import SHOWN_BY_NAMES, hugging_face_name
from llama_core.config.models import ModelSpec
from llama_core.config.rope import RopeScaling
from llama_core.config.run import RunConfig
from llama_core.errors import CheckpointError, WeightsError
from llama_core.hub import folder_of
from llama_core.hugging_face.block_fp8 import join_block_fp8
from llama_core.hugging_face.mxfp4 import Mxfp4Tensor, join_mxfp4
from llama_core.hugging_face.nf4 import Nf4Tensor, join_nf4
from llama_core.hugging_face.peft import (
    ADAPTERS,
    adapter_weights,
    base_of,
    check_same_adapters,
    is_adapter_folder,
    peft_name,
)
from llama_core.hugging_face.weight_files import (
    FLOAT_BYTES,
    QuantisedTensor,
    StoredTensor,
    holds_same_numbers,
    per_expert,
    read_tensors,
)
from llama_core.hugging_face.weight_names import (
    HEAD,
    check_weights,
    dense_name,
    hugging_face_names,
    hugging_face_shapes,
)
from llama_core.records.checkpoints import (
    LAYOUT,
    STATE,
    complete_state,
    find_problem,
    newest_checkpoint,
    newest_intact_checkpoint,
    place_of,
)
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json

_Tensor = TypeVar("_Tensor")
_CONFIG = "config.yaml"
_EMBEDDING = "model.embed_tokens.weight"
_FIXED = ("num_heads", "tied_embeddings")
"""Traits that shapes do not show, and that training cannot make up for."""
_SHOWN_BY_WEIGHTS = (
    *("hidden_size", "num_layers", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"),
    *("qk_norm", "qk_norm_width", "norms", "rope_dim", "value_dim", *SHOWN_BY_NAMES),
)
"""Traits by which names or shapes of weights differ, so that ``check_weights`` compares them."""
_NOT_OF_WEIGHTS = (
    *("name", "family", "max_context", "default_seq_len", "instruct"),
    *("moe", "mtp_layers", "lora", "trainable", "base"),
)
"""Fields that say what a model is called, used for and trained by, and what it may have that its weights lack."""
_OF_MODULES = ("embed_tokens.weight", "shared_head.head.weight")
"""What files hold again in each prediction module: the embedding and the head."""
_MOVABLE = tuple(
    trait.name for trait in fields(ModelSpec) if trait.name not in (*_FIXED, *_SHOWN_BY_WEIGHTS, *_NOT_OF_WEIGHTS)
)
"""All other traits, which no weight shows, but which may differ on purpose, as for longer sequences."""
_MOVABLE_OF_EXPERTS = (
    *("experts_per_token", "expert_groups", "groups_per_token"),
    *("gates", "gate_scale", "gate_inputs", "balance_bias"),
)
"""The same of experts."""


@dataclass(frozen=True)
class Origin:
    """Where a run's initial weights come from."""

    base: Path | None
    """A Hugging Face folder or a checkpoint with a full model; None if a run drew it from its seed."""
    adapters: Path | None = None
    """A PEFT folder, or a checkpoint of a run that trains adapters, with all it trains; None if there are none yet."""
    drawn_by: RunConfig | None = None
    """The run that drew the base."""


def resolve_pretrained(path: str) -> str:
    """Return ``path``, or a name of the Hub, as an absolute path; for a run, that of its newest complete checkpoint.

    A run's configuration then says which weights it started from, even if the other run continues.
    """
    absolute = folder_of(path).absolute()
    return str(newest_checkpoint(RunDirectory(absolute)) or absolute)


def resolve_intact(path: str, tell: Callable[[str], None]) -> str:
    """Return what ``resolve_pretrained`` does, but for a run's directory its newest intact checkpoint.

    Raises:
        CheckpointError: if the run's checkpoints are all damaged.
    """
    absolute = folder_of(path).absolute()
    return str(newest_intact_checkpoint(RunDirectory(absolute), tell) or absolute)


def checkpoints_behind(source: Path) -> list[Path]:
    """Return the checkpoints that the weights behind ``source`` are read from: of the base, and of the adapters."""
    origin = origin_of(source)
    return [path for path in (origin.base, origin.adapters) if path is not None and is_checkpoint(path)]


def refuse_damaged(checkpoint: Path) -> None:
    """Compare every byte of a checkpoint with its checksums.

    Raises:
        CheckpointError: if it is damaged.
    """
    if problem := find_problem(checkpoint):
        raise CheckpointError(f"{checkpoint} is damaged ({problem}); choose another checkpoint of its run")


def origin_of(source: Path, above: tuple[Path, ...] = ()) -> Origin:
    """Return where the weights behind ``source`` are; adapters are stored apart from their base.

    Args:
        source: a Hugging Face or PEFT folder, or a checkpoint.
        above: the checkpoints of adapters that start from ``source``.

    Raises:
        WeightsError: if ``source`` is a PEFT folder whose base is not on this disk, or a damaged checkpoint, or starts
            from itself.
    """
    if source in above:
        raise WeightsError(f"the adapters in {source} say that they start from themselves; choose other weights")
    if is_adapter_folder(source):
        base = base_of(source)
        if newest_checkpoint(RunDirectory(base)):  # its newest checkpoint may change
            raise WeightsError(f"the base of the adapters in {source} is the run {base}; name one of its checkpoints")
        return Origin(base, source)
    if not is_checkpoint(source):
        return Origin(source)
    config = saved_run(source)
    if config.spec.lora is None:
        return Origin(source)
    init_from = config.training.init_from
    if init_from is None:
        return Origin(None, source, config)
    before = origin_of(Path(init_from), (*above, source))
    return Origin(before.base, source, before.drawn_by)


def check_pretrained(spec: ModelSpec, source: Path) -> list[str]:
    """Refuse weights that ``spec`` cannot start from. Reads only the headers of weight files.

    Args:
        spec: the model.
        source: a path that ``resolve_pretrained`` returned.

    Returns:
        A sentence for each trait, such as the rotary embedding, that differs from the model the weights were made for,
        and for what is not read.

    Raises:
        WeightsError: if they are missing, incomplete or another model's, or are adapters that ``spec`` does not have.
        ConfigError: if the folder's ``config.json`` is not a Llama's.
    """
    if is_checkpoint(source):
        _check_complete(source)
    if is_adapter_folder(source):
        adapter_weights(spec, source)
    origin = origin_of(source)
    if origin.adapters is None:
        return _check_full_model(spec, source)
    differences = _check_adapters(spec, origin.adapters) if is_checkpoint(origin.adapters) else []
    if origin.base is None:
        _check_drawn(origin)
        return differences
    try:
        return differences + _check_full_model(spec, origin.base)
    except WeightsError as error:
        raise WeightsError(f"the base of the adapters in {origin.adapters}: {error}") from None


def _check_full_model(spec: ModelSpec, source: Path) -> list[str]:
    if not is_checkpoint(source):
        notes: list[str] = []
        stored = hugging_face_weights(spec, source, notes.append)
        return notes + _moved(spec, _model_of(source), source) + _rounded_again(spec, stored, source)
    _check_complete(source)
    return _check_architecture(spec, full_model(source), source)


def _check_adapters(spec: ModelSpec, checkpoint: Path) -> list[str]:
    source_spec = saved_run(checkpoint).spec
    if source_spec.lora is not None:
        check_same_adapters(spec, source_spec.lora, checkpoint)
    lost = sorted((source_spec.trained_in_full - spec.trained_in_full) | (source_spec.adapted - spec.adapted))
    if lost:
        raise WeightsError(
            f"{checkpoint} has trained {len(lost)} weights, such as {lost[0]}, that this run would take from the "
            "frozen base; train them too (trainable, moe), or merge them first (export-hf --merged)"
        )
    differences = _check_architecture(spec, source_spec, checkpoint)
    if source_spec.lora is not None and spec.lora is not None and source_spec.lora.base != spec.lora.base:
        differences.append(
            f"lora.base is {spec.lora.base}, but the adapters in {checkpoint} were trained over matrices in "
            f"{source_spec.lora.base}; ignore this if it is intended"
        )
    return differences


def _check_drawn(origin: Origin) -> None:
    if origin.drawn_by is not None and origin.drawn_by.launch.device == "cuda":
        raise WeightsError(
            f"the base of the adapters in {origin.adapters} was drawn from a seed on a GPU and is in no file; train "
            "adapters over saved weights (training.init_from)"
        )


def _check_complete(checkpoint: Path) -> None:
    try:
        complete_state(checkpoint)
    except CheckpointError as error:
        raise WeightsError(f"{checkpoint} is damaged ({error}); choose another checkpoint of its run") from None


def _check_architecture(spec: ModelSpec, source_spec: ModelSpec, source: Path) -> list[str]:
    """Refuse a run's model unless it has the shapes of ``spec``; return a sentence for each other difference."""
    _check_fixed(spec, source_spec, source)
    both = min(spec.mtp_layers, source_spec.mtp_layers)
    shapes = hugging_face_shapes(replace(source_spec, mtp_layers=both))
    check_weights(replace(_as_stored(source_spec, spec), mtp_layers=both), shapes, source=str(source))
    return _moved(spec, source_spec, source) + _other_modules(spec, source_spec.mtp_layers, source)


def _other_modules(spec: ModelSpec, num_stored: int, source: Path) -> list[str]:
    """Return a sentence on the prediction modules that only the model has, or only the weights it starts from."""
    if num_stored < spec.mtp_layers:
        drawn = spec.mtp_layers - num_stored
        return [f"{source} lacks {drawn} of architecture.mtp_layers={spec.mtp_layers}, which begin at random"]
    if num_stored > spec.mtp_layers:
        left_out = num_stored - spec.mtp_layers
        return [
            f"{source} has prediction modules of later tokens, {left_out} more than are read; "
            f"architecture.mtp_layers={num_stored} reads all of them"
        ]
    return []


def _num_modules(tensors: Container[str], spec: ModelSpec) -> int:
    """Return how many prediction modules files hold behind the layers of a model."""
    blocks = takewhile(lambda block: f"model.layers.{block}.eh_proj.weight" in tensors, count(spec.num_layers))
    return sum(1 for _ in blocks)


def _without_other_modules(tensors: Mapping[str, _Tensor], spec: ModelSpec, num_stored: int) -> dict[str, _Tensor]:
    """Return the tensors without modules that a model has not, and without their copies of embedding and head."""
    kept = dict(tensors)
    for block in range(spec.num_layers, spec.num_layers + num_stored):
        prefix = f"model.layers.{block}."
        for name in tensors:
            if name.startswith(prefix) and (block >= spec.num_blocks or name.removeprefix(prefix) in _OF_MODULES):
                del kept[name]
    return kept


def _as_stored(source_spec: ModelSpec | None, spec: ModelSpec) -> ModelSpec:
    """Return ``spec``, without what the weights it starts from may lack.

    Those are experts, which begin as copies of feed-forwards, and balance biases, which begin at zero.
    """
    if spec.moe is None or source_spec is None:
        return spec
    if source_spec.moe is not None:
        has_biases = spec.moe.balance_bias and source_spec.moe.balance_bias
        return replace(spec, moe=spec.moe.model_copy(update={"balance_bias": has_biases}))
    if refused := spec.moe.no_copies(spec.ffn_size):
        raise WeightsError(refused)
    return replace(spec, moe=None)


def stored_model(spec: ModelSpec, origin: Origin) -> ModelSpec:
    """Return ``spec``, without what the full model of an origin lacks: experts, balance biases, prediction modules."""
    if origin.base is None:
        return _as_stored(origin.drawn_by.spec if origin.drawn_by else None, spec)
    if is_checkpoint(origin.base):
        source_spec = saved_run(origin.base).spec
        num_modules = source_spec.mtp_layers
        stored = _as_stored(source_spec, spec)
    else:
        stored = _as_stored(_model_of(origin.base), spec)
        num_modules = _num_modules(read_tensors(origin.base), spec) if spec.mtp_layers else 0
    return replace(stored, mtp_layers=min(spec.mtp_layers, num_modules))


def names_with_adapters(spec: ModelSpec, origin: Origin) -> frozenset[str]:
    """Return the parameters that an origin does not take from its base: adapters, and what was trained with them."""
    if origin.adapters is None:
        return frozenset()
    if not is_checkpoint(origin.adapters):
        return frozenset(spec.adapter_shapes)
    source_spec = saved_run(origin.adapters).spec
    return source_spec.saved_in_full | source_spec.adapter_shapes.keys()


def is_checkpoint(source: Path) -> bool:
    """Return whether ``source`` is a checkpoint of a run, rather than a Hugging Face folder."""
    return (source / STATE).exists()


def has_own_head(folder: Path) -> bool:
    """Return whether a Hugging Face folder holds a head that is not its embedding, although its model says tied.

    Adapters that were merged with a head of their own leave such folders. Reads both matrices if there are two.

    Raises:
        WeightsError: if the folder holds no model.
        ConfigError: if its ``config.json`` does not describe a Llama.
    """
    source_spec = _model_of(folder)
    if source_spec is None or not source_spec.tied_embeddings:
        return False
    tensors = read_tensors(folder)
    if not {HEAD, _EMBEDDING} <= tensors.keys():
        return False
    return not holds_same_numbers(tensors[HEAD], tensors[_EMBEDDING])


def refuse_own_head(spec: ModelSpec, origin: Origin) -> None:
    """Refuse a base that ``has_own_head`` for a model whose head is its embedding.

    Args:
        spec: the model.
        origin: where the weights are that ``check_pretrained`` has accepted for it.

    Raises:
        WeightsError: naming the setting that keeps the head.
    """
    base = origin.base
    if spec.tied_embeddings and base is not None and not is_checkpoint(base) and has_own_head(base):
        raise WeightsError(
            f"{base}/config.json says tie_word_embeddings=true, but {HEAD} holds other numbers than "
            f"{_EMBEDDING}; set architecture.tied_embeddings=false to have that head, as transformers 5 "
            "does, or remove it there"
        )


def hugging_face_weights(
    spec: ModelSpec, folder: Path, tell: Callable[[str], None] = lambda note: None
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return where a Hugging Face folder stores each weight of ``spec``, by our names.

    Experts have a matrix each, or all of them a tensor; other weights are one. If the folder's model has no experts,
    the result is that of a dense model.

    Args:
        spec: the model.
        folder: the folder.
        tell: called with a sentence on each thing in it that is not read.

    Raises:
        WeightsError: as ``check_pretrained``.
    """
    if not folder.is_dir():
        problem = "is a file; name its folder" if folder.exists() else "does not exist; name a folder on this disk"
        raise WeightsError(f"training.init_from={str(folder)!r} {problem}")
    if (folder / _CONFIG).exists():
        raise WeightsError(f"the run in {folder} has no complete checkpoint yet; let it save one")
    source_spec = _model_of(folder)
    spec = _as_stored(source_spec, spec)
    tensors = join_block_fp8(join_mxfp4(join_nf4(read_tensors(folder, tell))))
    if spec.moe:
        tensors = per_expert(tensors, spec)
    if spec.tied_embeddings and HEAD in tensors:
        tensors.setdefault(_EMBEDDING, tensors[HEAD])  # some software saves the one matrix under the head's name
    if source_spec is not None and source_spec.tied_embeddings and HEAD in tensors:
        # the files have both, whatever config.json says they share
        source_spec = replace(source_spec, tied_embeddings=spec.tied_embeddings)
    _check_fixed(spec, source_spec, folder)
    num_modules = _num_modules(tensors, spec)
    for note in _other_modules(spec, num_modules, folder):
        tell(note)
    tensors = _without_other_modules(tensors, spec, num_modules)
    spec = replace(spec, mtp_layers=min(spec.mtp_layers, num_modules))
    check_weights(spec, {name: tensor.shape for name, tensor in tensors.items()}, source=str(folder))
    stored: dict[str, tuple[StoredTensor, ...]] = {}
    for name in spec.weight_shapes:
        found = tuple(tensors[stored] for stored in hugging_face_names(name, spec))
        first = found[0]
        stored[name] = first.matrices if isinstance(first, Mxfp4Tensor) else found
    for tensor in chain.from_iterable(stored.values()):
        if tensor.dtype not in FLOAT_BYTES and not isinstance(tensor, QuantisedTensor):
            raise WeightsError(
                f"{tensor.file} holds weights in {tensor.dtype}; dequantise them to one of {', '.join(FLOAT_BYTES)}"
            )
    return stored


def where_stored(name: str, spec: ModelSpec, source: Path) -> str:
    """Return where the parameter ``name`` of ``spec`` is read from if it starts from ``source``, for an error.

    Raises:
        WeightsError: as ``check_pretrained``.
    """
    origin = origin_of(source)
    in_adapters = name in names_with_adapters(spec, origin)
    holder = origin.adapters if in_adapters else origin.base
    if holder is None or is_checkpoint(holder):
        return f"{name} of {holder or source}"
    if in_adapters:
        return f"{peft_name(name, spec.model_type)} in {holder / ADAPTERS}"
    stored = hugging_face_weights(stored_model(spec, origin), holder)
    tensors = stored[name if name in stored else dense_name(name)]
    files = ", ".join(sorted({tensor.file.name for tensor in tensors}))
    return f"{hugging_face_name(name, spec.model_type).format('*')} in {holder / files}"


def saved_run(checkpoint: Path) -> RunConfig:
    """Return the configuration of the run that wrote a checkpoint.

    Raises:
        WeightsError: if DeepSpeed wrote it at stage 1 in bf16.
    """
    below = place_of(checkpoint)
    layout = read_json(checkpoint / LAYOUT, below) if (checkpoint / LAYOUT).exists() else {}
    if (layout.get("zero_stage"), layout.get("compute_dtype")) == (1, "bfloat16"):
        raise WeightsError(
            f"{checkpoint} was written by DeepSpeed at stage 1 in bf16, whose weights DeepSpeed itself cannot "
            "consolidate; train with parallel.zero_stage=2 or parallel.zero_backend=native to use them elsewhere"
        )
    return RunConfig.load(checkpoint / _CONFIG, below=below)


def full_model(checkpoint: Path) -> ModelSpec:
    """Return the model whose full weights a checkpoint holds.

    Raises:
        WeightsError: if it holds adapters, or DeepSpeed wrote it at stage 1 in bf16.
    """
    config = saved_run(checkpoint)
    if config.spec.lora is not None:
        raise WeightsError(
            f"{checkpoint} was trained with strategy={config.strategy} and holds no full model; name one that does"
        )
    return config.spec


def _model_of(folder: Path) -> ModelSpec | None:
    """Return the model that a folder's ``config.json`` describes, or None if it has none."""
    return read_folder(str(folder)) if (folder / "config.json").exists() else None


def _check_fixed(spec: ModelSpec, source_spec: ModelSpec | None, source: Path) -> None:
    for trait in _FIXED if source_spec else ():
        ours = getattr(spec, trait)
        given = getattr(source_spec, trait)
        if ours != given:
            raise WeightsError(
                f"the weights in {source} are not those of {spec.name}: {trait}={given} instead of {ours}; "
                "choose the model they were made for"
            )


def _moved(spec: ModelSpec, source_spec: ModelSpec | None, source: Path) -> list[str]:
    if source_spec is None:
        return []
    values = {f"architecture.{trait}": (getattr(spec, trait), getattr(source_spec, trait)) for trait in _MOVABLE}
    if spec.moe and source_spec.moe:
        for trait in _MOVABLE_OF_EXPERTS:
            values[f"moe.{trait}"] = (getattr(spec.moe, trait), getattr(source_spec.moe, trait))
    return [
        f"{key} is {_said(ours)}, but {source} was made for {_said(given)}; ignore this if it is intended"
        for key, (ours, given) in values.items()
        if ours != given
    ]


def _rounded_again(spec: ModelSpec, stored: Mapping[str, Sequence[StoredTensor]], source: Path) -> list[str]:
    tensors = [tensor for name in sorted(spec.packed & stored.keys()) for tensor in stored[name]]
    if not any(isinstance(tensor, Nf4Tensor) and tensor.nested is None for tensor in tensors):
        return []
    return [
        f"{source} has scales in fp32, which lora.base=nf4 rounds to eight bits; quantise it with "
        "bnb_4bit_use_double_quant=True, or ignore this if it is intended"
    ]


def _said(value: float | RopeScaling | tuple[int, ...] | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, RopeScaling):
        return " ".join(f"{key}={part}" for key, part in asdict(value).items())
    return f"{value:g}" if isinstance(value, float) else str(value)
