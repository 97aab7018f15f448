"""torchtitan 0.2.2 on one device, set up like its own trainer: the peer of ``benchmarks.gpu``.

Its model needs these wheels: torchtitan 0.2.2, tyro, docstring-parser, typeguard. Empty modules replace the packages
that it imports only for data sets.
"""

import importlib.util
import sys
import types
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import torch

from llama_core.config.models import ModelSpec
from llama_core.models.batch import Batch


class _WithoutData(MetaPathFinder, Loader):
    """Stands in for torchtitan's data packages if they are not installed."""

    NAMES = ("datasets", "fsspec", "tokenizers", "tomli", "torchdata")

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_missing = name.partition(".")[0] in self.NAMES
        return importlib.util.spec_from_loader(name, self, is_package=True) if is_missing else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = self._empty_class
        return module

    @staticmethod
    def _empty_class(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


sys.meta_path.append(_WithoutData())

from torchtitan.components.loss import cross_entropy_loss  # type: ignore[import-not-found]  # noqa: E402
from torchtitan.config import ActivationCheckpoint  # type: ignore[import-not-found]  # noqa: E402
from torchtitan.distributed.activation_checkpoint import apply_ac  # type: ignore[import-not-found]  # noqa: E402
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list  # type: ignore[import-not-found]  # noqa: E402
from torchtitan.models.llama3.model.args import TransformerModelArgs  # type: ignore[import-not-found]  # noqa: E402
from torchtitan.models.llama3.model.model import Transformer  # type: ignore[import-not-found]  # noqa: E402

FFN_MULTIPLE = 32
"""torchtitan rounds the feed-forward's width up to a multiple of this; all our widths already are multiples."""


class TitanSteps:
    """Optimizer steps of torchtitan's Llama 3: selective recomputation, compiled blocks and loss, AMP, fused AdamW.

    Args:
        device: where it runs.
        spec: the shape; its head must not be tied to the embedding.
        seq_len: tokens per row.
        batches: the batches of our own steps; each row is one document.
    """

    def __init__(self, device: torch.device, spec: ModelSpec, seq_len: int, batches: Sequence[Batch]) -> None:
        arguments = TransformerModelArgs(
            dim=spec.hidden_size,
            n_layers=spec.num_layers,
            n_heads=spec.num_heads,
            n_kv_heads=spec.num_kv_heads,
            vocab_size=spec.vocab_size,
            multiple_of=FFN_MULTIPLE,
            ffn_dim_multiplier=(spec.ffn_size + 0.5) / int(8 * spec.hidden_size / 3),
            rope_theta=spec.rope_theta,
            norm_eps=spec.norm_eps,
            max_seq_len=seq_len,
        )
        with torch.device("meta"):
            model = Transformer(arguments)
        width = model.layers["0"].feed_forward.w1.out_features
        if width != spec.ffn_size:
            raise ValueError(f"torchtitan's feed-forward is {width} wide, not {spec.ffn_size}")
        recompute = ActivationCheckpoint(mode="selective", selective_ac_option="op")
        apply_ac(model, recompute, model_compile_enabled=True, op_sac_save_list=_op_sac_save_list)
        for block in model.layers.values():
            block.compile(fullgraph=True)
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=device)
        self.model = model
        self.batches = batches
        self.loss: Any = torch.compile(cross_entropy_loss)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.mixed_precision = partial(torch.autocast, device.type, dtype=torch.bfloat16)
        self.number = 0

    def take(self) -> None:
        """Run the next step."""
        batch = self.batches[self.number % len(self.batches)]
        self.number += 1
        with self.mixed_precision():
            loss = self.loss(self.model(batch.tokens_BS), batch.targets_BS) / batch.targets_BS.numel()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
