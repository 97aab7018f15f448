"""Watches the operations of a computation: which they are, the largest tensor they make, and traffic between ranks."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Records every operation, the most elements that any returned, and how many each collective received."""

    def __init__(self):
        super().__init__()
        self.called = []
        self.narrowed = []
        """Shapes of the fp32 tensors that were cast to half precision."""
        self.largest = 0
        self.received = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func)
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 and kwargs["dtype"].itemsize == 2:
            self.narrowed.append(args[0].shape)
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        self.received += [sum(sizes)] * (func.namespace == "c10d")
        return out
