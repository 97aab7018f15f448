"""What a training strategy does to a model: low-rank adapters beside its matrices, or experts in its layers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field

from llama_core.config.section import Section
from llama_core.errors import ConfigError

ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_MATRICES = ("gate_proj", "up_proj", "down_proj")
MATRICES = ATTENTION_MATRICES + FEED_FORWARD_MATRICES
"""The matrices of a layer, as Hugging Face calls them."""


class _Checked(ABC):
    """Settings that are refused, all at once, where they contradict themselves."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(*problems)

    @abstractmethod
    def _problems(self) -> Iterator[str]:
        """Yield one sentence for each setting that is wrong."""


@dataclass(frozen=True)
class LoRA(_Checked):
    """Adapters: the model is frozen, and beside a matrix W, ``alpha / rank * B A`` is trained.

    Raises:
        ConfigError: naming every setting that is wrong.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    rank: int
    """Rows of every A, and columns of every B."""
    alpha: float
    """The adapters' output counts ``alpha / rank`` times."""
    targets: tuple[str, ...] = ATTENTION_MATRICES
    """The matrices of every layer that are adapted."""

    def _problems(self) -> Iterator[str]:
        if self.rank < 1:
            yield f"lora_rank={self.rank} is not at least 1"
        if self.alpha <= 0:
            yield f"lora_alpha={self.alpha} is not above 0"
        unknown = [target for target in self.targets if target not in MATRICES]
        if unknown or not self.targets:
            yield f"target_modules={list(self.targets)} has to name some of {', '.join(MATRICES)}"
        elif len(set(self.targets)) < len(self.targets):
            yield f"target_modules={list(self.targets)} names a matrix twice"


@dataclass(frozen=True)
class MoE(_Checked):
    """A mixture of experts: in some layers, each token goes through a few of many feed-forwards, chosen by a router.

    Raises:
        ConfigError: naming every setting that is wrong.

    Source: Jiang et al. 2024, arXiv:2401.04088, section 2.1.
    """

    num_experts: int
    """Feed-forwards of a layer, each as wide as the model's."""
    experts_per_token: int
    """How many of them a token goes through."""
    layers: tuple[int, ...] | None = None
    """The layers that have experts, counted from 0; None means all."""

    def _problems(self) -> Iterator[str]:
        if self.num_experts < 1:
            yield f"num_experts={self.num_experts} is not at least 1"
        elif not 1 <= self.experts_per_token <= self.num_experts:
            yield f"experts_per_token={self.experts_per_token} is not between 1 and num_experts={self.num_experts}"
        if self.layers is not None and len(set(self.layers)) < max(1, len(self.layers)):
            yield f"moe_layers={list(self.layers)} has to name some layers, each of them once"

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.layers is None or layer in self.layers


class LoraConfig(Section):
    """The adapters that strategy=lora trains."""

    lora_rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    lora_alpha: float | None = Field(None, gt=0)
    """The adapters' output counts lora_alpha / lora_rank times; default: twice."""
    target_modules: list[str] = Field(list(ATTENTION_MATRICES))
    """The matrices that are adapted, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj."""

    @property
    def adapters(self) -> LoRA:
        """The adapters, if the settings are those of any."""
        alpha = 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
        return LoRA(self.lora_rank, alpha, tuple(self.target_modules))


class MoeConfig(Section):
    """The experts that strategy=moe trains."""

    num_experts: int = Field(8, ge=1)
    """Feed-forwards of a layer, each as wide as the model's."""
    experts_per_token: int = Field(2, ge=1)
    """How many of them a token goes through."""
    moe_layers: list[int] | None = None
    """Layers that have experts, counted from 0; default: all."""

    @property
    def experts(self) -> MoE:
        """The experts, if the settings are those of any."""
        layers = None if self.moe_layers is None else tuple(self.moe_layers)
        return MoE(self.num_experts, self.experts_per_token, layers)
