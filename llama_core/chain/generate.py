"""Continue a prompt with the weights of a run or of a folder, in this process, to look at what was trained."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from llama_core.chain.runs import find_checkpoint
from llama_core.config.pretrained import settings_of_weights
from llama_core.config.run import RunConfig
from llama_core.config.settings import DATALOADER
from llama_core.data.chat import chat_format
from llama_core.data.corpus import UnusableRecordError, checked_text
from llama_core.data.rendering import TemplateRefusalError
from llama_core.data.tokenizer import Tokenizer, check_fits, decode_stream, load_tokenizer
from llama_core.errors import (
    ConfigError,
    DataError,
    DoesNotFitError,
    EnvironmentMismatchError,
    RunDirectoryError,
    WeightsError,
)
from llama_core.imports import importing_torch
from llama_core.machine.detect import detect_machine
from llama_core.models.pretrained import (
    is_checkpoint,
    origin_of,
    refuse_damaged,
    refuse_damaged_base,
    saved_run,
)
from llama_core.records.directory import RunDirectory
from llama_core.records.files import read_json
from llama_core.units import format_bytes


def generate(
    source: Path,
    prompt: str,
    *,
    chat: bool = False,
    step: int | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    dtype: str = "fp32",
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[str]:
    """Return the text that follows ``prompt``, in pieces as they are generated, up to the end of the document or turn.

    All arguments are checked, and the weights are read, before this returns.

    Args:
        source: a run's directory, one of its checkpoints, or a folder with a Hugging Face Llama or PEFT's adapters.
        prompt: the beginning of a document or, with ``chat``, the user's message.
        chat: put the prompt into the model's chat template, as training does.
        step: step of the run's checkpoint; by default the newest intact one.
        max_new_tokens: the most tokens to generate; the model's context is another limit.
        temperature: see ``Sampling``, also for the next three.
        top_k: likeliest tokens to draw from.
        top_p: probability of the tokens to draw from.
        seed: repeats a draw.
        tokenizer: 'bytes' or a path; by default the run's or the folder's.
        device: cpu or cuda; by default cuda if present.
        dtype: dtype of the weights and of the arithmetic, one of ``hugging_face.DTYPES``.
        tell: called with a line about what is generated from, and about each damaged checkpoint that is passed over.

    Raises:
        ConfigError: if a number is out of range.
        RunDirectoryError: if the run has no such checkpoint.
        CheckpointError: if the checkpoint, or the one below its adapters, is damaged.
        WeightsError: if the source holds no weights that can be read; while generating, if logits are not finite.
        DataError: if the prompt, the tokenizer or the chat template cannot be used.
        EnvironmentMismatchError: if there is no such device.
        DoesNotFitError: if the device has less memory than the weights take.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: generate at least 1")
    weights, config = _find_model(source, step, tell)
    spoken = load_tokenizer(_tokenizer(source, config, tokenizer))
    check_fits(spoken, config.spec.vocab_size)
    ids, ends = _encode(prompt, spoken, config, weights, chat=chat)
    room = config.spec.max_context - len(ids)
    if room < 1:
        raise DataError(
            f"the prompt has {len(ids):,} tokens, which fill the context of {config.spec.name} "
            f"({config.spec.max_context:,}); shorten it"
        )
    used = choose_device(device, config, dtype)

    with importing_torch():
        from llama_core.models.generation import Sampling, generate_tokens
        from llama_core.training.weights import whole_model

    sampling = Sampling(temperature, top_k, top_p, seed)
    tell(f"{weights} in {dtype} on {used}, tokenizer {spoken.name}")
    if room < max_new_tokens:
        tell(f"the context leaves room for {room:,} tokens")
    model = whole_model(config.spec, weights, device=used, dtype=dtype)
    tokens = generate_tokens(model, ids, num_tokens=min(room, max_new_tokens), sampling=sampling, ends=ends)
    return decode_stream(spoken, ids, tokens)


def _find_model(source: Path, step: int | None, tell: Callable[[str], None]) -> tuple[Path, RunConfig]:
    """Return where the weights are, all of them intact, and the configuration of a run that has them."""
    run = RunDirectory(source)
    if run.config.exists() and not is_checkpoint(source):  # a checkpoint has a configuration too
        source = find_checkpoint(run, step, tell)
    elif step is not None:
        raise RunDirectoryError(f"{source} is no run's directory, so it has no step {step}; drop --step")
    elif is_checkpoint(source):
        refuse_damaged(source)
    refuse_damaged_base(source)
    if is_checkpoint(source):
        return source, saved_run(source)
    adapters = origin_of(source).adapters
    if not settings_of_weights(str(source)):
        problem = "holds no model" if source.is_dir() else "is no folder here"
        raise WeightsError(f"{source} {problem}; name a run's directory, or a folder of Hugging Face or PEFT")
    strategy = "standard" if adapters is None else "lora"
    return source, RunConfig.from_mapping({"strategy": strategy, "training": {"init_from": str(source)}})


def _tokenizer(source: Path, config: RunConfig, asked: str | None) -> str:
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


def _encode(
    prompt: str, tokenizer: Tokenizer, config: RunConfig, weights: Path, *, chat: bool
) -> tuple[list[int], set[tuple[int, ...]]]:
    """Return the tokens of a prompt, and the sequences of tokens that end what follows it."""
    if not prompt:
        raise DataError("the prompt is empty; give some text to continue")
    try:
        checked_text(prompt)
    except UnusableRecordError as error:
        raise DataError(f"the prompt is {error}; write it in UTF-8") from None
    ends: set[tuple[int, ...]] = {(tokenizer.eos_id,)}
    if not chat:
        return tokenizer.encode_documents([prompt])[0][:-1].tolist(), ends
    if not _has_chat_template(config, tokenizer, weights):
        raise DataError(
            f"{weights} has no chat template: neither an instruct model, nor trained on conversations; drop --chat"
        )
    template = chat_format(config.data, tokenizer, config.spec, files=()).template
    try:
        text = checked_text(template.render([{"role": "user", "content": prompt}], add_generation_prompt=True))
        end = template.end_of_turn
    except TemplateRefusalError as error:
        raise DataError(f"chat template {template.name!r} refuses the prompt: {error}") from None
    except UnusableRecordError as error:
        raise DataError(f"chat template {template.name!r} renders text that is {error}; name another") from None
    encoded = [tuple(tokens.ids.tolist()) for tokens in tokenizer.encode_rendered([text, end])]
    return list(encoded[0]), ends | ({encoded[1]} if end else set())


def _has_chat_template(config: RunConfig, tokenizer: Tokenizer, weights: Path) -> bool:
    """Return whether the model knows a chat template: of its own, or from the conversations of its run."""
    if config.data.chat_template or tokenizer.chat_template or config.spec.instruct:
        return True
    data = RunDirectory(weights.absolute().parents[1]).data if is_checkpoint(weights) else None
    return data is not None and data.exists() and read_json(data).get("chat_template") is not None


def choose_device(asked: str | None, config: RunConfig, dtype: str) -> str:
    """Return the device that generates: the one asked for, else the first GPU, else the CPU.

    Raises:
        EnvironmentMismatchError: if there is no such device.
        DoesNotFitError: if the weights do not fit into its memory, as far as that is known.
    """
    machine = detect_machine()
    if asked == "cuda" and not machine.gpus:
        raise EnvironmentMismatchError("--device cuda: this machine has no CUDA device that torch can use; use cpu")
    device = asked or ("cuda" if machine.gpus else "cpu")
    free: float = machine.available_memory_bytes
    if device == "cuda":
        free = machine.gpu_type.usable_bytes if machine.gpu_type else math.inf
    needed = config.spec.num_parameters * (4 if dtype == "fp32" else 2)
    if needed > free:
        raise DoesNotFitError(
            f"the weights of {config.spec.name} take {format_bytes(needed)} in {dtype}, more than the "
            f"{format_bytes(free)} of {device} memory here; use 16 bits (--dtype bf16), or a larger device"
        )
    return device
