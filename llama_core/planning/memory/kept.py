"""The activations that a stage keeps of one microbatch between its forward and its backward, layer by layer."""

from itertools import accumulate

from llama_core.planning.work import Stage, Work


class KeptActivations:
    """Bytes that one microbatch keeps on a stage.

    Args:
        stage: the stage.
        work: the model, the plan and the sequences.
    """

    def __init__(self, stage: Stage, work: Work) -> None:
        layers = stage.layers
        self.shared = stage.num_rotations * work.rotation_bytes + stage.num_masks * work.mask_bytes
        """Bytes that all layers share, and what a stage keeps of a tensor that it received."""
        if not stage.is_first and stage.modes[0] == "none" and work.setting.widens_norms:
            # the layer keeps only the fp32 tensor that its norm makes of it
            self.shared += work.stream_bytes
        below = self.shared + (stage.embedding.kept() if stage.embedding else 0)
        by_layer = [layer.kept(mode) for layer, mode in zip(layers, stage.modes, strict=True)]
        first_module = len(layers) - stage.num_modules
        for number in range(first_module + 1, len(layers)):
            # a module reads what the norm of the one before may have kept
            if stage.modes[number - 1] == "none" and layers[number].keeps_input(stage.modes[number]):
                by_layer[number] -= work.stream_bytes
        self.below = list(accumulate(by_layer, initial=below))
        """Bytes kept before each layer, and before the final norm."""
        self.total = self.below[-1] + (stage.final_norm.kept() if stage.final_norm else 0)
        """Bytes of activations that a forward keeps for its backward."""
        norm_keeps = stage.final_norm is not None and stage.final_norm.keeps_input("none")
        if stage.num_modules and norm_keeps and layers[first_module].keeps_input(stage.modes[first_module]):
            self.total -= work.stream_bytes  # both keep the same
        self.loss = stage.head.kept() if stage.head else 0
        """Bytes that the loss keeps for its backward."""
        deferred_by_layer = (layer.kept_deferred for layer in layers)
        self._deferred_below = list(accumulate(deferred_by_layer, initial=0))
        self.deferred = self._deferred_below[-1]
        """Bytes kept for the weight gradients of a split backward."""

    def deferred_below(self, layer: int) -> int:
        """Return the bytes kept for the weight gradients of the layers before the stage's ``layer``-th."""
        return self._deferred_below[layer]

    def deferred_above(self, layer: int) -> int:
        """Return the bytes kept for the weight gradients of the layers after the stage's ``layer``-th."""
        return self.deferred - self._deferred_below[layer + 1]
