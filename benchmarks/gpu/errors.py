"""Errors in one line."""

import re

LONGEST_LINE = 200
"""Characters of a line; a longer one loses its end."""
_ADVICE = re.compile(
    r"Set TORCH|For even more developer|You can suppress|import torch\._dynamo|torch\._dynamo\.config\.suppress"
    r"|CUDA kernel errors might|For debugging consider|Compile with `TORCH_USE_CUDA_DSA`|Search for `cuda"
    r"|Device-side assertion tracking|[\w.+]+: (registered at|fallthrough registered) "
)
"""How lines begin that torch adds to its messages, and that say nothing about the error."""


def in_one_line(error: BaseException) -> str:
    """Return an error's type and what it says: its last line, and the first one if that is another.

    Compilers say it in the last line, after a copy of the source; CUDA and torch's dispatcher in the first.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not _ADVICE.match(line)] or lines[:1] or ["it said nothing"]
    first, last = (
        line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in (telling[0], telling[-1])
    )
    return f"{type(error).__name__}: {first}" + (f" ... {last}" if last != first else "")
