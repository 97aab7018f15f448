"""Settings of the training strategies: low-rank adapters on a model's matrices, or experts in its layers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from llama_core.config.section import Section
from llama_core.errors import ConfigError, Problem, did_you_mean

ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_MATRICES = ("gate_proj", "up_proj", "down_proj")
MATRICES = ATTENTION_MATRICES + FEED_FORWARD_MATRICES
"""The matrices of a layer, as Hugging Face calls them."""
EMBEDDING = "embed_tokens"
HEAD = "lm_head"
TARGETS = (*MATRICES, EMBEDDING, HEAD)
"""Every matrix that can have an adapter."""

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers but the head, which is all of ``MATRICES``."""

PARTS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "lora": ("lora", "trainable"),
    "moe": ("moe",),
    "hybrid": ("lora", "moe", "trainable"),
}
"""The keys of a run that belong to each strategy."""

GateSoftmax = Literal["chosen", "all"]

_Listed = Field(strict=False)
"""Marks a tuple that YAML and JSON write as a list."""


def _layers(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check some layers, and report wrong ones in one line."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("layers", "input should be a list of layers, or n for every n-th layer") from None


_Layers = Annotated[Annotated[tuple[int, ...], _Listed] | int, WrapValidator(_layers)]
"""Some layers, or every n-th layer."""


class _Strategy(Section):
    """Base class of the strategies' settings; reports all contradictions at once."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise ConfigError(*problems)
        return self

    def _problems(self) -> Iterator[Problem]:
        """Yield each problem beyond types and bounds; its ``keys`` are those of this section."""
        yield from ()


class LoRA(_Strategy):
    """Adapters: the model is frozen, and ``lora_alpha / lora_rank * B A`` is trained on top of each target matrix W.

    Raises:
        ConfigError: naming every target that is wrong.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters: rows of every A, and columns of every B."""
    lora_alpha: float | None = Field(None, gt=0)
    """The adapters' output is scaled by lora_alpha / lora_rank; default: by 2."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of an adapter's inputs to drop, drawn anew for every token."""
    target_modules: Annotated[tuple[str, ...], _Listed] = ATTENTION_MATRICES
    """Matrices with adapters: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, embed_tokens, lm_head.

    all-linear means the first seven.
    """

    @field_validator("target_modules", mode="before")
    @classmethod
    def _all_linear(cls, value: Any) -> Any:
        return MATRICES if value in (ALL_LINEAR, [ALL_LINEAR], (ALL_LINEAR,)) else value

    @property
    def in_layers(self) -> tuple[str, ...]:
        """Targets inside the layers."""
        return tuple(target for target in self.target_modules if target in MATRICES)

    @property
    def outside_layers(self) -> tuple[str, ...]:
        """Targets outside the layers: the embedding, the head or both."""
        return tuple(target for target in self.target_modules if target in {EMBEDDING, HEAD})

    @property
    def scale(self) -> float:
        """Factor on the adapters' output."""
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def _problems(self) -> Iterator[Problem]:
        keys = ("target_modules",)
        unknown = [target for target in self.target_modules if target not in TARGETS]
        if unknown or not self.in_layers:
            hint = did_you_mean(unknown[0], TARGETS) if unknown else ""
            some = f"some of {', '.join(MATRICES)}, or {ALL_LINEAR}, and otherwise only {EMBEDDING} or {HEAD}"
            yield Problem(f" must name {some}{hint}", "target_modules", str(list(self.target_modules)), keys)
        elif len(set(self.target_modules)) < len(self.target_modules):
            yield Problem(" names a matrix twice", "target_modules", str(list(self.target_modules)), keys)

    def misfits(self, shapes: Mapping[str, tuple[int, int]], *, tied: bool) -> Iterator[str]:
        """Yield a sentence for each reason why a model cannot have these adapters.

        Args:
            shapes: columns and rows of every matrix that can have an adapter.
            tied: whether the model's head shares the embedding's weights.
        """
        if tied and self.outside_layers:
            yield (
                f"lora.target_modules has {' and '.join(self.outside_layers)}, but this model uses one matrix as both "
                "embedding and head, so the adapter could not be merged; leave it out"
            )
        lowest, matrix = min((min(shapes[name]), name) for name in self.target_modules)
        if self.lora_rank > lowest:
            yield f"lora.lora_rank={self.lora_rank} is above the largest rank of {matrix}; use at most {lowest}"


class MoE(_Strategy):
    """A mixture of experts: in some layers, a router sends each token through a few of many feed-forwards.

    Raises:
        ConfigError: naming every setting that is wrong.

    Source: Jiang et al. 2024, arXiv:2401.04088, section 2.1; Fedus et al. 2021, arXiv:2101.03961, section 2.2, for the
    balance loss and its weight; Zoph et al. 2022, arXiv:2202.08906, section 3.2, for the z-loss and its weight.
    """

    num_experts: int = Field(8, ge=1)
    """Experts per layer, each a feed-forward as wide as the model's."""
    experts_per_token: int = Field(2, ge=1)
    """Experts that each token is routed to."""
    moe_layers: _Layers | None = None
    """Layers that have experts, counted from 0; a number n means every n-th layer, so n - 1 first; default: all."""
    gate_softmax: GateSoftmax = "chosen"
    """Softmax that makes the gates: over the chosen experts (as Mixtral's, they add up to 1), or over all experts."""
    balance_loss_coefficient: float = Field(0.01, ge=0)
    """Weight of the loss that spreads tokens evenly over experts, summed over layers; default: Switch Transformer's."""
    z_loss_coefficient: float = Field(0.001, ge=0)
    """Weight of the loss that keeps the router's logits small, summed over layers; default: ST-MoE's."""

    def _problems(self) -> Iterator[Problem]:
        layers = self.moe_layers
        if self.experts_per_token > self.num_experts:
            text = f" is not between 1 and num_experts={self.num_experts}"
            keys = ("experts_per_token", "num_experts")
            yield Problem(text, "experts_per_token", str(self.experts_per_token), keys)
        if isinstance(layers, int) and layers < 1:
            yield Problem(" is not at least 1; 1 gives every layer experts", "moe_layers", str(layers), ("moe_layers",))
        if isinstance(layers, tuple) and len(set(layers)) < max(1, len(layers)):
            text = " must name at least one layer, and none twice"
            yield Problem(text, "moe_layers", str(list(layers)), ("moe_layers",))

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        if isinstance(self.moe_layers, int):
            return (layer + 1) % self.moe_layers == 0
        return self.moe_layers is None or layer in self.moe_layers

    def misfits(self, name: str, num_layers: int) -> Iterator[str]:
        """Yield a sentence for each reason why a model of ``num_layers`` layers cannot have these experts."""
        layers = self.moe_layers
        if isinstance(layers, int) and layers > num_layers:
            yield f"moe_layers={layers} is above the {num_layers} layers of {name}, so none would have experts"
        outside = [layer for layer in layers if not 0 <= layer < num_layers] if isinstance(layers, tuple) else []
        if outside:
            yield f"moe_layers={outside} are not layers of {name}, which has layers 0 to {num_layers - 1}"


_ADAPTERS = {"learning_rate": 2e-4, "weight_decay": 0.0, "epochs": 2.0}
_WHOLE_MODEL = {"learning_rate": 2e-5, "epochs": 2.0}
TUNED = tuple(_ADAPTERS | _WHOLE_MODEL)
"""Settings of ``training`` with other defaults in fine-tuning."""


def fine_tuning_defaults(*, adapters: bool, trained_before: bool) -> dict[str, float]:
    """Return the settings of ``training`` whose defaults differ from those of training from scratch.

    Args:
        adapters: whether adapters are trained.
        trained_before: whether the run starts from trained weights.

    Source: adapters, Dettmers et al. 2023, arXiv:2305.14314, table 9 (7B and 13B); whole models, Touvron et al. 2023,
    arXiv:2307.09288, section 3.1. Adapters take their two epochs from the latter.
    """
    if adapters:
        return _ADAPTERS
    return _WHOLE_MODEL if trained_before else {}
