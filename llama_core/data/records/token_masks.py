"""Which of a record's token ids are trained on, where other fields of the record say so."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llama_core.data.bad_lines import MalformedRecordError, UnusableRecordError

LABELS = "labels"
"""The field of the ids to learn: those of the record, or ``UNCOUNTED``."""
UNCOUNTED = -100
"""What transformers and its trainers write for a token that does not count."""
ATTENTION_MASK = "attention_mask"
"""The field that is 0 where a token only fills up a row."""
COUNTING_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Fields that are 0 where a token does not count."""
MASKS = (ATTENTION_MASK, *COUNTING_MASKS)


class Names(Protocol):
    """What a source calls the fields."""

    def __getitem__(self, field: str, /) -> str:
        """Return the source's name of a field."""


def counted_tokens(
    ids: npt.NDArray[np.int64], given: Mapping[str, Any], names: Names
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    """Return a record's ids without padding, and which of them do not count in the loss; None if all do.

    Args:
        ids: the ids of a record [tokens].
        given: its labels and masks, by the formats' names of the fields.
        names: what messages call the fields.

    Raises:
        MalformedRecordError: if a mask or the labels are not one number for each id, or labels are other ids.
        UnusableRecordError: if no id counts, or the attention mask is not of one document.
    """
    ignored = np.zeros(len(ids), np.bool_)
    if LABELS in given:
        ignored |= _without_label(ids, given, names)
    for field in COUNTING_MASKS:
        if field in given:
            ignored |= _numbers(field, given, ids, names) == 0
    if ATTENTION_MASK in given:
        inside = _attended(_numbers(ATTENTION_MASK, given, ids, names), names[ATTENTION_MASK])
        ids = ids[inside]
        ignored = ignored[inside]
    if not ignored.any():
        return ids, None
    if ignored[1:].all():
        fields = " and ".join(repr(names[field]) for field in given if field != ATTENTION_MASK)
        raise UnusableRecordError("empty", f"no token counts by its {fields}")
    return ids, ignored


def _without_label(ids: npt.NDArray[np.int64], given: Mapping[str, Any], names: Names) -> npt.NDArray[np.bool_]:
    """Return which ids are not to be learnt by the labels of a record, a mask [tokens]."""
    labels = _numbers(LABELS, given, ids, names)
    uncounted: npt.NDArray[np.bool_] = labels == UNCOUNTED
    others = np.flatnonzero(~uncounted & (labels != ids))
    if len(others):
        place = int(others[0])
        raise MalformedRecordError(
            f"{names[LABELS]!r} has {labels[place]} for token {place + 1}, which is {ids[place]}; make each label "
            f"the token itself (not the next one), or {UNCOUNTED}"
        )
    return uncounted


def _attended(mask: npt.NDArray[Any], name: str) -> slice:
    """Return the tokens between the padding at both ends."""
    places = np.flatnonzero(mask)
    if not len(places):
        raise UnusableRecordError("empty", f"{name!r} is 0 everywhere")
    inside = slice(int(places[0]), int(places[-1]) + 1)
    others = mask[inside][mask[inside] != 1]
    if len(others):  # gaps, or the numbers of documents that somebody has packed
        raise UnusableRecordError("not supported", f"{name!r} is {others[0]} between other tokens")
    return inside


def _numbers(field: str, given: Mapping[str, Any], ids: npt.NDArray[np.int64], names: Names) -> npt.NDArray[Any]:
    try:
        numbers = np.asarray(given[field])
    except ValueError:  # lists of several lengths
        numbers = np.empty(0, object)
    if numbers.shape != ids.shape or numbers.dtype.kind not in "biu":
        raise MalformedRecordError(f"{names[field]!r} is not one number for each of the {len(ids):,} token ids")
    return numbers
