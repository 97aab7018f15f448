"""What follows in some places of a row of tokens, as this engine and as transformers predict it from the same files."""

# Shape suffixes: S sequence, P places, V vocabulary

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_core.errors import EnvironmentMismatchError, WeightsError
from llama_core.evaluation.inference.scoring import objective_of
from llama_core.hugging_face.peft import ADAPTER_CONFIG
from llama_core.imports import how_to_install
from llama_core.models.batch import Batch
from llama_core.models.head import HeadInputs, logits
from llama_core.models.llama import Llama


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
        return model(tokens_BS, Batch(tokens_BS, tokens_BS)).float().cpu()


class TheirModel:
    """A folder's model as transformers opens it, or its adapters as PEFT does, computed in fp32.

    Args:
        folder: the folder; none of its code is run.
        device: cpu or cuda.

    Raises:
        EnvironmentMismatchError: if the package is not installed.
        WeightsError: if it cannot open the folder, or finds other weights there than its model has.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._device = device
        is_adapter = (folder / ADAPTER_CONFIG).exists()
        try:
            import transformers

            if is_adapter:
                import peft
        except ImportError as error:
            package = "peft" if is_adapter else "transformers"
            raise EnvironmentMismatchError(
                f"--check opens {folder} with {package}: {error}; {how_to_install(package)}"
            ) from None
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            if is_adapter:
                base = peft.PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
                below, _ = self._opened(transformers, base)
                self._model: Any = peft.PeftModel.from_pretrained(below, str(folder))
                wrong: dict[str, Any] = {}
            else:
                self._model, wrong = self._opened(transformers, str(folder))
        except Exception as error:  # whatever a library of others has to say
            raise WeightsError(f"{'peft' if is_adapter else 'transformers'} cannot open {folder}: {error}") from None
        for kind, names in wrong.items():
            if names:
                raise WeightsError(
                    f"transformers finds {kind.replace('_', ' ')} in {folder}: {sorted(map(str, names))[0]}"
                )
        self._model.to(device).eval()

    @staticmethod
    def _opened(transformers: Any, folder: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )

    @torch.no_grad()
    def logits_of(self, row: Sequence[int], places: Sequence[int]) -> Tensor:
        """Return the same as ``logits_of``."""
        tokens_BS = torch.tensor([row], device=self._device)
        found = self._model(tokens_BS, logits_to_keep=torch.tensor(places, device=self._device), use_cache=False)
        return found.logits[0].float().cpu()
