"""Settings of the training strategies: low-rank adapters on a model's matrices, or experts in its layers."""

import math
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

from llama_core.adapters.registry import ADAPTERS, DEFAULT_ADAPTER
from llama_core.adapters.traits import AdapterType
from llama_core.config import nf4
from llama_core.config.section import KnownName, Section
from llama_core.errors import ConfigError, Problem, did_you_mean
from llama_core.objectives.registry import OBJECTIVES
from llama_core.units import divisors
from llama_core.weight_rows import INPUTS, OUTPUTS, Weight

ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_MATRICES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""What latent attention has in place of some of these."""
FEED_FORWARD_MATRICES = ("gate_proj", "up_proj", "down_proj")
MATRICES = ATTENTION_MATRICES + FEED_FORWARD_MATRICES
"""The matrices of a layer, as Hugging Face calls them; all of them stand for ``LATENT_MATRICES`` too."""
EMBEDDING = "embed_tokens"
HEAD = "lm_head"
TARGETS = (*MATRICES, *LATENT_MATRICES, EMBEDDING, HEAD)
"""Every matrix that can have an adapter."""

_OF_ATTENTION = (*ATTENTION_MATRICES, *LATENT_MATRICES)
IN_LAYERS = (*MATRICES, *LATENT_MATRICES)
"""All of them that are in layers."""

ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers but the head, which is all of ``MATRICES``."""

PARTS: dict[str, tuple[str, ...]] = {
    "standard": (),
    "lora": ("lora", "trainable"),
    "moe": ("moe",),
    "hybrid": ("lora", "moe", "trainable"),
}
"""The keys of a run that belong to each strategy."""

_OF_PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo", "ppo", "grpo", "rlhf")
"""Names by which people ask for training on preferences or rewards."""


def not_a_strategy(name: object) -> str:
    """Return why a method of training on preferences is no strategy, and what is; empty for any other name."""
    if not isinstance(name, str) or name.lower() not in _OF_PREFERENCES:
        return ""
    which = f"a strategy says which weights are trained ({', '.join(PARTS)})"
    if name.lower() in OBJECTIVES.names():
        return f"{which}; what they are trained for is training.objective={name.lower()} (--objective)"
    return f"{which}; {name.lower()} is another thing, and not there yet"


Gates = Literal["softmax_chosen", "softmax_all", "sigmoid", "sigmoid_chosen"]

AdapterName = Annotated[str, KnownName(ADAPTERS)]
"""The name of a kind of adapter."""

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


DEFAULT_ALPHA_OF_RSLORA = 8.0
"""Gives the default rank the factor that it has without rsLoRA."""


class LoRA(_Strategy):
    """Adapters: the model is frozen, and a few weights are trained beside each target matrix.

    Raises:
        ConfigError: naming every target that is wrong, and every setting that another method takes.
    """

    method: AdapterName = DEFAULT_ADAPTER
    """What is trained beside a matrix: a name in `llama_core/adapters/registry.py`."""
    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters: rows of every A, and columns of every B."""
    lora_alpha: float | None = Field(None, gt=0)
    """The adapters' output is scaled by lora_alpha / lora_rank; default: by 2."""
    rslora: bool = False
    """Scale by lora_alpha / sqrt(lora_rank) instead, so that high ranks learn as fast; default lora_alpha: 8."""
    initial_values: Literal["random", "pissa"] = "random"
    """How A and B begin: random (B at zero), or pissa (as the principal part of the matrix, which is taken off it)."""
    base: Literal["plain", "nf4"] = "plain"
    """What the frozen matrices inside layers are held in: plain numbers, or nf4 (QLoRA: 4.1 bits each)."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of an adapter's inputs to drop, drawn anew for every token."""
    target_modules: Annotated[tuple[str, ...], _Listed] = ATTENTION_MATRICES
    """Matrices with adapters: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, embed_tokens, lm_head.

    all-linear means the first seven. With latent attention, the first four together mean its own: q_a_proj, q_b_proj,
    kv_a_proj_with_mqa, kv_b_proj and o_proj.
    """

    @field_validator("target_modules", mode="before")
    @classmethod
    def _all_linear(cls, value: Any) -> Any:
        return MATRICES if value in (ALL_LINEAR, [ALL_LINEAR], (ALL_LINEAR,)) else value

    @property
    def kind(self) -> AdapterType:
        """The method, with its traits."""
        return ADAPTERS.named(self.method)

    @property
    def in_layers(self) -> tuple[str, ...]:
        """Targets inside the layers."""
        latents = LATENT_MATRICES if self._means_all_of_attention else ()
        return (*(target for target in self.target_modules if target in IN_LAYERS and target not in latents), *latents)

    @property
    def _means_all_of_attention(self) -> bool:
        """Whether the targets stand for all matrices of attention, also where it makes keys and values of latents."""
        return set(ATTENTION_MATRICES) <= set(self.target_modules)

    @property
    def outside_layers(self) -> tuple[str, ...]:
        """Targets outside the layers: the embedding, the head or both."""
        return tuple(target for target in self.target_modules if target in {EMBEDDING, HEAD})

    @property
    def scale(self) -> float:
        """Factor on the adapters' output.

        Source: Kalajdzievski 2023, arXiv:2312.03732, for rsLoRA's.
        """
        if self.rslora:
            return self.alpha / math.sqrt(self.lora_rank)
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    @property
    def alpha(self) -> float:
        """``lora_alpha``, or what it is if it is not set; an int if it is whole, as PEFT writes it."""
        default = DEFAULT_ALPHA_OF_RSLORA if self.rslora else 2.0 * self.lora_rank
        alpha = self.lora_alpha or default
        return int(alpha) if alpha.is_integer() else alpha

    @property
    def take_principal_part(self) -> bool:
        """Whether adapters begin as the principal part of their matrix, and its module holds the rest."""
        return self.initial_values == "pissa"

    @property
    def in_folder(self) -> "LoRA":
        """The adapters that a folder of PEFT holds: over the whole matrix, PiSSA's are plain ones of twice the rank."""
        if not self.take_principal_part:
            return self
        factor = math.sqrt(2) if self.rslora else 2.0
        changes = {"lora_rank": 2 * self.lora_rank, "lora_alpha": factor * self.alpha, "initial_values": "random"}
        return self.model_copy(update=changes)

    def resolved(self, setting: str) -> Any:
        """Return a setting's value, without defaults that depend on others."""
        return self.alpha if setting == "lora_alpha" else getattr(self, setting)

    def weights(self, matrix: str) -> tuple[Weight, ...]:
        """Return the rows of the weights of a matrix's adapter."""
        return self.kind.of_embedding if matrix == EMBEDDING else self.kind.weights

    def shape(self, weight: Weight, columns: int, rows: int) -> tuple[int, ...]:
        """Return the shape of an adapter's weight, given the columns and rows of its matrix, or of a part of it."""
        sizes = {INPUTS: columns, OUTPUTS: rows}
        return tuple(sizes[size] if size in sizes else getattr(self, size) for size in weight.shape)

    def _problems(self) -> Iterator[Problem]:
        yield from self._needless()
        keys = ("target_modules",)
        unknown = [target for target in self.target_modules if target not in TARGETS]
        others = [target for target in self.outside_layers if target not in adaptable(self.kind)]
        if unknown or not self.in_layers:
            hint = ""
            if unknown:
                usual = (*MATRICES, EMBEDDING, HEAD)
                hint = did_you_mean(unknown[0], usual) or did_you_mean(unknown[0], LATENT_MATRICES)
            some = f"some of {', '.join(MATRICES)}, or {ALL_LINEAR}, and otherwise only {EMBEDDING} or {HEAD}"
            yield Problem(f" must name {some}{hint}", "target_modules", str(list(self.target_modules)), keys)
        elif len(set(self.target_modules)) < len(self.target_modules):
            yield Problem(" names a matrix twice", "target_modules", str(list(self.target_modules)), keys)
        elif others:
            text = f" has {' and '.join(others)}, which lora.method={self.method} does not adapt; leave it out"
            yield Problem(text, "target_modules", str(list(self.target_modules)), (*keys, "method"))
        elif self.take_principal_part and self.outside_layers:
            tables = " and ".join(self.outside_layers)
            text = f" has {tables}, but lora.initial_values=pissa is for the matrices of layers alone; leave it out"
            yield Problem(text, "target_modules", str(list(self.target_modules)), (*keys, "initial_values"))
        elif self.take_principal_part and self.base != "plain":
            text = ": lora.initial_values=pissa takes the principal part off plain numbers; leave one of them out"
            yield Problem(text, "base", self.base, ("base", "initial_values"))

    def _needless(self) -> Iterator[Problem]:
        """Yield which settings belong to another method."""
        taken = ("method", "target_modules", *self.kind.keys)
        for key, value in self.model_dump(exclude_defaults=True).items():
            if key not in taken:
                text = f" has no effect, because lora.method={self.method} takes {', '.join(taken[1:])}; leave it out"
                yield Problem(text, key, str(value), (key, "method"))

    def misfits(self, shapes: Mapping[str, tuple[int, int]], *, tied: bool) -> Iterator[str]:
        """Yield a sentence for each reason why a model cannot have these adapters.

        Args:
            shapes: columns and rows of every matrix that can have an adapter.
            tied: whether the model's head shares the embedding's weights.
        """
        in_layers = [name for name in shapes if name not in {EMBEDDING, HEAD}]
        uneven = [name for name in in_layers if shapes[name][0] % nf4.BLOCK]
        if self.base == "nf4" and uneven:
            yield (
                f"lora.base=nf4 needs rows of a multiple of {nf4.BLOCK} numbers, but {uneven[0]} has "
                f"{shapes[uneven[0]][0]} columns; use lora.base=plain"
            )
        if tied and self.outside_layers:
            yield (
                f"lora.target_modules has {' and '.join(self.outside_layers)}, but this model uses one matrix as both "
                "embedding and head, so the adapter could not be merged; leave it out"
            )
        own = {last_word(name) for name in in_layers}
        lacking = [name for name in self.in_layers if name in _OF_ATTENTION and name not in own]
        if lacking and not self._means_all_of_attention:
            yield (
                f"lora.target_modules has {' and '.join(lacking)}, which this model lacks; it has "
                f"{', '.join(name for name in IN_LAYERS if name in own)}, which {ALL_LINEAR} means"
            )
            return
        targets = {*self.in_layers, *self.outside_layers}
        lowest, matrix = min((min(shapes[name]), name) for name in shapes if last_word(name) in targets)
        for size in sorted(self.kind.sizes):
            rank = getattr(self, size)
            if rank > lowest:
                yield f"lora.{size}={rank} is above the largest rank of {matrix}; use at most {lowest}"


def last_word(name: str) -> str:
    """Return the word by which adapters call a matrix: ``up_proj`` for ``'shared_experts.up_proj'``."""
    return name.rpartition(".")[2]


def adaptable(kind: AdapterType) -> tuple[str, ...]:
    """Return every matrix that a kind of adapter can adapt."""
    embedding = (EMBEDDING,) if kind.of_embedding else ()
    head = (HEAD,) if kind.adapts_head else ()
    return (*IN_LAYERS, *embedding, *head)


class MoE(_Strategy):
    """A mixture of experts: in some layers, a router sends each token through a few of many feed-forwards.

    Raises:
        ConfigError: naming every setting that is wrong.

    Source: Jiang et al. 2024, arXiv:2401.04088, section 2.1; Fedus et al. 2021, arXiv:2101.03961, section 2.2, for the
    balance loss and its weight; Zoph et al. 2022, arXiv:2202.08906, section 3.2, for the z-loss and its weight.
    """

    num_experts: int = Field(8, ge=1)
    """Experts per layer, each a feed-forward."""
    expert_size: int = Field(0, ge=0)
    """Width of each; 0 for that of a dense layer's feed-forward, architecture.ffn_size."""
    shared_size: int = Field(0, ge=0)
    """Width of a feed-forward beside the experts, which every token goes through, as Llama 4's; 0 for none."""
    experts_per_token: int = Field(2, ge=1)
    """Experts that each token is routed to."""
    moe_layers: _Layers | None = None
    """Layers that have experts, counted from 0; a number n means every n-th layer, so n - 1 first; default: all."""
    gates: Gates = "softmax_chosen"
    """What makes gates of the router's logits: a softmax over the chosen experts (as Mixtral's, they add up to 1) or
    over all of them, or the sigmoid of each (as Llama 4's), or these over the sum of the chosen (as DeepSeek-V3's)."""
    gate_scale: float = Field(1.0, gt=0)
    """Factor on the gates, as 2.5 in DeepSeek-V3."""
    gate_inputs: bool = False
    """Whether a gate multiplies what its expert gets, as in Llama 4, in place of what it returns."""
    biases: bool = False
    """Whether the router and the matrices of experts have biases, as GPT-OSS's."""
    expert_groups: int = Field(1, ge=1)
    """Groups of equally many experts; a token chooses among those of its best groups only, as in DeepSeek-V3."""
    groups_per_token: int = Field(1, ge=1)
    """How many groups that are. A group's score is the sum of the scores of its two best experts."""
    balance_bias: bool = False
    """Whether each expert has a number that joins its score when experts are chosen, but not its gate, as in
    DeepSeek-V3. It balances experts without a loss."""
    balance_bias_rate: float = Field(0.001, ge=0)
    """By how much that grows after a step in which the expert got fewer tokens than the mean, and shrinks after one in
    which it got more; default: DeepSeek-V3's; 0: it stays."""
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
        if self.num_experts % self.expert_groups:
            legal = ", ".join(map(str, divisors(self.num_experts)))
            text = f" does not divide num_experts={self.num_experts}; use one of {legal}"
            yield Problem(text, "expert_groups", str(self.expert_groups), ("expert_groups", "num_experts"))
        elif self.groups_per_token > self.expert_groups:
            text = f" is not between 1 and expert_groups={self.expert_groups}"
            yield Problem(text, "groups_per_token", str(self.groups_per_token), ("groups_per_token", "expert_groups"))
        elif self.experts_to_choose_from < self.experts_per_token <= self.num_experts:
            text = (
                f" is more than the {self.experts_to_choose_from} experts of groups_per_token={self.groups_per_token}: "
                f"choose more of the expert_groups={self.expert_groups}, or fewer experts"
            )
            blamed = ("experts_per_token", "groups_per_token", "expert_groups")
            yield Problem(text, "experts_per_token", str(self.experts_per_token), blamed)

    @property
    def has_sigmoids(self) -> bool:
        """Whether the scores of experts are sigmoids of their logits; otherwise they are a softmax."""
        return self.gates in {"sigmoid", "sigmoid_chosen"}

    @property
    def chooses_by_scores(self) -> bool:
        """Whether scores of experts decide which are chosen, and are not in the order of their logits."""
        return self.balance_bias or self.expert_groups > 1

    @property
    def experts_to_choose_from(self) -> int:
        """Experts in the groups that a token chooses from."""
        return self.groups_per_token * self.num_experts // self.expert_groups

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        if isinstance(self.moe_layers, int):
            return (layer + 1) % self.moe_layers == 0
        return self.moe_layers is None or layer in self.moe_layers

    def with_widths(self, expert_size: int, shared_size: int) -> Self:
        """Return the same experts in other widths, where they have one of their own."""
        widths = {"expert_size": expert_size, "shared_size": shared_size}
        return self.model_copy(update={name: width for name, width in widths.items() if getattr(self, name)})

    def no_copies(self, ffn_size: int) -> str:
        """Return why experts cannot begin as copies of a dense layer's feed-forward; empty if they can."""
        if self.expert_size not in {0, ffn_size}:
            return (
                f"experts of moe.expert_size={self.expert_size} cannot begin as copies of feed-forwards of "
                f"{ffn_size} columns; set moe.expert_size=0, or begin with weights of a mixture"
            )
        if self.shared_size:
            return (
                f"moe.shared_size={self.shared_size} is of a feed-forward beside experts, which weights without "
                "experts lack; set moe.shared_size=0, or begin with weights of a mixture"
            )
        return ""

    def misfits(self, name: str, num_layers: int) -> Iterator[str]:
        """Yield a sentence for each reason why a model of ``num_layers`` layers cannot have these experts."""
        layers = self.moe_layers
        if isinstance(layers, int) and layers > num_layers:
            yield f"moe_layers={layers} is above the {num_layers} layers of {name}, so none would have experts"
        outside = [layer for layer in layers if not 0 <= layer < num_layers] if isinstance(layers, tuple) else []
        if outside:
            first = f"[{', '.join(map(str, outside[:3]))}, ...]" if len(outside) > 3 else str(outside)
            yield f"moe_layers={first} are not layers of {name}, which has layers 0 to {num_layers - 1}"


_ADAPTERS = {"learning_rate": 2e-4, "weight_decay": 0.0, "epochs": 2.0}
_WHOLE_MODEL = {"learning_rate": 2e-5, "epochs": 2.0}
_RATES_OF_ANSWERS = {"adapters": 5e-6, "whole": 1e-6}
"""Peak learning rates of objectives that read answers."""


def fine_tuning_defaults(*, adapters: bool, trained_before: bool, objective: object) -> dict[str, float]:
    """Return the settings of ``training`` whose defaults differ from those of training from scratch.

    Args:
        adapters: whether adapters are trained.
        trained_before: whether the run starts from trained weights.
        objective: the name of what is trained for, which may be unknown.

    Source: adapters, Dettmers et al. 2023, arXiv:2305.14314, table 9 (7B and 13B); whole models, Touvron et al. 2023,
    arXiv:2307.09288, section 3.1. Adapters take their two epochs from the latter. Pairs of answers: Rafailov et al.
    2023, arXiv:2305.18290, appendix B, for whole models; adapters take five times that.
    """
    tuned: dict[str, float] = {}
    if adapters:
        tuned = _ADAPTERS
    elif trained_before:
        tuned = _WHOLE_MODEL
    known = OBJECTIVES.find(objective) if isinstance(objective, str) else None
    if known is None or not known.records.holds_answers:
        return tuned
    one_epoch = {key: value for key, value in tuned.items() if key != "epochs"}
    return one_epoch | {"learning_rate": _RATES_OF_ANSWERS["adapters" if adapters else "whole"]}
