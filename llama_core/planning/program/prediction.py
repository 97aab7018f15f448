"""A prediction module as a program of sizes; read it beside ``models/mtp.py``."""

from functools import lru_cache

from llama_core.config.model_spec import LayerTraits
from llama_core.config.models import ModelSpec
from llama_core.planning.program.ends import LookUp
from llama_core.planning.program.layer import Layer
from llama_core.planning.program.operations import Size
from llama_core.planning.program.passes import Passes
from llama_core.planning.program.setting import Setting


class Prediction(LookUp, Layer):
    """One module: the look-up of the tokens ahead, and the block that reads them beside the hidden states.

    Its output are the normalised hidden states. The look-up is not run again where the block is.
    """

    def block(self, x: int) -> int:
        """Append the module."""
        spec = self.spec
        # one of the ends has the table among its weights, and this only its gradient
        size = self.table_size(is_trained=True)
        table = self.borrowed(size)
        embedded = self.embed(table)
        self.outside_block(embedded)
        parts = [self.norm(part, is_trained=True) for part in (embedded, x)]
        joined = self.result("join", parts, Size(2 * self.sizes[x].elements, self.itemsize))
        weight = self.weight(
            Size(spec.hidden_size * spec.joined_size, self.weight_itemsize),
            is_trained=True,
            is_partial=self.setting.sharded_sequence,
        )
        # a matrix that every tensor-parallel rank has whole is cast by itself
        read = self.cast(weight, self.itemsize) if self.setting.tp > 1 else weight
        self.end(*parts)
        return self.norm(super().block(self.product(joined, read, spec.hidden_size)), is_trained=True)


@lru_cache(maxsize=512)
def prediction_passes(spec: ModelSpec, traits: LayerTraits, setting: Setting) -> Passes:
    """Return the forward and the backward of a prediction module."""
    return Passes(Prediction(spec, traits, setting), splits_backward=setting.splits_backward)
