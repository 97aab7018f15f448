"""Batches from the user's own code: any iterable of token tensors becomes a ``BatchSource``."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
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
        item: an array of tokens [B, S]; or a pair of inputs and next-token targets, both [B, S]; or a mapping with
            ``input_ids`` [B, S] and, optionally, ``labels`` (not shifted, as in Hugging Face; they are shifted here,
            and -100 is not trained on) and ``attention_mask`` (0 is not trained on). An array is a tensor or a numpy
            array; the values of a mapping may be lists too.
        vocab_size: tokens must be below it.

    Raises:
        DataError: if it has another form, a token is out of range, or ``labels`` are shifted already.
    """
    match item:
        case Batch():
            return item
        case {"input_ids": _}:
            tokens_BS, labels_BS = _tokens_and_labels(item)
        case Tensor() | np.ndarray():
            tokens_BS = labels_BS = _token_ids(item)
        case (Tensor() | np.ndarray() as inputs, Tensor() | np.ndarray() as targets):
            tokens_BS = _token_ids(inputs)
            targets_BS = _token_ids(targets)
            _check(tokens_BS, targets_BS, vocab_size)
            return Batch(tokens_BS, targets_BS, None)
        case _:
            raise DataError(
                f"a batch of type {type(item).__name__}{_keys(item)} is not understood; give token tensors [B, S], "
                "pairs of inputs and targets, or mappings with 'input_ids'"
            )
    _check(tokens_BS, labels_BS, vocab_size)
    return Batch(tokens_BS[:, :-1].contiguous(), labels_BS[:, 1:].contiguous(), None)


def _keys(item: object) -> str:
    return f" with keys {', '.join(map(repr, item))}" if isinstance(item, Mapping) else ""


def _tokens_and_labels(item: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    tokens_BS = _token_ids(item["input_ids"])
    labels_BS = _token_ids(item["labels"]) if "labels" in item else tokens_BS
    if "attention_mask" in item:
        mask_BS = _tensor(item["attention_mask"])
        _check_shapes(tokens_BS, mask_BS, "attention_mask")
        labels_BS = labels_BS.masked_fill(mask_BS == 0, IGNORE_INDEX)
    _check_shapes(tokens_BS, labels_BS, "labels")
    if _are_shifted(tokens_BS, labels_BS):
        raise DataError(
            "the labels of a batch are its input_ids shifted by one already, and would be shifted again: as in Hugging "
            "Face, labels are the input_ids themselves, or -100; give the pair (input_ids, labels) instead of a mapping"
        )
    return tokens_BS, labels_BS


def _are_shifted(tokens_BS: Tensor, labels_BS: Tensor) -> bool:
    """Return whether the labels are the tokens' successors, and not the tokens themselves."""
    is_learnt_BS = labels_BS != IGNORE_INDEX
    if (labels_BS == tokens_BS)[is_learnt_BS].all():
        return False
    is_learnt_BS = is_learnt_BS[:, :-1]  # the successor of a row's last token is in no row
    is_successor_BS = labels_BS[:, :-1] == tokens_BS[:, 1:]
    return bool(is_learnt_BS.any() and is_successor_BS[is_learnt_BS].all())


def _token_ids(values: Any) -> Tensor:
    """Return integers as int64; not all operators know the unsigned ones in which tokens are often stored."""
    ids = _tensor(values)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise DataError(f"tokens must be integers, not {ids.dtype}")
    return ids.long()


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError("the rows of a batch differ in length; pad them, with an attention_mask of 0 there") from None
    if array.dtype.kind not in "biuf":
        raise DataError(f"tokens must be integers, not {array.dtype}")
    return torch.tensor(array)


def _check(tokens_BS: Tensor, targets_BS: Tensor, vocab_size: int) -> None:
    """Refuse a batch unless it holds tokens of the model's vocabulary; targets may also be -100."""
    _check_shapes(tokens_BS, targets_BS, "targets")
    if not (targets_BS != IGNORE_INDEX).any():
        raise DataError("a batch has no target to train on: all of them are masked")
    wrong = torch.cat([tokens_BS.flatten(), targets_BS[targets_BS != IGNORE_INDEX].flatten()])
    wrong = wrong[(wrong < 0) | (wrong >= vocab_size)]
    if len(wrong):
        raise DataError(f"token {int(wrong[0])} is not in the model's vocabulary of {vocab_size}")


def _check_shapes(tokens_BS: Tensor, others_BS: Tensor, name: str) -> None:
    if tokens_BS.ndim != 2 or tokens_BS.shape != others_BS.shape or 0 in tokens_BS.shape:
        raise DataError(
            f"a batch has tokens {list(tokens_BS.shape)} and {name} {list(others_BS.shape)}; "
            "both must be [sequences, tokens]"
        )
