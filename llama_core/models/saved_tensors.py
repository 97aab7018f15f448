"""Read what ``torch.save`` has written as tensors and plain values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Made = Callable[..., Any] | tuple[Callable[..., Any], str]
"""A class that a file may hold; or a function to call instead, and the name of the class."""


@contextmanager
def only_tensors(*also: Made) -> Iterator[None]:
    """Let torch's restricted unpickler (``weights_only``) make tensors and plain values in the block, and ``also``.

    Elsewhere it makes everything that any imported library has called safe, such as a ``DeviceMesh``, which starts
    process groups.
    """
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(list(also))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
