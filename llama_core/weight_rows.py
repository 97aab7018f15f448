"""A weight as a row: what it is called, its shape, how tensor-parallel ranks divide it, and how it begins."""

from dataclasses import dataclass
from typing import Literal

Division = Literal["vocabulary", "outputs", "inputs", "stream", "latent", "heads", "router", "share", "adapted"]
"""How tensor-parallel ranks divide a weight.

* vocabulary: a table, by its rows
* outputs: a matrix, by its rows, or its bias; each rank computes some of the outputs
* inputs: a matrix, by its columns; each rank has some of the inputs, and the ranks sum up what they compute
* stream: not at all; it is applied to the residual stream, to a latent of it, or to what is added to it, like the bias
  of a matrix that is divided by its columns, which is added after that sum; or to a token's embedding beside it
* latent: not at all; it makes a narrow latent of the residual stream, of the tokens whose stream a rank has
* heads: as its module is applied to the heads, of which each rank has some: to each of them, and then not at all; or
  to all of them as one, and then as they are; so is a weight of attention itself, with entries for each head
* router: not at all; it is applied to whole tokens, but gets only a part of its gradient
* share: not at all; it is the bias of a matrix that is divided by ``inputs``, and each rank adds an equal share of it,
  since the ranks sum up
* adapted: a weight of an adapter, along the side of its matrix that is divided; one that lacks this side is whole on
  every rank, and gets a part of its gradient
"""
Beginning = Literal["ones", "zeros", "normal", "residual", "uniform", "standard", "adapted"]
"""Initial values.

* ones, zeros
* normal: with standard deviation 0.02
* residual: normal and smaller the deeper the model, for what writes to the residual stream
* uniform: within one over the root of the number of columns
* standard: normal with standard deviation one
* adapted: computed from the matrix that an adapter adapts, by the adapter's module
"""
INPUTS = "inputs"
"""In the shape of an adapter's weight: the columns of the matrix that it adapts."""
OUTPUTS = "outputs"
"""Likewise its rows."""


@dataclass(frozen=True)
class Weight:
    """A weight of the model, or one that every layer or every adapter has."""

    name: str
    """Our name; in a layer, the part after its number; in an adapter, the part after the name of its matrix."""
    stored_name: str
    """Hugging Face's or PEFT's name, likewise; ``{}`` stands for the number of an expert, each of which has a tensor
    there."""
    shape: tuple[str, ...]
    """Rows and columns of a matrix, the length of a vector; experts come first.

    A size is an attribute of ``ModelSpec``; in an adapter, a setting of ``lora``, ``INPUTS`` or ``OUTPUTS``.
    """
    divided: Division
    begins: Beginning = "normal"
    decayed: bool = True
    """Whether it is subject to weight decay."""
    only_with: str | None = None
    """The attribute of ``ModelSpec`` that is true of a model with this weight; None if all models have it."""

    @property
    def is_of_each_expert(self) -> bool:
        """Whether it has a part for each expert."""
        return "{}" in self.stored_name

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or one for each expert; otherwise it is a vector."""
        return len(self.shape) - self.is_of_each_expert == 2
