"""Benchmarks over batch sizes: measured if this machine or the cluster has the devices, otherwise predicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.sweep.comparison import Comparison, compare
from llama_core.sweep.grid import SweepConfig
from training_infra.config import TrainingStrategy
from training_infra.local import local_sweep_steps
from training_infra.orchestrator import LlamaTrainingOrchestrator
from training_infra.spelling import python_spelling
from training_infra.tables import print_comparison

BATCH_SIZES = (1, 2, 4, 8)
"""Batch sizes compared by default."""


class PerformanceBenchmark:
    """The speed and memory of one model over several batch sizes.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face folder.
        num_gpus: devices in all.
        batch_sizes: sequences per optimizer step over all devices.
        strategy: the strategy or its name.
        **settings: as for ``LlamaTrainingOrchestrator.configure``.

    Raises:
        ConfigError: if settings are wrong; the message names all of them.
    """

    def __init__(
        self,
        model_variant: str,
        num_gpus: int = 1,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        strategy: TrainingStrategy | str = "standard",
        **settings: Any,
    ) -> None:
        self.config = LlamaTrainingOrchestrator(model_variant, strategy, num_gpus, **settings).config
        self.batch_sizes = tuple(batch_sizes)
        self._comparison: Comparison | None = None

    @python_spelling()
    def run_comprehensive_benchmark(self, *, sweep_dir: Path | str | None = None) -> list[dict[str, Any]]:
        """Time the batch sizes that can run from here, predict the rest, and return a record for each.

        ``how`` says which was done; ``status`` and ``reason`` say why one has no figures, such as ``does-not-fit``.

        Args:
            sweep_dir: directory of the measurements; by default ``sweeps/<name>-<date>``.

        Raises:
            TrainingInfraError: if the request is wrong, or the sweep is interrupted.
        """
        path = None if sweep_dir is None else Path(sweep_dir)
        self._comparison = compare_batch_sizes(self.config, self.batch_sizes, path)
        return [row.as_dict() for row in self._comparison.rows]

    def print_summary(self) -> None:
        """Print a line for each batch size; run the benchmark first if it has not run."""
        if self._comparison is None:
            self.run_comprehensive_benchmark()
        if self._comparison is not None:
            print_comparison(self._comparison)


def compare_batch_sizes(
    config: RunConfig, batch_sizes: Sequence[int], sweep_dir: Path | None = None, *, resume: bool = False
) -> Comparison:
    """Measure or predict a run with each batch size; see ``llama_core.sweep.comparison``."""
    sweep = SweepConfig.from_mapping(
        {
            "name": f"{config.spec.name}_batch_sizes",
            "base": config,
            "grid": {"training.batch_size": list(batch_sizes)},
        }
    )
    return compare(sweep, local_sweep_steps(), sweep_dir, resume=resume)
