"""CompleteP: the learning rate and initial values of a small model, for a wider and deeper one.

Each weight begins, learns and decays by factors of its own, so that what a step changes in the model's activations
depends neither on width nor on depth; the best learning rate then stays where it is. With ``w`` times the width and
``d`` times the depth of the base model:

========================  ==============  =========  ======  ===========
weight                    initial values  rate       decay   epsilon
========================  ==============  =========  ======  ===========
embedding                 1               1          1       1 / w
matrix inside a layer     1 / sqrt(w)     1 / w      w       1 / (w d)
of these, to the stream   1 / sqrt(w d)   1 / (w d)  w d     1 / w
vector inside a layer     1               1          1       1 / (w d)
final norm                1               1          1       1 / w
the same, tied            1 / w           1 / w      1       1
head                      1 / w           1 / w      w       1
========================  ==============  =========  ======  ===========

The publication multiplies what a layer adds to the residual stream by 1 / d, and the logits by 1 / w. Here the weights
themselves have these factors: AdamW makes the same model of a weight that begins and learns at a fraction of the size
as of one whose output is multiplied by it. So a checkpoint is a plain Llama. The initial values of what writes to the
stream are usually smaller the deeper a model is, which is why they have a root of ``d`` here in place of ``d``.

A scaled embedding (``ModelSpec.scaled_embedding``) would grow with the width, so its table begins and learns at
1 / sqrt(w) of the above, which its factor makes up for. A tied head has that from the table, and the other root of
1 / w from the final norm.

Source: Dey et al. 2025, arXiv:2505.01618, table 1 with alpha = 1; Yang et al. 2022, arXiv:2203.03466, for the widths.
"""

from typing import NamedTuple

from llama_core.config.model_weights import EMBEDDING_WEIGHT, FINAL_NORM_WEIGHT, HEAD_WEIGHT, weight_of
from llama_core.config.models import ModelSpec
from llama_core.weight_rows import Weight


class ParametrizationFactors(NamedTuple):
    """What a weight has of each, over what it has in the base model."""

    initial: float = 1.0
    """Size of the initial values."""
    rate: float = 1.0
    """Learning rate."""
    decay: float = 1.0
    """Weight decay, which the learning rate multiplies."""
    epsilon: float = 1.0
    """AdamW's epsilon."""


def factors_of(name: str, spec: ModelSpec) -> ParametrizationFactors:
    """Return the factors of the parameter called ``name``; all are one without ``spec.base``."""
    if spec.base is None:
        return ParametrizationFactors()
    width = spec.hidden_size / spec.base.width
    depth = spec.num_layers / spec.base.depth
    row = weight_of(name)
    # how many times larger a row of the embedding is in the stream than in the base model's
    enlarged = width**0.5 if spec.scaled_embedding else 1.0
    if row is HEAD_WEIGHT:
        return ParametrizationFactors(1 / width, 1 / width, width)
    if row is FINAL_NORM_WEIGHT and spec.tied_embeddings:
        return ParametrizationFactors(enlarged / width, enlarged / width, epsilon=1 / enlarged)
    if row is EMBEDDING_WEIGHT:
        return ParametrizationFactors(1 / enlarged, 1 / enlarged, enlarged, enlarged / width)
    if row is FINAL_NORM_WEIGHT:
        return ParametrizationFactors(epsilon=1 / width)
    return _factors_in_layer(row, width, depth)


def _factors_in_layer(row: Weight, width: float, depth: float) -> ParametrizationFactors:
    """Return the factors of a weight inside a layer, with so many times the width and the depth of the base."""
    if not row.is_matrix:
        return ParametrizationFactors(epsilon=1 / (width * depth))
    if row.begins == "residual":
        return ParametrizationFactors((width * depth) ** -0.5, 1 / (width * depth), width * depth, 1 / width)
    return ParametrizationFactors(width**-0.5, 1 / width, width, 1 / (width * depth))
