"""Continue a text with the weights of a run or of a folder, to look at what was trained."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_core.attention import check_cached
from llama_core.config.config_json.reading import ignored_settings
from llama_core.config.pretrained import settings_of_weights
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER
from llama_core.data.bad_lines import UnusableRecordError, checked_text
from llama_core.data.end_tokens import ends_of_texts
from llama_core.data.statistics import refuse_other_digest
from llama_core.data.tokenizer import Tokenizer, decode_stream, model_tokenizer
from llama_core.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RunDirectoryError,
    WeightsError,
)
from llama_core.evaluation.plan import dividing
from llama_core.hugging_face.bases import refuse_unfit_base
from llama_core.hugging_face.pretrained import (
    has_own_head,
    is_checkpoint,
    origin_of,
    refuse_damaged,
    saved_run,
)
from llama_core.imports import importing_torch
from llama_core.machine.detect import detect_machine
from llama_core.planning.inference import weight_bytes
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import run_of
from llama_core.records.directory import RunDirectory
from llama_core.runs.checkpoints import Best, find_checkpoint, refuse_checkpoint_of_another
from llama_core.units import divisors, format_bytes

if TYPE_CHECKING:
    from llama_core.models.llama import Llama


class TextModel:
    """A model with its tokenizer, which continues texts. The weights are read for the first of them.

    Args:
        source: a run's directory, one of its checkpoints, or a folder with a Hugging Face Llama or PEFT's adapters.
        step: step of the run's checkpoint, or ``best``; by default the newest intact one.
        max_new_tokens: the most tokens of a text; the model's context is another limit.
        temperature: see ``Sampling``, also for the next three.
        top_k: likeliest tokens to draw from.
        top_p: probability of the tokens to draw from.
        seed: repeats the draws of each text.
        tokenizer: 'bytes' or a path; by default the run's or the folder's.
        device: cpu or cuda; by default cuda if present.
        dtype: dtype of the weights and of the arithmetic, one of ``config_json.writing.DTYPES``.
        tell: called with a line about what is generated from, and about each damaged checkpoint that is passed over.

    Raises:
        ConfigError: if a number is out of range.
        RunDirectoryError: if the run has no such checkpoint.
        CheckpointError: if the checkpoint, or the one below its adapters, is damaged.
        WeightsError: if the source holds no weights that can be read.
        DataError: if the tokenizer cannot be used.
        EnvironmentMismatchError: if there is no such device.
        DoesNotFitError: if the device has less memory than the weights take.
        PlanError: if the model's attention needs what no cache serves.
    """

    def __init__(
        self,
        source: Path,
        *,
        step: int | Best | None = None,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        tokenizer: str | None = None,
        device: str | None = None,
        dtype: str = "fp32",
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens}: generate at least 1")
        self.weights, self.config = find_model(source, step, tell)
        check_cached(self.config.spec.attentions)
        self.tokenizer = own_tokenizer(self.weights, self.config, tokenizer)
        self.ends = ends_of_texts(self.weights, self.config, self.tokenizer)
        """The sequences of tokens that end any text."""
        self._device = choose_device(device, self.config, dtype)
        self._dtype = dtype
        self._max_new_tokens = max_new_tokens
        self.tell = tell

        with importing_torch():
            from llama_core.evaluation.inference.generation import Sampling

        self._sampling = Sampling(temperature, top_k, top_p, seed)

    def continue_text(self, prompt: str) -> Iterator[str]:
        """Return the text that follows ``prompt``, in pieces as they are generated, up to the end of the document.

        The prompt is checked, and the weights are read, before this returns.

        Raises:
            DataError: if the prompt is empty, no text or no token, or fills the model's context.
            WeightsError: while generating, if logits are not finite.
        """
        check_text(prompt, "prompt")
        document = self.tokenizer.encode_documents([prompt])[0].tolist()
        ids = document[: -len(self.tokenizer.after)]
        self.check_ids(ids, "prompt")
        return self.pieces_after(ids, self.ends)

    def room_after(self, ids: Sequence[int]) -> int:
        """Return the number of tokens that the model's context has room for after ``ids``; below 1 if it is full."""
        return self.config.spec.max_context - len(ids)

    def check_ids(self, ids: Sequence[int], what: str) -> None:
        """Refuse to continue no token at all, or tokens that fill the model's context.

        Raises:
            DataError: if there is none, or they do; it calls them ``what``.
        """
        if not ids:
            raise DataError(
                f"tokenizer {self.tokenizer.name!r} makes no token of the {what}; give another text, or name another "
                "tokenizer with --tokenizer"
            )
        if self.room_after(ids) < 1:
            raise DataError(
                f"the {what} has {len(ids):,} tokens, which fill the context of {self.config.spec.name} "
                f"({self.config.spec.max_context:,}); shorten it"
            )

    def pieces_after(self, ids: Sequence[int], ends: Collection[tuple[int, ...]]) -> Iterator[str]:
        """Return the text that follows ``ids``, in pieces, up to the first of ``ends``."""
        model = self._model

        with importing_torch():
            from llama_core.evaluation.inference.generation import generate_tokens

        room = self.room_after(ids)
        if room < self._max_new_tokens:
            self.tell(f"the context leaves room for {room:,} tokens")
        num_tokens = min(room, self._max_new_tokens)
        tokens = generate_tokens(model, ids, num_tokens=num_tokens, sampling=self._sampling, ends=ends)
        return decode_stream(self.tokenizer, ids, tokens)

    def read_weights(self) -> None:
        """Read the weights now, rather than for the first text."""
        _ = self._model

    @cached_property
    def _model(self) -> "Llama":
        with importing_torch():
            from llama_core.training.stored_weights import whole_model

        self.tell(f"{self.weights} in {self._dtype} on {self._device}, tokenizer {self.tokenizer.name}")
        return whole_model(self.config.spec, self.weights, device=self._device, dtype=self._dtype)


def find_model(source: Path, step: int | Best | None, tell: Callable[[str], None]) -> tuple[Path, RunConfig]:
    """Return where the weights are, all of them intact, and the configuration of a run that has them."""
    run = RunDirectory(source)
    if run.config.exists() and not is_checkpoint(source):  # a checkpoint has a configuration too
        source = find_checkpoint(run, step, tell)
    elif step is not None:
        raise RunDirectoryError(f"{source} is no run's directory, so it has no step {step}; drop --step")
    elif is_checkpoint(source):
        refuse_damaged(source)
        refuse_checkpoint_of_another(source)
    refuse_unfit_base(source)
    if is_checkpoint(source):
        return source, saved_run(source)
    origin = origin_of(source)
    if not settings_of_weights(str(source)):
        problem = "holds no model" if source.is_dir() else "is no folder here"
        raise WeightsError(f"{source} {problem}; name a run's directory, or a folder of Hugging Face or PEFT")
    base = origin.base
    given: dict[str, Any] = {"training": {"init_from": str(source)}}
    if base is not None and not is_checkpoint(base) and has_own_head(base):
        given["architecture"] = {"tied_embeddings": False}
        tell(
            f"{base}: the head is lm_head.weight, as in transformers 5, although config.json says "
            "tie_word_embeddings=true: it holds other numbers than the embedding"
        )
    config = RunConfig.from_mapping(given)
    for note in ignored_settings(config.model):
        tell(note)
    return source, config


def tokenizer_of(source: Path, config: RunConfig, asked: str | None) -> str:
    """Return the name of the model's tokenizer.

    Raises:
        DataError: if nothing names it.
    """
    if asked is not None:
        return asked
    if config.data.source == DATALOADER:
        raise DataError(f"{source} was trained on a dataloader, so its tokenizer is unknown; name it with --tokenizer")
    brought = settings_of_weights(str(source)).get("data")
    if brought is None:
        raise DataError(f"{source} holds no tokenizer.json; name one with --tokenizer, or bytes if it learnt bytes")
    return config.data.tokenizer


def own_tokenizer(weights: Path, config: RunConfig, asked: str | None) -> Tokenizer:
    """Return the tokenizer of a model.

    Raises:
        DataError: if there is none, or it does not fit the model.
    """
    named = config.data.model_copy(update={"tokenizer": tokenizer_of(weights, config, asked)})
    tokenizer = model_tokenizer(named, config.spec)
    if asked is None and is_checkpoint(weights):
        refuse_other_digest(run_of(weights), "tokenizer", tokenizer.name, tokenizer.fingerprint)
    return tokenizer


def check_text(text: str, what: str) -> None:
    """Refuse a text that is empty or no text.

    Raises:
        DataError: if so; it calls the text ``what``.
    """
    if not text:
        raise DataError(f"the {what} is empty; give some text")
    try:
        checked_text(text)
    except UnusableRecordError as error:
        raise DataError(f"the {what} is {error}; write it in UTF-8") from None


def choose_device(
    asked: str | None, config: RunConfig, dtype: str, plan: ParallelPlan | None = None, *, num_nodes: int = 1
) -> str:
    """Return the device that computes: the one asked for, else the first GPU, else the CPU.

    Args:
        asked: cpu or cuda; None for a GPU if present.
        config: a run with the model.
        dtype: dtype of the weights.
        plan: how devices divide the model; None for one, where there cannot be more.
        num_nodes: machines like this one that have them, as many each.

    Raises:
        EnvironmentMismatchError: if there is no such device, or there are too few.
        DoesNotFitError: if the weights do not fit into its memory, as far as that is known.
    """
    may_be_divided = plan is not None
    plan = plan or ParallelPlan()
    machine = detect_machine()
    if asked == "cuda" and not machine.gpus:
        raise EnvironmentMismatchError("--device cuda: this machine has no CUDA device that torch can use; use cpu")
    num_here = plan.world_size // num_nodes
    if asked != "cpu" and num_here > max(1, len(machine.gpus)):
        raise EnvironmentMismatchError(
            f"{num_here} GPUs are more than the {len(machine.gpus)} of this machine; use fewer, or --device cpu "
            "for as many processes"
        )
    device = asked or ("cuda" if machine.gpus else "cpu")
    free: float = machine.available_memory_bytes
    if device == "cuda":
        free = machine.gpu_type.usable_bytes if machine.gpu_type else math.inf
    itemsize = 4 if dtype == "fp32" else 2
    whole = config.spec.num_parameters * itemsize
    needed = weight_bytes(config.spec, plan, itemsize) if device == "cuda" else whole * plan.dp // num_nodes
    if needed > free:
        ways = "use 16 bits (--dtype bf16), or a larger device"
        counts = dividing(config.spec, divisors(config.spec.num_kv_heads))
        fewest = next((count for count in counts if whole <= count * free), None)
        if may_be_divided and device == "cuda" and fewest is not None:
            ways += f", or divide the model (--gpus {fewest} --tensor-parallel {fewest})"
        raise DoesNotFitError(
            f"the weights of {config.spec.name} take {format_bytes(needed)} in {dtype}, more than the "
            f"{format_bytes(free)} of {device} memory here; {ways}"
        )
    return device
