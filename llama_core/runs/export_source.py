"""What an export is made of: the checkpoints whose weights it has, the settings of their run, and how it is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError, WeightsError
from llama_core.hugging_face.pretrained import saved_run
from llama_core.records.checkpoints import checkpoint_step
from llama_core.records.directory import RunDirectory
from llama_core.runs.checkpoints import Best, checkpoints_to_average, find_checkpoint
from llama_core.runs.loading import load_config


@dataclass(frozen=True)
class ExportSource:
    """The weights of an export."""

    run: RunDirectory
    checkpoints: Sequence[Path]
    """Those that the weights are of, oldest first; of several, they are the mean."""
    config: RunConfig
    """The settings of the newest one."""
    dtype: str
    """dtype of the weights, one of ``config_json.writing.DTYPES``."""
    merged: bool
    """Whether adapters are added to the weights that the run started from, even if a folder could hold them alone."""

    @property
    def newest(self) -> Path:
        """The newest checkpoint."""
        return self.checkpoints[-1]

    @property
    def others(self) -> Sequence[Path]:
        """The other ones that the weights are the mean of; empty if there is one alone."""
        return self.checkpoints[:-1]

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        return checkpoint_step(self.newest)

    @property
    def is_adapter(self) -> bool:
        """Whether the export is a PEFT folder, which holds adapters alone."""
        return can_be_adapter(self.config.spec) and not self.merged


def can_be_adapter(spec: ModelSpec) -> bool:
    """Return whether a PEFT folder can hold everything that is trained: adapters only."""
    return spec.lora is not None and not spec.trained_in_full


def find_export_source(
    run: RunDirectory,
    *,
    step: int | Best | None,
    average: str | None,
    dtype: str,
    merged: bool,
    tell: Callable[[str], None],
) -> ExportSource:
    """Find what ``export_run`` writes; see there for the arguments and the errors."""
    load_config(run)
    if average is not None and step is not None:
        raise ConfigError(f"step={step} and average={average} choose other checkpoints; give one of them")
    checkpoints = [find_checkpoint(run, step, tell)] if average is None else checkpoints_to_average(run, average)
    config = saved_run(checkpoints[-1])
    if merged and config.spec.lora is None:
        raise WeightsError(
            f"{checkpoints[-1]} holds a full model (strategy={config.strategy}) and no adapters to merge; drop --merged"
        )
    for checkpoint in checkpoints[:-1]:
        if saved_run(checkpoint).spec != config.spec:
            raise WeightsError(f"{checkpoint} holds another model than the newest of those to average; leave it out")
    return ExportSource(run, checkpoints, config, dtype, merged)
