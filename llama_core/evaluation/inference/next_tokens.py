"""What follows in some places of a row of tokens, as this engine and as transformers predict it from the same files."""

# Shape suffixes: S sequence, P places, V vocabulary

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_core.errors import WeightsError
from llama_core.evaluation.inference.scoring import objective_of
from llama_core.hugging_face.peft import base_of, is_adapter_folder
from llama_core.hugging_face.pretrained import is_checkpoint
from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs, logits
from llama_core.models.llama import Llama

_FROM_HERE = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is downloaded, and no code of the folder is run."""


class _AtPlaces:
    """Stands for the objective: returns the logits of some places, [P, V]."""

    def __init__(self, places_P: Tensor) -> None:
        self._places_P = places_P

    def loss(self, head: HeadInputs, batch: Batch) -> Tensor:
        """Return the logits."""
        return logits(head.at(self._places_P))

    def count(self, batch: Batch) -> Tensor:
        """Return the number of places."""
        return torch.tensor(len(self._places_P))


@torch.no_grad()
def logits_of(model: Llama, row: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the logits of the tokens after some places of a row that is one document, [P, V] in fp32 on the CPU."""
    device = next(model.parameters()).device
    model.eval()
    tokens_BS = torch.tensor([row], device=device)
    with objective_of(model, _AtPlaces(torch.tensor(places, device=device))):
        logits_PV: Tensor = model(tokens_BS, Batch(tokens_BS, tokens_BS, None))
        return logits_PV.float().cpu()


class TheirModel:
    """A folder's model as transformers opens it, or its adapters as PEFT does, computed in fp32.

    Args:
        folder: the folder; none of its code is run.
        device: cpu or cuda.

    Raises:
        WeightsError: if the package cannot open the folder, or finds other weights there than its model has.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._device = device
        is_adapter = is_adapter_folder(folder)
        whole = base_of(folder) if is_adapter else folder
        if is_adapter and is_checkpoint(whole):
            raise WeightsError(
                f"PEFT cannot open {folder}: its base {whole} is a checkpoint; export that run too and name its folder "
                "in adapter_config.json, or export this one with --merged"
            )
        transformers = _quiet_transformers()
        with _opening(folder, "transformers"):
            self._model, found = transformers.AutoModelForCausalLM.from_pretrained(
                str(whole), dtype=torch.float32, output_loading_info=True, **_FROM_HERE
            )
        for kind, names in found.items():
            if names and not is_adapter:
                first = min(map(str, names))
                raise WeightsError(f"transformers finds {kind.replace('_', ' ')} in {folder}: {first} and others")
        if is_adapter:
            import peft

            with _opening(folder, "peft"):
                self._model = peft.PeftModel.from_pretrained(self._model, str(folder))
        self._model.to(device).eval()

    @torch.no_grad()
    def logits_of(self, row: Sequence[int], places: Sequence[int]) -> Tensor:
        """Return the same as ``logits_of``."""
        tokens_BS = torch.tensor([row], device=self._device)
        found = self._model(tokens_BS, logits_to_keep=torch.tensor(places, device=self._device), use_cache=False)
        logits_PV: Tensor = found.logits[0]
        return logits_PV.float().cpu()


def their_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer as transformers opens it.

    Raises:
        WeightsError: if transformers cannot open it.
    """
    transformers = _quiet_transformers()
    with _opening(folder, "transformers"):
        return transformers.AutoTokenizer.from_pretrained(str(folder), **_FROM_HERE)


def _quiet_transformers() -> Any:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@contextmanager
def _opening(folder: Path, package: str) -> Iterator[None]:
    """Turn the error of a package of others into one line about a folder; its warnings are for its developers."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        raise WeightsError(f"{package} cannot open {folder}: {' '.join(str(error).split())}") from None
