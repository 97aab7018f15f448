"""Generate the continuations of several prompts at once.

Prompts are padded on the left, so that all rows take their next token at the same place. A row that has ended leaves
the batch as soon as half of its rows have.
"""

# Shape suffixes: B batch, S sequence (J keys), V vocabulary, K key/value heads, H head dim

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from llama_core.attention import check_cached
from llama_core.errors import WeightsError
from llama_core.evaluation.inference.generation import Sampling, mask_with_earlier
from llama_core.evaluation.inference.scoring import NOT_FINITE, objective_of
from llama_core.models.attention import Attention
from llama_core.models.batch import IGNORE_INDEX, Batch, Documents
from llama_core.models.head import HeadInputs, logits
from llama_core.models.llama import Llama

PADDING = 0
"""The token before a shorter prompt; nothing attends to it."""
NO_TOKEN = -1
"""Stands for the next token where logits are not finite."""


class _PaddedCache:
    """The keys and values of all tokens of padded rows so far, in every block.

    Args:
        padding_B: the number of padding tokens at the beginning of each row.
        capacity: most tokens of a row.
    """

    def __init__(self, padding_B: Tensor, capacity: int) -> None:
        self._padding_B = padding_B
        self._capacity = capacity
        self._num_tokens = 0
        self._kept: dict[Attention, tuple[Tensor, Tensor]] = {}

    def batch(self, tokens_BS: Tensor) -> Batch:
        """Return the next tokens of the rows, with their positions in their own texts; all padding has position 0."""
        index_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) + self._num_tokens
        positions_BS = (index_S - self._padding_B[:, None]).clamp(min=0)
        return Batch(tokens_BS, torch.full_like(tokens_BS, IGNORE_INDEX), positions_BS)

    def places(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the places of the next tokens in the rows, [S]."""
        before = self._num_tokens
        self._num_tokens += num_tokens
        return torch.arange(before, self._num_tokens, device=device)

    def mask(
        self, positions_BS: Tensor | None, index_S: Tensor, dtype: torch.dtype, _: Documents | None, window: int
    ) -> Tensor | None:
        """Return the additive mask, [B, 1, S, J]; padding sees itself, since a softmax over nothing is NaN."""
        places_BS = index_S[None] if positions_BS is None else positions_BS
        return mask_with_earlier(places_BS, self._num_tokens, dtype, window)

    def with_earlier(self, block: Attention, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values kept of a block and the new ones, which are kept too, [B, K, J, H]."""
        if block not in self._kept:
            rooms = [new.new_empty(*new.shape[:2], self._capacity, new.shape[3]) for new in (k_BKSH, v_BKSH)]
            self._kept[block] = rooms[0], rooms[1]
        end = self._num_tokens
        begin = end - k_BKSH.shape[2]
        keys_BKJH, values_BKJH = self._kept[block]
        keys_BKJH[:, :, begin:end] = k_BKSH
        values_BKJH[:, :, begin:end] = v_BKSH
        return keys_BKJH[:, :, :end], values_BKJH[:, :, :end]

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all rows but some, by their places."""
        self._padding_B = self._padding_B[rows]
        self._kept = {block: (keys[rows], values[rows]) for block, (keys, values) in self._kept.items()}


@contextmanager
def _caching(model: Llama, cache: _PaddedCache) -> Iterator[None]:
    """Inside the block, the forwards of ``model`` continue each other."""
    check_cached(model.spec.attentions)
    blocks = [module for module in model.layers.modules() if isinstance(module, Attention)]
    of_model = model.sequence_index, model.attention_mask
    of_blocks = [block.with_earlier for block in blocks]
    model.sequence_index = cache.places
    model.attention_mask = cache.mask
    model.continues_rows = True
    for block in blocks:
        block.with_earlier = partial(cache.with_earlier, block)
    try:
        yield
    finally:
        model.sequence_index, model.attention_mask = of_model
        model.continues_rows = False
        for block, before in zip(blocks, of_blocks, strict=True):
            block.with_earlier = before


class _NextTokens:
    """Stands for the objective: returns the token that follows each row, [B], or ``NO_TOKEN`` after bad logits.

    Args:
        sampling: how each is chosen.
        generators: what each row draws from.
    """

    def __init__(self, sampling: Sampling, generators: Sequence[torch.Generator]) -> None:
        self._sampling = sampling
        self._generators = generators

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the tokens."""
        num_rows, length = batch.tokens_BS.shape
        last_B = torch.arange(1, num_rows + 1, device=batch.tokens_BS.device) * length - 1
        logits_BV = logits(head.at(last_B))
        if not logits_BV.isfinite().all():
            return torch.full((num_rows,), NO_TOKEN)
        if self._sampling.temperature == 0:
            return logits_BV.argmax(1)
        drawn = zip(logits_BV.cpu().double(), self._generators, strict=True)
        return torch.tensor([self._sampling.choose(logits_V, generator) for logits_V, generator in drawn])

    def count(self, batch: Batch) -> Tensor:
        """Return the number of rows."""
        return torch.tensor(len(batch.tokens_BS), device=batch.tokens_BS.device)

    def keep_rows(self, places: Sequence[int]) -> None:
        """Forget all rows but some, by their places."""
        self._generators = [self._generators[place] for place in places]


def generate_rows(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    is_end: Callable[[int, Sequence[int]], bool],
    sampling: Sampling | None = None,
    seeds: Sequence[int | None] = (),
) -> list[list[int]]:
    """Return the tokens that follow each prompt, up to and including the one with which its text ends.

    Every row has its own generator, so that draws do not depend on the other rows.

    Args:
        model: the whole model, which is evaluated without dropout.
        prompts: at least one, each with at least one token.
        num_tokens: the most tokens of a row.
        is_end: whether a text has ended, given the place of its prompt and the tokens that follow it so far.
        sampling: how each token is chosen; by default the likeliest.
        seeds: a seed for each row, instead of the one of ``sampling`` for all.

    Raises:
        PlanError: if its attention needs what no cache serves.
        WeightsError: if the model computes NaN or infinity.
    """
    sampling = sampling or Sampling()
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    cache = _PaddedCache(torch.tensor(padding, device=device), longest + num_tokens)
    chooser = _NextTokens(sampling, [_generator(seed) for seed in seeds or [sampling.seed] * len(prompts)])
    texts: list[list[int]] = [[] for _ in prompts]
    held = list(range(len(prompts)))
    """The prompts of the rows of the batch."""
    ended: set[int] = set()
    tokens_BS = torch.tensor(
        [[PADDING] * before + list(prompt) for before, prompt in zip(padding, prompts, strict=True)], device=device
    )
    model.eval()
    with torch.inference_mode(), _caching(model, cache), objective_of(model, chooser):
        for _ in range(num_tokens):
            chosen = model(tokens_BS, cache.batch(tokens_BS)).tolist()
            if NO_TOKEN in chosen:
                raise WeightsError(NOT_FINITE)
            for row, token in zip(held, chosen, strict=True):
                if row not in ended:
                    texts[row].append(token)
                    if is_end(row, texts[row]):
                        ended.add(row)
            going_on = [place for place, row in enumerate(held) if row not in ended]
            if not going_on:
                break
            tokens_BS = torch.tensor(chosen, device=device)[:, None]
            if 2 * len(going_on) <= len(held):
                rows = torch.tensor(going_on, device=device)
                cache.keep_rows(rows)
                chooser.keep_rows(going_on)
                tokens_BS = tokens_BS[rows]
                held = [held[place] for place in going_on]
    return texts


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()  # on the CPU, which draws the same tokens for every device
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator
