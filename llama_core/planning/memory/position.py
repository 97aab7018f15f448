"""Where a stage stands in an optimizer step, as far as the bytes of its rank depend on it."""

from typing import NamedTuple


class Position(NamedTuple):
    """A stage's position in the step, and what its rank holds on to, as far as the stage's own bytes depend on it."""

    is_first: bool
    """Whether the stage has not run before in this step."""
    accumulated: int
    """Parameters of the stage with gradients of earlier microbatches: usually none or all."""
    repeated: bool
    """Whether the stage has run two or more backwards."""
    root_is_gathered: bool = False
    """Whether an earlier action of the rank has gathered the root."""
    is_final: bool = False
    """Whether this is the rank's last backward of the step."""
    head_gathered: bool = False
    """Whether the stage's own head stayed gathered after an earlier forward."""
    head_has_gradient: bool = False
    """Whether the rank's last stage has run a backward; its head may be the embedding of the stage at work."""
    head_is_averaged: bool = False
    """Whether it has run two or more."""
    buffer: int = 0
    """The buffer of the last reduction, which ``fully_shard`` keeps until the next."""
