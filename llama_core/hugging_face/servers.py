"""What vLLM, SGLang and llama.cpp make of an exported folder: what they compute, and by which commands. No torch.

``SERVERS`` is the table: a row for each server, with the types of models that it has itself and what it loses or
refuses. It holds for the versions that it names. All of it was read in their sources; ``Rule.was_run`` marks what was
also run.

That is llama.cpp's row. Models of each type with few layers and random weights were written as ``export-hf`` writes
them, converted by ``convert_hf_to_gguf.py --outtype f32`` with its check of the tokenizer taken out, and computed on a
CPU with caches in fp32. Over 200 tokens, more than any window, the logits of models without a loss were within 1e-3
standard deviations of transformers', and those of a Gemma 3 within 2.1e-3, since ggml looks GELU up in a table in fp16;
so were those with adapters of each type, through ``convert_lora_to_gguf.py``. Each marked loss was seen, from the token
on that it tells of. Tokenizers of published models were not converted.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from llama_core.adapters.lora import LORA
from llama_core.adapters.traits import AdapterJson, AdapterType
from llama_core.config.config_json.reading import read_folder
from llama_core.config.model_types import DEEPSEEK_V3, MODEL_TYPES
from llama_core.config.models import ModelSpec
from llama_core.config.rope import YarnScaling, yarn_amplitude
from llama_core.errors import HubError, WeightsError, why_unreadable
from llama_core.hugging_face.peft import base_of, is_adapter_folder, read_adapter_config
from llama_core.records.files import DAMAGE, own_file, read_file

Effect = Literal["refused", "loss", "advice"]
Verdict = Literal["natively", "through transformers", "with a loss", "refused"]

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE = "tokenizer.model"
_CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ExportedModel:
    """A Hugging Face folder, as far as servers differ on it."""

    folder: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    """Its ``config.json``."""

    @property
    def model_type(self) -> str:
        """Its ``model_type``."""
        return str(self.config["model_type"])

    @cached_property
    def tokenizer(self) -> Mapping[str, Any]:
        """Its ``tokenizer.json``; empty without one."""
        file = self.folder / _TOKENIZER
        return _read(file) if file.is_file() else {}

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """Its ``tokenizer_config.json``; empty without one."""
        file = self.folder / _TOKENIZER_CONFIG
        return _read(file) if file.is_file() else {}

    @property
    def has_sentencepiece(self) -> bool:
        """Whether it has the SentencePiece model of its tokenizer."""
        return (self.folder / _SENTENCEPIECE).is_file()

    @property
    def has_window(self) -> bool:
        """Whether a layer has a window that a text can be longer than."""
        return 0 < self.spec.sliding_window < self.spec.max_context

    @property
    def windowed(self) -> list[bool]:
        """Whether each layer has a window."""
        return [self.spec.window(layer) > 0 for layer in range(self.spec.num_layers)]


@dataclass(frozen=True)
class ExportedAdapters:
    """A PEFT folder, as far as servers differ on it."""

    folder: Path
    kind: AdapterType
    config: AdapterJson
    """Its ``adapter_config.json``."""
    base: ExportedModel | None
    """The model below; None if that is no Hugging Face folder on this machine."""

    @property
    def named_base(self) -> str:
        """What it calls the model below."""
        return str(self.base.folder) if self.base else self.config.base_model_name_or_path or "BASE"

    @property
    def base_is_elsewhere(self) -> bool:
        """Whether the model below may be a folder of another machine, or on the Hub."""
        named = Path(self.named_base)
        return self.base is None and not named.is_dir() and len(named.parts) > 1

    @property
    def rank(self) -> int:
        """The rank of its matrices."""
        return int(getattr(self.config, "r", 0))

    @property
    def has_rslora(self) -> bool:
        """Whether the adapters are scaled by the root of the rank."""
        return bool(getattr(self.config, "use_rslora", False))

    def targets(self, *matrices: str) -> bool:
        """Return whether one of some matrices is adapted."""
        return any(matrix in self.config.target_modules for matrix in matrices)


@dataclass(frozen=True)
class Rule:
    """A trait that a server refuses, loses, or needs something for."""

    effect: Effect
    is_there: Callable[[Any], bool]
    """Whether an ``ExportedModel`` or ``ExportedAdapters`` has the trait."""
    says: str
    """What that means, with fields of the export in braces."""
    source: str
    """The file of the server's source that shows it."""
    model_types: tuple[str, ...] = ()
    """The types of models it is about; none for all."""
    was_run: bool = False
    """Whether it was seen in a run of the server, too."""

    def about(self, exported: ExportedModel | ExportedAdapters) -> str | None:
        """Return what it says about an export; None if that lacks the trait."""
        model = exported.base if isinstance(exported, ExportedAdapters) else exported
        if self.model_types and (model is None or model.model_type not in self.model_types):
            return None
        return self.says.format(it=exported) if self.is_there(exported) else None


@dataclass(frozen=True)
class Server:
    """A row of the table: a program that serves exported folders."""

    name: str
    version: str
    """The version whose source was read."""
    natively: Mapping[str, str]
    """The types of models that it computes itself, with the file of its source."""
    rules: tuple[Rule, ...]
    commands: tuple[str, ...]
    """How it serves a model, with paths in braces."""
    adapter_commands: tuple[str, ...]
    """How it serves adapters over their base."""
    through_transformers: Mapping[str, str] = field(default_factory=dict)
    """Those that it lets transformers compute, likewise."""
    adapter_rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class ServerFinding:
    """What a server makes of an export."""

    server: str
    """Its name and version."""
    verdict: Verdict
    notes: tuple[str, ...]
    """A line for each trait that it refuses or loses, then for what else to know."""
    commands: tuple[str, ...]
    """How to serve it there; none if it is refused."""

    @property
    def lines(self) -> list[str]:
        """What to print."""
        indented = [f"  {text}" for text in (*self.notes, *(f"$ {command}" for command in self.commands))]
        return [f"{self.server}: {self.verdict}", *indented]


def findings(folder: Path) -> list[ServerFinding]:
    """Return what each server makes of a folder that ``export-hf`` wrote.

    Reads ``config.json`` or ``adapter_config.json`` and the tokenizer's files, but no weights.

    Args:
        folder: a Hugging Face folder, or a PEFT folder; the traits of its base are known if that is on this machine.

    Raises:
        ConfigError: if ``config.json`` describes no model that we have.
        WeightsError: if another file cannot be read.
    """
    if is_adapter_folder(folder):
        adapters = _adapters(folder)
        return [_of_adapters(server, adapters) for server in SERVERS]
    model = _model(folder)
    return [_of_model(server, model) for server in SERVERS]


def _model(folder: Path) -> ExportedModel:
    spec = read_folder(str(folder.absolute()))
    return ExportedModel(folder, spec, _read(folder / _CONFIG))


def _adapters(folder: Path) -> ExportedAdapters:
    kind, config = read_adapter_config(folder)
    try:
        base = base_of(folder)
    except (HubError, WeightsError):
        return ExportedAdapters(folder, kind, config, None)
    return ExportedAdapters(folder, kind, config, _model(base) if (base / _CONFIG).is_file() else None)


def _read(file: Path) -> dict[str, Any]:
    try:
        own = own_file(file)
        content = json.loads(read_file(own, own.parent))
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}; export the folder again") from None
    except DAMAGE as error:
        raise WeightsError(f"cannot read {file}: {why_unreadable(error)}; export the folder again") from None
    if not isinstance(content, dict):
        raise WeightsError(f"cannot read {file}: it is not a mapping of keys to values; export the folder again")
    return content


def _of_model(server: Server, model: ExportedModel) -> ServerFinding:
    said = _said(server.rules, model)
    return _finding(server, model.model_type, said, _filled(server.commands, model.folder))


def _of_adapters(server: Server, adapters: ExportedAdapters) -> ServerFinding:
    base = adapters.base
    said = _said((*_ANY_ADAPTERS, *server.adapter_rules), adapters)
    if base is not None:
        said += [(effect, f"the base: {text}") for effect, text in _said(server.rules, base)]
    rank = next((rank for rank in _VLLM_RANKS if rank >= adapters.rank), adapters.rank)
    commands = _filled(server.adapter_commands, adapters.folder, base=adapters.named_base, rank=rank)
    return _finding(server, base.model_type if base else None, said, commands)


def _said(rules: Iterable[Rule], exported: ExportedModel | ExportedAdapters) -> list[tuple[Effect, str]]:
    pairs = [(rule.effect, rule.about(exported)) for rule in rules]
    return [(effect, text) for effect, text in pairs if text is not None]


def _finding(
    server: Server, model_type: str | None, said: list[tuple[Effect, str]], commands: tuple[str, ...]
) -> ServerFinding:
    effects = {effect for effect, _ in said}
    verdict: Verdict = "through transformers" if model_type in server.through_transformers else "natively"
    if "refused" in effects:
        verdict = "refused"
        commands = ()
    elif "loss" in effects:
        verdict = "with a loss"
    by_weight = [text for wanted in ("refused", "loss", "advice") for effect, text in said if effect == wanted]
    return ServerFinding(f"{server.name} {server.version}", verdict, tuple(by_weight), commands)


def _filled(commands: tuple[str, ...], folder: Path, base: str = "", rank: int = 0) -> tuple[str, ...]:
    """Return commands with their paths, quoted for a shell."""

    def gguf(path: str, ending: str = "") -> str:
        return shlex.quote(f"{Path(path).name}{ending}.gguf")

    words = {
        "folder": shlex.quote(str(folder)),
        "gguf": gguf(str(folder)),
        "small": gguf(str(folder), "-q4_k_m"),
        "vocabulary": gguf(str(folder), "-vocabulary"),
        "named": shlex.quote(f"{folder.name}={folder}"),
        "base": shlex.quote(base),
        "base_gguf": gguf(base),
        "rank": str(rank),
    }
    return tuple(command.format(**words) for command in commands)


# What rules ask


def _is_no_lora(adapters: ExportedAdapters) -> bool:
    return adapters.kind is not LORA


def _in_fp32(model: ExportedModel) -> bool:
    return bool(model.config.get("dtype") == "float32")


def _lacks_tokenizer(model: ExportedModel) -> bool:
    return not (model.tokenizer or model.has_sentencepiece)


def _is_scaled_in_windows(model: ExportedModel) -> bool:
    """Return whether layers with a window have the scaled rotary embedding of the others."""
    spec = model.spec
    return model.has_window and spec.rope_scaling is not None and not spec.windowed_rope_theta


def _other_windows(every: int) -> Callable[[Any], bool]:
    """Return whether other layers have a window than all but every n-th."""

    def is_other(model: ExportedModel) -> bool:
        fixed = [(layer + 1) % every > 0 for layer in range(model.spec.num_layers)]
        return model.has_window and model.windowed != fixed

    return is_other


def _scales_no_window(model: ExportedModel) -> bool:
    """Return whether layers rotate with scaling that a fixed pattern takes for ones with a window, which have none."""
    spec = model.spec
    return not model.has_window and spec.rope_scaling is not None


def _blends_otherwise(model: ExportedModel) -> bool:
    """Return whether YaRN's blend begins or ends elsewhere than with the paper's numbers, at whole pairs."""
    spec = model.spec
    scaling = spec.rope_scaling
    if not isinstance(scaling, YarnScaling):
        return False
    usual = YarnScaling(scaling.factor, scaling.original_context)
    return scaling.blend(spec.rotated_dim, spec.rope_theta) != usual.blend(spec.rotated_dim, spec.rope_theta)


def _has_other_amplitude(model: ExportedModel) -> bool:
    """Return whether YaRN multiplies cosines and sines by another number than the paper's."""
    scaling = model.spec.rope_scaling
    return isinstance(scaling, YarnScaling) and scaling.amplitude != yarn_amplitude(scaling.factor)


def _scales_scores_otherwise(model: ExportedModel) -> bool:
    """Return whether YaRN does something else than DeepSeek-V3's, which multiplies scores, but no cosines and sines."""
    spec = model.spec
    scaling = spec.rope_scaling
    return isinstance(scaling, YarnScaling) and (scaling.amplitude != 1.0 or spec.score_factor == 1.0)


def _other_scalar(model: ExportedModel) -> bool:
    """Return whether llama.cpp divides scores of a Gemma 3 by another number; it knows the 27B by its 62 layers."""
    spec = model.spec
    theirs = spec.hidden_size // spec.num_heads if spec.num_layers == 62 else spec.head_dim
    return (spec.query_pre_attn_scalar or spec.head_dim) != theirs


def _other_nope_layers(model: ExportedModel) -> bool:
    """Return whether other layers do not rotate than every fourth."""
    layers = range(model.spec.num_layers)
    return any(model.spec.rotates(layer) == (layer % 4 == 3) for layer in layers)


def _uneven_experts(model: ExportedModel) -> bool:
    """Return whether the layers with experts are not every n-th of a Llama 4."""
    spec = model.spec
    step = int(model.config.get("interleave_moe_layer_step", 1))
    return any(spec.has_experts(layer) != ((layer + 1) % step == 0) for layer in range(spec.num_layers))


def _has_temperatures(model: ExportedModel) -> bool:
    return bool(model.spec.query_temperature_scale and model.spec.nope_layers)


def _other_temperatures(model: ExportedModel) -> bool:
    """Return whether queries of layers that do not rotate have another temperature than Llama 4's."""
    spec = model.spec
    theirs = (0.1, 8192)
    return bool(spec.nope_layers) and (spec.query_temperature_scale, spec.query_temperature_floor) != theirs


def _norms_of_16_experts(model: ExportedModel) -> bool:
    """Return whether llama.cpp, which tells by the number of experts, is wrong about norms of queries and keys."""
    return model.spec.qk_norm == (model.spec.num_experts == 128)


def _misses_query_rank(model: ExportedModel) -> bool:
    """Return whether llama.cpp expects a latent of queries and there is none, or the other way round."""
    spec = model.spec
    is_lite = spec.num_layers in {26, 27} or (spec.num_layers, spec.vocab_size) == (48, 128_256)
    return is_lite == bool(spec.query_rank)


def _lacks_shared_experts(model: ExportedModel) -> bool:
    return model.spec.moe is not None and not model.spec.moe.shared_size


def _has_no_merges(model: ExportedModel) -> bool:
    """Return whether a text is its bytes, as the tokenizer of runs on bytes has it."""
    described = model.tokenizer.get("model", {})
    return described.get("type") == "BPE" and not described.get("merges")


def _needs_known_cuts(model: ExportedModel) -> bool:
    """Return whether llama.cpp has to know how a BPE cuts a text, which it tells by a hash of some tokens."""
    if _lacks_tokenizer(model) or _has_no_merges(model):
        return False
    if model.model_type in _BPE_ONLY:
        return True
    is_like_sentencepiece = model.model_type in _LIKE_LLAMA and model.tokenizer.get("model", {}).get("byte_fallback")
    return not (model.has_sentencepiece or is_like_sentencepiece)


def _has_unused_rows(model: ExportedModel) -> bool:
    """Return whether the embedding of a Gemma 3 has more rows than its ``tokenizer.json`` has tokens."""
    if model.has_sentencepiece or not model.tokenizer:
        return False
    vocabulary = model.tokenizer.get("model", {}).get("vocab", ())
    return len(vocabulary) + len(model.tokenizer.get("added_tokens", ())) < model.spec.vocab_size


def _has_two_templates(model: ExportedModel) -> bool:
    """Return whether the chat template of ``tokenizer_config.json`` is another than that of its own file.

    transformers takes the one of the file, and llama.cpp's converter the other one.
    """
    file = model.folder / _CHAT_TEMPLATE
    inside = model.tokenizer_config.get("chat_template")
    return inside is not None and file.is_file() and inside != file.read_text(errors="replace")


def _has_unknown_ends(model: ExportedModel) -> bool:
    """Return whether a text may end with a token that is not the tokenizer's EOS, nor one that llama.cpp knows."""
    ends = model.config.get("eos_token_id")
    if not isinstance(ends, list) or len(ends) < 2:
        return False
    eos = model.tokenizer_config.get("eos_token")
    known = {*_ENDS_IN_LLAMA_CPP, eos.get("content") if isinstance(eos, dict) else eos}
    names = {token["id"]: token["content"] for token in model.tokenizer.get("added_tokens", ())}
    return any(names.get(end) not in known for end in ends)


def _predicts_later(model: ExportedModel) -> bool:
    return bool(model.config.get("num_nextn_predict_layers"))


# The table

_WINDOWS_LOST = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Types whose window neither SGLang nor llama.cpp computes."""
_LIKE_LLAMA = ("llama", "mistral", "mixtral")
_BPE_ONLY = ("qwen3_moe", "olmo2", "olmo3", "gpt_oss", "llama4_text", "deepseek_v3")
"""Types whose converter reads no ``tokenizer.model``."""
_ENDS_IN_LLAMA_CPP = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>"),
    *("</s>", "<eos>", "[EOS]", "<EOT>", "_<EOT>", "[EOT]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""The tokens that end a text there by their names, src/llama-vocab.cpp."""
_MERGE = "merge them (export-hf --merged)"
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank``."""
_NO_LORA = f"adapters of lora.method={{it.kind.name}} are not computed; {_MERGE}"
_ANY_ADAPTERS = (
    Rule(
        "refused",
        lambda it: it.base is None and not it.base_is_elsewhere,
        f"the base {{it.named_base}} is no Hugging Face folder; {_MERGE}",
        "each of them reads the base's config.json",
    ),
    Rule(
        "advice",
        lambda it: it.base_is_elsewhere,
        "the base {it.named_base} is not on this machine: what becomes of its own traits is not known",
        "each of them reads the base's config.json",
    ),
)
_NO_TOKENIZER = "there is no tokenizer in {it.folder}; copy its files there"
_LATER_TOKENS = Rule(
    "advice",
    _predicts_later,
    "its modules that predict later tokens are used only if speculative decoding is asked for",
    "speculative decoding",
    ("deepseek_v3",),
)

VLLM = Server(
    name="vLLM",
    version="0.33.0",
    natively={  # vllm/model_executor/models/registry.py
        "llama": "llama.py",
        "mixtral": "mixtral.py",
        "mistral": "mistral.py",
        "qwen2": "qwen2.py",
        "qwen3": "qwen3.py",
        "qwen3_moe": "qwen3_moe.py",
        "gemma3_text": "gemma3.py",
        "gpt_oss": "gpt_oss.py",
        "llama4_text": "llama4.py",
        "deepseek_v3": "deepseek_v2.py",
    },
    through_transformers={"olmo2": "transformers/causal.py", "olmo3": "transformers/causal.py"},
    rules=(
        Rule("refused", _lacks_tokenizer, f"{_NO_TOKENIZER}, or add --skip-tokenizer-init", "engine/arg_utils.py"),
        Rule(
            "refused",
            lambda model: model.has_window and len(set(model.windowed)) > 1,
            "only a window in all layers or in none is computed, and here some layers have one",
            "qwen2.py, Qwen2Model",
            ("qwen2", "qwen3"),
        ),
        Rule(
            "loss",
            _other_windows(2),
            "every other layer, from the first on, has the window of {it.spec.sliding_window:,} tokens there, whatever "
            "layer_types says: longer texts are computed otherwise",
            "gpt_oss.py, _build_attention",
            ("gpt_oss",),
        ),
        Rule(
            "refused",
            _uneven_experts,
            "experts are expected in every n-th layer, and here they are in others",
            "llama4.py, Llama4DecoderLayer",
            ("llama4_text",),
        ),
        Rule(
            "loss",
            lambda model: _has_temperatures(model) and model.spec.max_context <= 32_768,
            "queries have no temperatures in a context of up to 32,768 tokens: texts of more than "
            "{it.spec.query_temperature_floor:,} are computed otherwise; add --override-generation-config "
            "'{{\"attn_temperature_tuning\": true}}'",
            "llama4.py, Llama4ForCausalLM",
            ("llama4_text",),
        ),
        Rule(
            "loss",
            lambda model: model.spec.rope_pairs == "halves",
            "adjacent numbers of a head are rotated as pairs, and here pairs are halves of it (rope_interleave=false)",
            "deepseek_v2.py, is_neox_style",
            ("deepseek_v3",),
        ),
        _LATER_TOKENS,
        Rule(
            "advice",
            _in_fp32,
            "weights in fp32 are computed in bf16 unless --dtype float32 is given",
            "vllm/config/model.py, _resolve_auto_dtype",
        ),
    ),
    commands=("vllm serve {folder}",),
    adapter_rules=(
        Rule("refused", _is_no_lora, _NO_LORA, "lora/peft_helper.py"),
        Rule(
            "refused",
            lambda it: it.rank > _VLLM_RANKS[-1],
            f"the rank {{it.rank}} is above {_VLLM_RANKS[-1]}; {_MERGE}",
            "config/lora.py, MaxLoRARanks",
        ),
        Rule(
            "refused",
            lambda it: it.targets("embed_tokens", "lm_head"),
            f"adapters of embed_tokens and lm_head are not computed for this type; {_MERGE}",
            "embedding_modules of each model",
            ("mistral", "qwen2", "gemma3_text", "gpt_oss", "deepseek_v3"),
        ),
        Rule(
            "refused",
            lambda it: it.targets("lm_head"),
            f"adapters of lm_head are not computed through transformers; {_MERGE}",
            "transformers/base.py, embedding_modules",
            ("olmo2", "olmo3"),
        ),
        Rule(
            "loss",
            lambda it: it.targets("kv_b_proj"),
            f"adapters of kv_b_proj are left out where a text is continued; {_MERGE}",
            "layers/attention/mla_attention.py, split_kv_b_proj",
            ("deepseek_v3",),
        ),
    ),
    adapter_commands=("vllm serve {base} --enable-lora --lora-modules {named} --max-lora-rank {rank}",),
)

SGLANG = Server(
    name="SGLang",
    version="0.5.23",
    natively={  # sglang/srt/models
        "llama": "llama.py",
        "mixtral": "mixtral.py",
        "mistral": "mistral.py",
        "qwen2": "qwen2.py",
        "qwen3": "qwen3.py",
        "qwen3_moe": "qwen3_moe.py",
        "olmo2": "olmo2.py",
        "gemma3_text": "gemma3_causal.py",
        "gpt_oss": "gpt_oss.py",
        "llama4_text": "llama4.py",
        "deepseek_v3": "deepseek_v2.py",
    },
    through_transformers={"olmo3": "transformers.py"},
    rules=(
        Rule("refused", _lacks_tokenizer, f"{_NO_TOKENIZER}, or add --skip-tokenizer-init", "server_args.py"),
        Rule(
            "loss",
            lambda model: model.has_window,
            "the window of {it.spec.sliding_window:,} tokens is not computed: longer texts are computed otherwise",
            "llama.py, mixtral.py, qwen2.py, qwen3.py, qwen3_moe.py: RadixAttention without sliding_window_size",
            _WINDOWS_LOST,
        ),
        Rule(
            "loss",
            lambda model: model.spec.rope_scaling is not None,
            "the scaling of the rotary embedding is not computed: texts are computed otherwise",
            "gemma3_causal.py, Gemma3Attention",
            ("gemma3_text",),
        ),
        Rule(
            "loss",
            lambda model: 0 < model.spec.attention_chunk < model.spec.max_context,
            "only a Llama 4 with images has its chunks, here of {it.spec.attention_chunk:,} tokens: longer texts are "
            "computed otherwise",
            "configs/model_config.py, is_local_attention_model",
            ("llama4_text",),
        ),
        Rule(
            "loss",
            _other_nope_layers,
            "every fourth layer does not rotate there, whatever no_rope_layers says: texts are computed otherwise",
            "llama4.py, Llama4Attention",
            ("llama4_text",),
        ),
        Rule(
            "refused",
            _uneven_experts,
            "experts are expected in every n-th layer, and here they are in others",
            "llama4.py, Llama4DecoderLayer",
            ("llama4_text",),
        ),
        _LATER_TOKENS,
        Rule(
            "advice",
            _in_fp32,
            "weights in fp32 are computed in fp16, or bf16 for a Gemma, unless --dtype float32 is given",
            "configs/model_config.py, _get_and_verify_dtype",
        ),
    ),
    commands=("python -m sglang.launch_server --model-path {folder}",),
    adapter_rules=(
        Rule("refused", _is_no_lora, _NO_LORA, "lora/lora_manager.py"),
        Rule(
            "loss",
            lambda it: it.has_rslora,
            f"adapters are multiplied by lora_alpha / r, and not by lora_alpha / sqrt(r) as rsLoRA's are; {_MERGE}",
            "lora/lora.py, LoRAAdapter",
        ),
    ),
    adapter_commands=("python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths {named}",),
)

LLAMA_CPP = Server(
    name="llama.cpp",
    version="of llama-cpp-python 0.3.36 (ggml 0.25.3, gguf 0.19.0)",
    natively={  # the converter's class, and the file of the model in src/models
        "llama": "conversion/llama.py, llama.cpp",
        "mixtral": "conversion/llama.py, llama.cpp",
        "mistral": "conversion/llama.py, llama.cpp",
        "qwen2": "conversion/qwen.py, qwen2.cpp",
        "qwen3": "conversion/qwen.py, qwen3.cpp",
        "qwen3_moe": "conversion/qwen.py, qwen3moe.cpp",
        "olmo2": "conversion/olmo.py, olmo2.cpp",
        "olmo3": "conversion/olmo.py, olmo2.cpp",
        "gemma3_text": "conversion/gemma.py, gemma3.cpp",
        "gpt_oss": "conversion/gpt_oss.py, openai-moe.cpp",
        "llama4_text": "conversion/llama.py, llama4.cpp",
        "deepseek_v3": "conversion/deepseek.py, deepseek2.cpp",
    },
    rules=(
        Rule("refused", _lacks_tokenizer, _NO_TOKENIZER, "conversion/base.py, get_vocab_base"),
        Rule(
            "refused",
            _has_no_merges,
            "a tokenizer of bytes, without merges, is none that its converter knows",
            "conversion/base.py, get_vocab_base_pre",
            was_run=True,
        ),
        Rule(
            "loss",
            _has_two_templates,
            "its converter takes the chat template of tokenizer_config.json, and not chat_template.jinja: chats are "
            "written otherwise; remove it there, or add --chat-template-file chat_template.jinja to llama-server",
            "gguf-py/gguf/vocab.py, SpecialVocab",
            was_run=True,
        ),
        Rule(
            "loss",
            _has_unknown_ends,
            "of several tokens that end a text, a GGUF file names one and llama.cpp knows some by name, but not all of "
            "these: give the others to the server as stop strings",
            "gguf-py/gguf/vocab.py, SpecialVocab; src/llama-vocab.cpp, special_eog_ids",
            was_run=True,
        ),
        Rule(
            "advice",
            _needs_known_cuts,
            "its converter refuses a BPE tokenizer that cuts texts unlike those of the models it knows; --vocab-only "
            "tells without the weights",
            "conversion/base.py, get_vocab_base_pre",
            was_run=True,
        ),
        Rule(
            "refused",
            _has_unused_rows,
            "the embedding has more rows than tokenizer.json has tokens: the converter cuts them off, and the file is "
            "refused; add tokens, or set architecture.vocab_size to their number",
            "conversion/gemma.py, Gemma3Model",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.has_window,
            "the window of {it.spec.sliding_window:,} tokens is not in a GGUF file: longer texts are computed "
            "otherwise",
            "conversion/llama.py, conversion/qwen.py: no add_sliding_window",
            _WINDOWS_LOST,
            was_run=True,
        ),
        Rule(
            "loss",
            _other_windows(6),
            "all layers but every sixth have the window of {it.spec.sliding_window:,} tokens there and rotate as such, "
            "whatever layer_types says: texts are computed otherwise",
            "src/models/gemma3.cpp, load_swa_pattern",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            _other_windows(2),
            "every other layer, from the first on, has the window of {it.spec.sliding_window:,} tokens there, whatever "
            "layer_types says: longer texts are computed otherwise",
            "src/models/openai-moe.cpp, load_swa_pattern",
            ("gpt_oss",),
            was_run=True,
        ),
        Rule(
            "loss",
            _is_scaled_in_windows,
            "layers with a window rotate without the scaling that they have here: texts are computed otherwise",
            "src/models/olmo2.cpp, gemma3.cpp",
            ("olmo3", "gemma3_text"),
            was_run=True,
        ),
        Rule(
            "loss",
            _scales_no_window,
            "all layers but every sixth rotate without the scaling that they have here: texts are computed otherwise",
            "src/models/gemma3.cpp, load_swa_pattern",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.has_window and model.spec.windowed_rope_theta not in {0.0, model.spec.rope_theta},
            "layers with a window rotate with the base {it.spec.rope_theta:g} of the others, and not with "
            "{it.spec.windowed_rope_theta:g}: texts are computed otherwise",
            "src/models/olmo2.cpp, graph",
            ("olmo3",),
            was_run=True,
        ),
        Rule(
            "loss",
            _blends_otherwise,
            "YaRN's beta_fast, beta_slow and truncate are not read, but taken as 32, 1 and true: texts are computed "
            "otherwise",
            "src/llama-context.cpp; ggml.c, ggml_rope_yarn_corr_dims",
            was_run=True,
        ),
        Rule(
            "loss",
            _has_other_amplitude,
            "YaRN's attention_factor is not read, but taken as the paper's: texts are computed otherwise",
            "src/llama-context.cpp, yarn_attn_factor",
            tuple(kind.name for kind in MODEL_TYPES if kind is not DEEPSEEK_V3),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.spec.moe is not None and model.spec.moe.gates == "softmax_all",
            "gates of the chosen experts always add up to 1, and here they do not (norm_topk_prob=false)",
            "src/models/qwen3moe.cpp, build_moe_ffn",
            ("qwen3_moe",),
            was_run=True,
        ),
        Rule(
            "loss",
            _other_scalar,
            "scores are divided by the root of the width of a head, whatever query_pre_attn_scalar says",
            "src/models/gemma3.cpp, f_attention_scale",
            ("gemma3_text",),
            was_run=True,
        ),
        Rule(
            "refused",
            lambda model: not model.spec.attention_chunk,
            "it aborts on a Llama 4 whose layers have no chunks",
            "src/llama-graph.cpp, f_attn_temp_scale",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.spec.attention_chunk not in {0, 8192},
            "chunks have 8,192 tokens there, and here {it.spec.attention_chunk:,}: longer texts are computed otherwise",
            "src/models/llama4.cpp, n_swa",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            _other_nope_layers,
            "every fourth layer does not rotate there, whatever no_rope_layers says: texts are computed otherwise",
            "src/models/llama4.cpp, n_no_rope_layer_step",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            _other_temperatures,
            "queries of layers that do not rotate have the temperatures of attn_scale=0.1 and floor_scale=8192: longer "
            "texts are computed otherwise",
            "src/models/llama4.cpp, f_attn_temp_scale",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "loss",
            _norms_of_16_experts,
            "queries and keys are normalised unless there are 128 experts, whatever use_qk_norm says",
            "src/models/llama4.cpp, use_kq_norm",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "refused",
            _uneven_experts,
            "experts are expected in every n-th layer, and here they are in others",
            "src/models/llama4.cpp, n_moe_layer_step",
            ("llama4_text",),
            was_run=True,
        ),
        Rule(
            "refused",
            _misses_query_rank,
            "queries of a model of 26 or 27 layers are expected without a latent (q_lora_rank), and of others with one",
            "src/models/deepseek2.cpp, is_lite",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "refused",
            _lacks_shared_experts,
            "a shared expert is expected in each layer with experts, and here there is none (n_shared_experts=0)",
            "src/models/deepseek2.cpp, load_arch_tensors",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda model: model.spec.rope_pairs == "halves",
            "adjacent numbers of a head are rotated as pairs, and here pairs are halves of it (rope_interleave=false)",
            "src/llama-model.cpp, llama_model_rope_type",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "loss",
            _scales_scores_otherwise,
            "YaRN is computed as in DeepSeek-V3, where mscale and mscale_all_dim are one number above 0, and here they "
            "are not: texts are computed otherwise",
            "src/llama-context.cpp, yarn_attn_factor",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "advice",
            _predicts_later,
            "its modules that predict later tokens are left out, which changes no logits",
            "conversion/deepseek.py, skip_mtp",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "advice",
            _in_fp32,
            "weights in fp32 are converted to fp16 unless --outtype f32 is given",
            "conversion/base.py, LlamaFileType.GUESSED",
            was_run=True,
        ),
    ),
    commands=(
        "python convert_hf_to_gguf.py {folder} --vocab-only --outfile {vocabulary}",
        "python convert_hf_to_gguf.py {folder} --outfile {gguf}",
        "llama-quantize {gguf} {small} Q4_K_M",
        "llama-server -m {small}",
    ),
    adapter_rules=(
        Rule("refused", _is_no_lora, _NO_LORA, "convert_lora_to_gguf.py", was_run=True),
        Rule(
            "loss",
            lambda it: it.has_rslora,
            f"adapters are multiplied by lora_alpha / r, and not by lora_alpha / sqrt(r) as rsLoRA's are; {_MERGE}",
            "src/llama-adapter.h, get_scale",
            was_run=True,
        ),
        Rule(
            "refused",
            lambda it: it.base is not None and it.base.spec.tied_embeddings and it.targets("lm_head"),
            f"a head that is the embedding has no adapters there; {_MERGE}",
            "src/llama-adapter.cpp",
            was_run=True,
        ),
        Rule(
            "refused",
            lambda it: it.base is not None and it.base.spec.tied_embeddings and it.targets("embed_tokens"),
            f"it aborts on adapters of an embedding that is the head, too; {_MERGE}",
            "ggml/src/ggml.c, ggml_mul_mat",
            was_run=True,
        ),
        Rule(
            "refused",
            lambda it: it.targets("kv_b_proj"),
            f"adapters of kv_b_proj are not converted; {_MERGE}",
            "convert_lora_to_gguf.py, LoraTorchTensor",
            ("deepseek_v3",),
            was_run=True,
        ),
        Rule(
            "loss",
            lambda it: it.targets("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
            f"adapters of q_proj, q_a_proj, q_b_proj and kv_a_proj_with_mqa are read, but not computed; {_MERGE}",
            "src/models/deepseek2.cpp, ggml_mul_mat in place of build_lora_mm",
            ("deepseek_v3",),
            was_run=True,
        ),
    ),
    adapter_commands=(
        "python convert_hf_to_gguf.py {base} --outfile {base_gguf}",
        "python convert_lora_to_gguf.py {folder} --base {base} --outfile {gguf}",
        "llama-server -m {base_gguf} --lora {gguf}",
    ),
)

SERVERS = (VLLM, SGLANG, LLAMA_CPP)
