"""Units of bytes, counts, FLOPs and durations, functions that format them and lists, and the divisors of a count.

Values are in plain bytes and seconds; units appear only in printed text.
GB is 1e9 bytes (data sheets), GiB is 2**30 bytes (allocators).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9
TFLOP = 10**12
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12, "KI": KIB, "MI": MIB, "GI": GIB}
"""What the suffixes of counts multiply by."""


def format_bytes(num_bytes: float) -> str:
    """Return ``num_bytes`` with a binary unit, such as ``'1.50 GiB'``."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Return ``count`` with a decimal suffix, such as ``'8.03B'``."""
    for suffix, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{suffix}"
    return f"{count:.0f}"


def listed(items: Sequence[object], most: int, between: str = " and ") -> str:
    """Return the first items as text, and how many more there are than ``most``."""
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return between.join([*map(str, items[:most]), *more])


def counted(number: int, one: str, ending: str = "s") -> str:
    """Return how many there are of something, such as ``'1 sequence'`` or ``'8,192 tokens'``."""
    return f"{number:,} {one}{'' if number == 1 else ending}"


def parse_count(text: str) -> float:
    """Return the number that ``text`` spells, such as ``'1.5T'``, ``'200B'``, ``'128k'``, ``'128Ki'`` or ``'1e9'``.

    k is 1,000 and Ki is 1,024, whatever is counted; capital and small letters are the same.

    Raises:
        ValueError: if it is not a positive number.
    """
    count = float(_spelled(text))
    if not 0 < count < math.inf:
        raise ValueError(text)
    return count


def parse_whole_count(text: str) -> int:
    """Return the whole number that ``text`` spells: digits, or as for ``parse_count``.

    Raises:
        ValueError: if it is no whole number, or not one of digits and beyond 64 bits.
    """
    with suppress(ValueError):
        return int(text)
    count = _spelled(text)
    if not 0 < count < 2**63 or count % 1:
        raise ValueError(text)
    return int(count)


def _spelled(text: str) -> Decimal:
    number = text[: -len(suffix)] if (suffix := _suffix(text)) else text
    try:
        spelled = Decimal(number) * _SIZES[suffix.upper()]
    except ArithmeticError:  # as Decimal calls a wrong text
        raise ValueError(text) from None
    if not spelled.is_finite():
        raise ValueError(text)
    return spelled


def _suffix(text: str) -> str:
    return next((text[-length:] for length in (2, 1) if text[-length:].upper() in _SIZES), "")


def format_duration(seconds: float) -> str:
    """Return ``seconds`` in readable form, such as ``'1 h 02 min'`` or ``'3.2 s'``."""
    if seconds < 60 or not math.isfinite(seconds):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def divisors(count: int) -> list[int]:
    """Return every number that divides ``count``, ascending."""
    low = [number for number in range(1, math.isqrt(count) + 1) if count % number == 0]
    return low + [count // number for number in reversed(low) if number * number != count]
