"""A mixture of named sources, and the order in which its rows are read: a pure function of seed, weights and place.

No array over the rows is made and none is saved: the source and the row of any place follow from its number, the same
under any number of ranks.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llama_core.config.settings import UNNAMED
from llama_core.config.stages import TrainingStage, source_name
from llama_core.data.packing import PackedDataset
from llama_core.errors import DataError
from llama_core.records.data_changes import DataChange

_WHOLE = 2**40
_BLOCK = 2**10
_ROUNDS = 6  # an even number, after which the unequal halves have their widths back
_ORDER = "blocks of 2**10 rows, Feistel network of 6 rounds"
"""The version of the order. A checkpoint of another one is refused."""


def shuffled(places: npt.NDArray[Any], length: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return where a permutation of ``range(length)``, drawn from a key, takes each place.

    A Feistel network permutes the next power of two, and is applied again to what it takes beyond ``length``.

    Args:
        places: numbers below ``length``, [places].
        length: how many numbers are permuted.
        keys: the key of the permutation that each place is taken through, [places].

    Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section 4 (cycle walking).
    """
    bits = (length - 1).bit_length()
    taken = places.astype(np.uint64)
    outside = np.ones(len(taken), np.bool_)
    while outside.any():
        taken[outside] = _permuted(taken[outside], bits, keys[outside])
        outside = taken >= length
    return taken.astype(np.int64)


def _permuted(values: npt.NDArray[np.uint64], bits: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return what a Feistel network makes of values of ``bits`` bits, with a key for each."""
    left_bits = np.uint64(bits // 2)
    right_bits = np.uint64(bits - bits // 2)
    left = values >> right_bits
    right = values & _ones(right_bits)
    for number in range(_ROUNDS):
        mixed = left ^ _scrambled(right ^ _scrambled(keys + np.uint64(number)))
        left, right = right, mixed & _ones(left_bits)
        left_bits, right_bits = right_bits, left_bits
    return left << right_bits | right


def _ones(bits: np.uint64) -> np.uint64:
    return np.uint64(2 ** int(bits) - 1)


def _scrambled(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output of SplitMix64 for each state (Steele et al. 2014, doi:10.1145/2714064.2660195)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Places(NamedTuple):
    """Where some rows of a mixture come from."""

    sources: npt.NDArray[np.int64]
    """Number of each one's source."""
    numbers: npt.NDArray[np.int64]
    """How many rows of the same source come before it."""


@dataclass(frozen=True)
class Blend:
    """In which order the rows of a mixture take turns.

    Rows come in blocks. After any number of whole blocks, each source has had its share of all rows so far, to less
    than one row. Within a block, the rows of each source are spread evenly.
    """

    bounds: tuple[int, ...]
    """Sums of the shares up to each source, in units of 2**-40; the last is 2**40."""

    @classmethod
    def of(cls, weights: Sequence[float]) -> "Blend":
        """Return the order for some weights: 0, or positive numbers of at least ``MIN_SHARE`` of their sum."""
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        return cls(tuple(round(_WHOLE * bound / total) for bound in accumulate(exact)))

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each source."""
        return tuple((end - begin) / _WHOLE for begin, end in pairwise((0, *self.bounds)))

    @cached_property
    def block(self) -> int:
        """Rows of a block: a power of two, of which every source that is read has at least one row."""
        smallest = min(after - before for before, after in pairwise((0, *self.bounds)) if after > before)
        # with less than a row in a block, the rounded counts of a source could go down
        return int(max(_BLOCK, 1 << (-(-_WHOLE // smallest) - 1).bit_length()))

    def counts(self, num_rows: int) -> tuple[int, ...]:
        """Return how many of the first rows are of each source."""
        num_blocks, rest = divmod(num_rows, self.block)
        before = self._of_blocks(num_blocks)
        sources = _spread(self._within(num_blocks)).sources[:rest]
        within = np.bincount(sources, minlength=len(self.bounds)).tolist()
        return tuple(start + count for start, count in zip(before, within, strict=True))

    def places(self, rows: npt.NDArray[Any]) -> Places:
        """Return the source of each row, and its number among the rows of that source, in any order of ``rows``."""
        sources = np.empty(len(rows), np.int64)
        numbers = np.empty(len(rows), np.int64)
        blocks, rest = np.divmod(rows, self.block)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            spread = _spread(self._within(block))
            sources[here] = spread.sources[rest[here]]
            numbers[here] = np.array(self._of_blocks(block))[sources[here]] + spread.numbers[rest[here]]
        return Places(sources, numbers)

    def _of_blocks(self, num_blocks: int) -> tuple[int, ...]:
        """Return how many rows of the first blocks are of each source: the bounds, rounded, partition them."""
        num_rows = num_blocks * self.block
        sums = [(num_rows * bound + _WHOLE // 2) // _WHOLE for bound in self.bounds]
        return tuple(after - before for before, after in pairwise((0, *sums)))

    def _within(self, block: int) -> tuple[int, ...]:
        """Return how many rows of a block are of each source."""
        before = self._of_blocks(block)
        after = self._of_blocks(block + 1)
        return tuple(end - start for start, end in zip(before, after, strict=True))


@lru_cache(maxsize=8)
def _spread(counts: tuple[int, ...]) -> Places:
    """Return the order of a block with so many rows of each source: those of each at even distances."""
    of_each = np.array(counts)
    sources = np.repeat(np.arange(len(counts)), of_each)
    numbers = np.arange(len(sources)) - np.repeat(np.cumsum(of_each) - of_each, of_each)
    order = np.argsort((numbers + 0.5) / of_each[sources], kind="stable")
    return Places(sources[order], numbers[order])


@dataclass(frozen=True)
class StagedBlend:
    """In which order the rows of a mixture take turns in a run whose shares change from stage to stage.

    Each stage is a blend of its own, in which every source goes on where the stages before it left it.
    """

    first_rows: tuple[int, ...]
    """The row of the run at which each stage begins, ascending."""
    blends: tuple[Blend, ...]
    """The order within each stage."""
    before: tuple[int, ...]
    """How many rows of each source were read before the first of these stages."""

    @cached_property
    def counts_before(self) -> tuple[tuple[int, ...], ...]:
        """How many rows of each source were read before each stage."""
        counts = [self.before]
        for blend, (begin, end) in zip(self.blends[:-1], pairwise(self.first_rows), strict=True):
            counts.append(_sums(counts[-1], blend.counts(end - begin)))
        return tuple(counts)

    def counts(self, row: int) -> tuple[int, ...]:
        """Return how many rows of each source are read before a row, which must not come before the first stage."""
        stage = self._stage(row)
        return _sums(self.counts_before[stage], self.blends[stage].counts(row - self.first_rows[stage]))

    def places(self, rows: npt.NDArray[Any]) -> Places:
        """Return the source of each row, and its number among the rows of that source, in any order of ``rows``."""
        sources = np.empty(len(rows), np.int64)
        numbers = np.empty(len(rows), np.int64)
        stages = np.searchsorted(self.first_rows, rows, side="right") - 1
        for stage in np.unique(stages).tolist():
            here = stages == stage
            within = self.blends[stage].places(rows[here] - self.first_rows[stage])
            sources[here] = within.sources
            numbers[here] = np.array(self.counts_before[stage])[within.sources] + within.numbers
        return Places(sources, numbers)

    def begun_at(self, row: int, before: Sequence[int]) -> "StagedBlend":
        """Return the same stages in a run that comes to them only at a row: what is left of them begins there.

        Args:
            row: the row.
            before: how many rows of each source were read before it.
        """
        stage = self._stage(row)
        return StagedBlend((row, *self.first_rows[stage + 1 :]), self.blends[stage:], tuple(before))

    def _stage(self, row: int) -> int:
        return bisect_right(self.first_rows, row) - 1


def _sums(counts: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
    return tuple(count + other for count, other in zip(counts, others, strict=True))


class Mixture:
    """The rows of several named sources, which a run reads in proportion to their weights.

    Rows are numbered through all sources, in alphabetical order of the names. Every epoch of a source has an order of
    its own, drawn from the seed, the name and the epoch, so that it does not depend on the other sources.

    Args:
        sources: the rows of each source. One that stages read in rows of another length is there once more for each of
            these lengths, under its ``part_name``: such rows have epochs of their own.
        weights: the weight of each source in the first stage, as ``Blend.of`` takes them.
        stages: the stages of the run after the first.
    """

    def __init__(
        self, sources: Mapping[str, PackedDataset], weights: Mapping[str, float], stages: Sequence[TrainingStage] = ()
    ) -> None:
        self.names = tuple(sorted(sources))
        self.sources = tuple(sources[name] for name in self.names)
        self.stages = tuple(stages)
        in_stages = [weights, *(stage.part_weights for stage in stages)]
        self.blend = StagedBlend(
            (0, *(stage.first_row for stage in stages)),
            tuple(Blend.of([of_stage.get(name, 0) for name in self.names]) for of_stage in in_stages),
            (0,) * len(self.names),
        )
        self.ends = np.cumsum([len(rows) for rows in self.sources])
        """The number of rows up to each source."""

    @property
    def is_named(self) -> bool:
        """Whether it is of named sources, not a single one."""
        return UNNAMED not in self.names

    @property
    def document_mask(self) -> bool:
        """Whether attention is kept inside each document."""
        return self.sources[0].document_mask

    @property
    def per_token(self) -> tuple[str, ...]:
        """Names of the values, beside targets and positions, that a row has for each token."""
        return self.sources[0].per_token

    @property
    def shares(self) -> dict[str, float]:
        """The share of the rows that each source has in the first stage."""
        return dict(zip(self.names, self.blend.blends[0].shares, strict=True))

    @cached_property
    def digest(self) -> str:
        """16 hex digits that two mixtures share exactly when they hold the same rows, with the same weights."""
        stages = zip(self.blend.first_rows, self.blend.blends, strict=True)
        weights = [f"{row} {blend.bounds}" for row, blend in stages]
        parts = [_ORDER, *weights, *self.names, *(rows.digest for rows in self.sources)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def share_of_whole_rows(self) -> float:
        """The share of the rows that are a single document, or part of one, without padding, in the stage with most."""
        return max(map(self._share_of_whole_rows, self.blend.blends))

    def _share_of_whole_rows(self, blend: Blend) -> float:
        shares = zip(blend.shares, self.sources, strict=True)
        return sum(share * rows.share_of_whole_rows for share, rows in shares if share)

    def __len__(self) -> int:
        """Return the number of rows of all sources."""
        return int(self.ends[-1])

    def row(self, index: int) -> tuple[npt.NDArray[Any], ...]:
        """Return tokens, targets and positions of a row, and its values for each token, each [seq_len]."""
        source = int(np.searchsorted(self.ends, index, side="right"))
        rows = self.sources[source]
        return rows.row(index - int(self.ends[source]) + len(rows))

    def rows_read(self, num_rows: int) -> dict[str, int]:
        """Return how many of the first rows of a run are of each source."""
        return dict(zip(self.names, self.blend.counts(num_rows), strict=True))

    @property
    def lengths(self) -> dict[str, int]:
        """How many rows an epoch of each source has."""
        return {name: len(rows) for name, rows in zip(self.names, self.sources, strict=True)}

    def check_epochs(self, limits: Mapping[str, float | None], read: Mapping[str, int]) -> None:
        """Refuse a run that reads a source more often than its ``max_epochs``.

        Args:
            limits: the ``max_epochs`` of each source.
            read: rows that the run reads of each source.

        Raises:
            DataError: naming the first such source, and how often it would be read.
        """
        num_rows = sum(read.values())
        lengths = self.lengths
        for source, most in limits.items():
            parts = [name for name in read if source_name(name) == source]
            epochs = sum(read[name] / lengths[name] for name in parts)
            if most is not None and epochs > most:
                count = sum(read[name] for name in parts)
                made = " and ".join(f"{lengths[name]:,}" for name in parts)
                raise DataError(
                    f"data.sources.{source}.max_epochs={most:g}: {100 * count / num_rows:.3g} % of the run's "
                    f"{num_rows:,} sequences are {epochs:.3g} epochs of the {made} that it makes; lower its "
                    "weight or training.steps, add text to it, or raise max_epochs"
                )

    def batch_size(self, row: int, first_batch_size: int) -> int:
        """Return the rows of the step that begins at a row, in a run whose first steps have ``first_batch_size``."""
        begun = [stage for stage in self.stages if stage.first_row <= row]
        return begun[-1].batch_size if begun else first_batch_size

    def order(self, seed: int) -> "MixtureOrder":
        """Return the order in which runs with this seed read the rows."""
        return MixtureOrder(self, seed)


class MixtureOrder:
    """The order in which a run reads the rows of a mixture: from a place in the run to the number of a row."""

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._mixture = mixture
        self._blend = mixture.blend
        names = (hashlib.sha256(f"{seed} {name}".encode()).digest() for name in mixture.names)
        self._keys = np.array([int.from_bytes(digest[:8]) for digest in names], np.uint64)
        self._digests = {
            name: hashlib.sha256(f"{_ORDER}\n{seed}\n{name}\n{rows.digest}".encode()).hexdigest()[:16]
            for name, rows in zip(mixture.names, mixture.sources, strict=True)
        }
        """What two runs share exactly when they read a source in the same order."""

    def __call__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the row at each place, in any order of places."""
        rows = np.empty(len(places), np.int64)
        sources, numbers = self._blend.places(places)
        for source in np.unique(sources).tolist():
            here = sources == source
            length = len(self._mixture.sources[source])
            epochs, indices = np.divmod(numbers[here], length)
            keys = _scrambled(_scrambled(epochs.astype(np.uint64)) ^ self._keys[source])
            first = int(self._mixture.ends[source]) - length
            rows[here] = first + shuffled(indices, length, keys)
        return rows

    def rows_read(self, row: int) -> dict[str, int]:
        """Return how many rows of each source the run reads before a row."""
        return dict(zip(self._mixture.names, self._blend.counts(row), strict=True))

    def state_dict(self, row: int) -> dict[str, Any]:
        """Return where each source is before a row: for a run that goes on with the same data, or with others."""
        return {
            "begun_at": self._blend.first_rows[0],
            "read_before": dict(zip(self._mixture.names, self._blend.before, strict=True)),
            "read": self.rows_read(row),
            "sources": self._digests,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read on in the order that ``state_dict`` was taken of, of the same mixture."""
        self._begin_at(state["begun_at"], state["read_before"])

    def change_data(self, row: int, state: Mapping[str, Any]) -> DataChange:
        """Begin at a row, where each source goes on that the order of ``state`` read in the same way.

        Args:
            row: the row.
            state: the ``state_dict`` of the order before, at this row.
        """
        names = self._mixture.names
        before: Mapping[str, str] = state["sources"]
        kept = {name: state["read"][name] for name in names if before.get(name) == self._digests[name]}
        self._begin_at(row, kept)
        return DataChange(
            row,
            kept,
            new=tuple(name for name in names if name not in before),
            changed=tuple(name for name in names if name in before and name not in kept),
            left=tuple(name for name in before if name not in names),
        )

    def _begin_at(self, row: int, read: Mapping[str, int]) -> None:
        self._blend = self._mixture.blend.begun_at(row, [read.get(name, 0) for name in self._mixture.names])
