"""What a row of the table is, with the rules, questions and words that several rows have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llama_core.adapters.lora import LORA
from llama_core.hugging_face.servers.exported import ExportedAdapters, ExportedModel

Effect = Literal["refused", "loss", "advice"]


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
    """How it serves a model, with paths in braces, whose names ``findings`` lists."""
    adapter_commands: tuple[str, ...]
    """How it serves adapters over their base."""
    through_transformers: Mapping[str, str] = field(default_factory=dict)
    """Those that it lets transformers compute, likewise."""
    adapter_rules: tuple[Rule, ...] = ()
    lora_ranks: tuple[int, ...] = ()
    """The ranks of adapters that its command can name, ascending; none if it names none."""


def is_no_lora(adapters: ExportedAdapters) -> bool:
    """Return whether adapters are of another method than LoRA."""
    return adapters.kind is not LORA


def in_fp32(model: ExportedModel) -> bool:
    """Return whether the weights are in fp32."""
    return bool(model.config.get("dtype") == "float32")


def lacks_tokenizer(model: ExportedModel) -> bool:
    """Return whether the folder has no tokenizer."""
    return not (model.tokenizer or model.has_sentencepiece)


def other_windows(every: int) -> Callable[[Any], bool]:
    """Return whether other layers have a window than all but every n-th."""

    def is_other(model: ExportedModel) -> bool:
        fixed = [(layer + 1) % every > 0 for layer in range(model.spec.num_layers)]
        return model.has_window and model.windowed != fixed

    return is_other


def other_nope_layers(model: ExportedModel) -> bool:
    """Return whether other layers do not rotate than every fourth."""
    layers = range(model.spec.num_layers)
    return any(model.spec.rotates(layer) == (layer % 4 == 3) for layer in layers)


def uneven_experts(model: ExportedModel) -> bool:
    """Return whether the layers with experts are not every n-th of a Llama 4."""
    spec = model.spec
    step = int(model.config.get("interleave_moe_layer_step", 1))
    return any(spec.has_experts(layer) != ((layer + 1) % step == 0) for layer in range(spec.num_layers))


def predicts_later(model: ExportedModel) -> bool:
    """Return whether the model has modules that predict later tokens."""
    return bool(model.config.get("num_nextn_predict_layers"))


WINDOWS_LOST = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Types whose window neither SGLang nor llama.cpp computes."""
MERGE = "merge them (export-hf --merged)"
NO_LORA = f"adapters of lora.method={{it.kind.name}} are not computed; {MERGE}"
NO_RSLORA = f"adapters are multiplied by lora_alpha / r, and not by lora_alpha / sqrt(r) as rsLoRA's are; {MERGE}"
NO_TOKENIZER = "there is no tokenizer in {it.folder}; copy its files there"
LATER_TOKENS = Rule(
    "advice",
    predicts_later,
    "its modules that predict later tokens are used only if speculative decoding is asked for",
    "speculative decoding",
    ("deepseek_v3",),
)
