"""Batches from the user's own code: any iterable of token tensors becomes a ``BatchSource``."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from llama_core.errors import DataError
from llama_core.models.batch import IGNORE_INDEX, Batch


class LoaderBatches:
    """An endless supply of batches from a re-iterable loader, such as ``torch.utils.data.DataLoader``.

    A resumed run returns to its place by skipping the batches it has already used, so the loader must give the same
    batches in the same order on every pass.

    Raises:
        DataError: if the loader cannot be iterated twice.
    """

    def __init__(self, loader: Iterable[Any], vocab_size: int) -> None:
        check_starts_over(loader)
        self.loader = loader
        self.vocab_size = vocab_size
        self._taken = 0
        self._iterator: Iterator[Any] | None = None

    def next_batch(self) -> Batch:
        """Return the next batch, starting over at the loader's end.

        Raises:
            DataError: if the loader is empty or gives something that is not a batch of tokens.
        """
        if self._iterator is None:
            self._iterator = iter(self.loader)
        for item in self._iterator:
            self._taken += 1
            return as_batch(item, self.vocab_size)
        if self._taken == 0:
            raise DataError("the dataloader is empty; give at least one batch")
        self._iterator = None
        self._taken = 0
        return self.next_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches of the current pass were taken."""
        return {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position that ``state_dict`` returned."""
        self._taken = state["taken"]
        self._iterator = islice(iter(self.loader), self._taken, None)


def made(loader: Any) -> Any:
    """Return ``loader``, or its result if it is a function that makes a loader."""
    return loader() if callable(loader) and not isinstance(loader, Iterable) else loader


def check_starts_over(loader: object) -> None:
    """Raise ``DataError`` unless ``loader`` is an iterable that can start over, which a generator cannot."""
    if not isinstance(loader, Iterable):
        raise DataError(f"{type(loader).__name__!r} is not a dataloader; give an iterable of batches")
    if isinstance(loader, Iterator):
        raise DataError(
            f"a {type(loader).__name__} gives its batches only once; give an iterable that starts over, such as a "
            "list or a torch.utils.data.DataLoader"
        )


def as_batch(item: Any, vocab_size: int) -> Batch:
    """Return ``item`` as a batch.

    Args:
        item: a tensor of tokens [B, S]; or a pair of inputs and next-token targets, both [B, S]; or a mapping with
            ``input_ids`` [B, S] and, optionally, ``labels`` (not shifted, as in Hugging Face; they are shifted here,
            and -100 is not trained on) and ``attention_mask`` (0 is not trained on).
        vocab_size: tokens must be below it.

    Raises:
        DataError: if it has another form, or a token is out of range.
    """
    match item:
        case Batch():
            return item
        case Tensor() | {"input_ids": Tensor()}:
            tokens_BS, labels_BS = (item, item) if isinstance(item, Tensor) else _tokens_and_labels(item)
            _check(tokens_BS, labels_BS, vocab_size)
            return Batch(tokens_BS[:, :-1].long().contiguous(), labels_BS[:, 1:].long().contiguous(), None)
        case (Tensor() as tokens_BS, Tensor() as targets_BS):
            _check(tokens_BS, targets_BS, vocab_size)
            return Batch(tokens_BS.long(), targets_BS.long(), None)
    raise DataError(
        f"a batch of type {type(item).__name__}{_keys(item)} is not understood; give token tensors [B, S], "
        "pairs of inputs and targets, or mappings with 'input_ids'"
    )


def _keys(item: object) -> str:
    return f" with keys {', '.join(map(repr, item))}" if isinstance(item, Mapping) else ""


def _tokens_and_labels(item: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels_BS = item.get("labels", item["input_ids"])
    mask_BS = item.get("attention_mask")
    return item["input_ids"], labels_BS if mask_BS is None else labels_BS.masked_fill(mask_BS == 0, IGNORE_INDEX)


def _check(tokens_BS: Tensor, targets_BS: Tensor, vocab_size: int) -> None:
    """Refuse a batch unless it holds tokens of the model's vocabulary; targets may also be -100."""
    if tokens_BS.ndim != 2 or tokens_BS.shape != targets_BS.shape or 0 in tokens_BS.shape:
        raise DataError(
            f"a batch has tokens {list(tokens_BS.shape)} and targets {list(targets_BS.shape)}; "
            "both must be [sequences, tokens]"
        )
    for ids_BS in (tokens_BS, targets_BS):
        if ids_BS.is_floating_point() or ids_BS.is_complex() or ids_BS.dtype == torch.bool:
            raise DataError(f"tokens must be integers, not {ids_BS.dtype}")
    if not (targets_BS != IGNORE_INDEX).any():
        raise DataError("a batch has no target to train on: all of them are masked")
    wrong = torch.cat([tokens_BS.flatten(), targets_BS[targets_BS != IGNORE_INDEX].flatten()])
    wrong = wrong[(wrong < 0) | (wrong >= vocab_size)]
    if len(wrong):
        raise DataError(f"token {int(wrong[0])} is not in the model's vocabulary of {vocab_size}")
