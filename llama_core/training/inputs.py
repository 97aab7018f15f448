"""From a batch to what this rank's model is given: the microbatches of a step or an evaluation."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import DataError
from llama_core.models.batch import IGNORE_INDEX, Batch, ones_per_token
from llama_core.models.objective import Objective, PreparingObjective
from llama_core.parallel.recompute import mixes_up_random_state
from llama_core.planning.kernels import attention_kernel
from llama_core.planning.plan import ParallelPlan

SELDOM = 0.05
"""Share of microbatches that are worth another kind of attention: blocks have to be compiled for it once more."""


class StepInputs:
    """Cuts batches into microbatches.

    Args:
        config: the configuration.
        plan: how many rows a forward has.
        objective: what the model is trained for.
        device: where the microbatches are to be.
        share_of_whole_rows: the share of the rows that are a single document.
        spec: another model than that of ``config``, which the microbatches are for.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: ParallelPlan,
        objective: Objective,
        device: torch.device,
        *,
        share_of_whole_rows: float = 0.0,
        spec: ModelSpec | None = None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._objective = objective
        self._device = device
        kernel = attention_kernel(config, plan, spec)
        self._hides_in_document = any(needs.hides_in_document for needs in (spec or config.spec).attentions)
        self._takes_documents = kernel.told == "varlen"
        # context-parallel ranks would have to send the keys around a ring instead
        has_causal_kernel = not kernel.divides_rows and not mixes_up_random_state(plan)
        is_worth_it = share_of_whole_rows**plan.rows_per_forward > SELDOM
        self._whole_rows_apart = (
            self._takes_documents and not self._hides_in_document and has_causal_kernel and is_worth_it
        )

    @property
    def prepares(self) -> bool:
        """Whether the objective has a forward over other rows before each step."""
        return isinstance(self._objective, PreparingObjective)

    def microbatches(self, batch: Batch) -> list[Batch]:
        """Split a batch into the rows of each forward, in host memory.

        Raises:
            DataError: if the batch lacks what the objective reads.
        """
        wanted = self._config.objective
        missing = [name for name in wanted.per_token if name not in batch.per_token]
        if missing:
            raise DataError(
                f"training.objective={wanted.name} reads {', '.join(missing)} of every token, which the batches do "
                "not have; give batches with them in per_token, from your own dataloader"
            )
        if self._hides_in_document:
            batch = batch.with_positions()
        pieces = self._split(batch)
        if not isinstance(self._objective, PreparingObjective):
            return pieces
        before = self._split(self._objective.rows_before(batch))
        return [replace(piece, before=rows) for piece, rows in zip(pieces, before, strict=True)]

    def on_device(self, batch: Batch) -> list[Batch]:
        """Return the same microbatches on the device."""
        return [piece.to(self._device) for piece in self.microbatches(batch)]

    def examples(self) -> Iterator[Batch]:
        """Yield a microbatch on the device for each shape and kind of attention that steps need."""
        config = self._config
        for seq_len in config.seq_lens:
            tokens_BS = torch.zeros((self._rows_per_forward(seq_len), seq_len), dtype=torch.int64)
            targets_BS = torch.full_like(tokens_BS, IGNORE_INDEX)
            rows = Batch(
                tokens_BS, targets_BS, None, per_token=ones_per_token(tokens_BS, config.objective.values_per_token)
            )
            if config.data.document_mask or self._hides_in_document:
                rows = rows.with_positions()
            yield (rows.with_documents() if self._takes_documents else rows).to(self._device)
            if self._whole_rows_apart:
                yield rows.with_documents(whole_rows_apart=True).to(self._device)

    def _split(self, batch: Batch) -> list[Batch]:
        pieces = batch.split(self._rows_per_forward(batch.tokens_BS.shape[1]))
        if not self._takes_documents:
            return pieces
        return [piece.with_documents(whole_rows_apart=self._whole_rows_apart) for piece in pieces]

    def _rows_per_forward(self, seq_len: int) -> int:
        """Return how many rows of a length a forward has: as many tokens as those of the longest stage."""
        rows = self._plan.rows_per_forward
        return rows * self._config.seq_len // seq_len if seq_len in self._config.seq_lens else rows
