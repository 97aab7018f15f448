"""Put something else in a place, and back what was there."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Inside the block, an attribute of a module or an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def replaced_item(mapping: MutableMapping[str, Any], key: str, value: object) -> Iterator[None]:
    """Inside the block, a key has another value; after it, the one from before, or none if there was none."""
    had_one = key in mapping
    before = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if had_one:
            mapping[key] = before
        else:
            del mapping[key]
