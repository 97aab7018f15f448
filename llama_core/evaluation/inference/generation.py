"""Generate tokens one after another: a cache of keys and values, and the choice of each token.

The cache goes into functions that ``Llama`` and ``Attention`` let others set. It gives a block earlier keys and values,
and the block attends to them as it does to any. A model that trains never sees it.
"""

# Shape suffixes: B batch, S sequence (J keys), V vocabulary, D model dim, K key/value heads, H head dim

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from llama_core.attention import check_cached
from llama_core.errors import ConfigError, WeightsError
from llama_core.models.attention import Attention, document_mask
from llama_core.models.batch import Documents
from llama_core.models.head import HeadInputs, whole_head
from llama_core.models.layers import Linear, TokenEmbedding
from llama_core.models.llama import Llama


class Cache:
    """The keys and values of all tokens so far, in every block of a model.

    From then on each forward of the model continues the rows of the forwards before it. It may take any number of
    tokens, and computes what one forward over all of them would.

    Args:
        model: the whole model, changed in place; another cache replaces this one.

    Raises:
        PlanError: if its attention needs what no cache serves.
    """

    def __init__(self, model: Llama) -> None:
        check_cached(model.spec.attentions)
        self._num_tokens = 0
        self._kept: dict[Attention, tuple[Tensor, Tensor]] = {}
        model.sequence_index = self._places
        model.attention_mask = self._mask
        for module in model.layers.modules():
            if isinstance(module, Attention):
                module.with_earlier = partial(self._with_earlier, module)

    def _places(self, num_tokens: int, device: torch.device) -> Tensor:
        before = self._num_tokens
        self._num_tokens = self._num_tokens + num_tokens
        return torch.arange(before, self._num_tokens, device=device)

    def _mask(
        self, positions_BS: Tensor | None, index_S: Tensor, dtype: torch.dtype, _: Documents | None, window: int
    ) -> Tensor | None:
        places_BS = index_S[None] if positions_BS is None else positions_BS
        return mask_with_earlier(places_BS, self._num_tokens, dtype, window)

    def _with_earlier(self, block: Attention, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        if block in self._kept:
            keys_BKJH, values_BKJH = self._kept[block]
            k_BKSH = torch.cat((keys_BKJH, k_BKSH), dim=2)
            v_BKSH = torch.cat((values_BKJH, v_BKSH), dim=2)
        self._kept[block] = k_BKSH, v_BKSH
        return k_BKSH, v_BKSH


def mask_with_earlier(positions_BS: Tensor, num_tokens: int, dtype: torch.dtype, window: int) -> Tensor | None:
    """Return the additive mask of the last tokens of some rows, [B, 1, S, J]; None if they are all, and see all.

    Args:
        positions_BS: places of these tokens in their documents.
        num_tokens: those of a row so far.
        dtype: the dtype of the queries.
        window: tokens that a query sees, itself included; 0 for all from the beginning of its document.
    """
    num_earlier = num_tokens - positions_BS.shape[1]
    sees_all = not window or num_tokens <= window
    # the last token of one document from the beginning of a row is as far in it
    if sees_all and not num_earlier and bool((positions_BS[:, -1] == num_tokens - 1).all()):
        return None  # causal, without a mask
    return document_mask(positions_BS, dtype, window, num_earlier=num_earlier)


@dataclass(frozen=True)
class Sampling:
    """How each token is chosen: the likeliest one, or drawn at random.

    Raises:
        ConfigError: naming every value that is out of range or has no effect.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; otherwise the logits are divided by it before one is drawn."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens."""
    top_p: float | None = None
    """Draw from the fewest of the likeliest tokens that have at least this probability together."""
    seed: int | None = None
    """Repeats a draw; None draws anew each time."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(*problems)

    def _problems(self) -> Iterator[str]:
        if not 0 <= self.temperature < math.inf:
            yield f"temperature={self.temperature:g}: use 0 for the likeliest token, or a number above 0 to draw tokens"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k={self.top_k}: draw from at least 1 token"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p:g}: use a probability above 0 and up to 1"
        if self.seed is not None and not 0 <= self.seed < 2**63:
            yield f"seed={self.seed}: use an integer from 0 to 2**63 - 1"
        if self.temperature == 0:
            for name in ("top_k", "top_p", "seed"):
                if getattr(self, name) is not None:
                    yield f"{name} has no effect at temperature 0, which takes the likeliest token; use --temperature 1"

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the probability of each token to be drawn, [V]; ``temperature`` is above 0.

        Source: the order and the limits are those of transformers' logits warpers; Holtzman et al. 2020,
        arXiv:1904.09751, for ``top_p``.
        """
        scores_V = (logits_V - logits_V.max()) / self.temperature
        if self.top_k is not None:
            least = scores_V.topk(min(self.top_k, len(scores_V))).values[-1]
            scores_V = scores_V.masked_fill(scores_V < least, -math.inf)
        if self.top_p is not None:
            ascending_V, order_V = scores_V.sort()
            dropped_V = ascending_V.softmax(-1).cumsum(-1) <= 1 - self.top_p
            dropped_V[-1] = False
            scores_V = scores_V.masked_fill(dropped_V.scatter(0, order_V, dropped_V), -math.inf)
        return scores_V.softmax(-1)

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Return the token that follows."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        return int(torch.multinomial(self.probabilities(logits_V), 1, generator=generator))


def generate_tokens(
    model: Llama,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    sampling: Sampling,
    ends: Collection[tuple[int, ...]] = (),
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, each as soon as it is known not to begin an end.

    Args:
        model: the whole model; it gets a ``Cache``.
        prompt: at least one token.
        num_tokens: the most tokens to generate.
        sampling: how each is chosen.
        ends: sequences of tokens that end the text; they are not yielded.

    Raises:
        PlanError: if its attention needs what no cache serves.
        WeightsError: if the model computes NaN or infinity.
    """
    return up_to(ends, islice(_continue(model, prompt, sampling), num_tokens))


def _continue(model: Llama, prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    generator = torch.Generator()  # on the CPU, which draws the same tokens for every device
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    device = next(model.parameters()).device
    model.eval()
    Cache(model)
    model.head_inputs = _of_last_token
    tokens = list(prompt)
    while True:
        with torch.inference_mode():
            logits_V = model(torch.tensor([tokens], device=device))[0, -1].cpu().double()  # no temperature overflows
        if not logits_V.isfinite().all():
            raise WeightsError(
                "the model's next logits are not finite; its training diverged (choose an earlier checkpoint), or its "
                "weights are too large for fp16 (choose another dtype)"
            )
        tokens = [sampling.choose(logits_V, generator)]
        yield tokens[0]


def _of_last_token(x_BSD: Tensor, table: Linear | TokenEmbedding) -> HeadInputs:
    return whole_head(x_BSD[:, -1:], table)  # the logits of a whole prompt would be its largest tensor by far


def up_to(ends: Collection[tuple[int, ...]], tokens: Iterable[int]) -> Iterator[int]:
    """Yield tokens up to the first of ``ends``; hold back those that may be the beginning of one."""
    held: list[int] = []
    longest_first = sorted(ends, key=len, reverse=True)
    for token in tokens:
        held.append(token)
        for end in longest_first:
            if end == tuple(held[-len(end) :]):
                yield from held[: -len(end)]
                return
        while held and not any(tuple(held) == end[: len(held)] for end in ends):
            yield held.pop(0)
    yield from held
