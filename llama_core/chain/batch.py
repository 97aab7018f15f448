"""What a step of a run reads, in the words of its data, and how many steps the data make."""

from collections.abc import Mapping
from typing import Any

from llama_core.config.run import RunConfig
from llama_core.objectives.records import DOCUMENTS
from llama_core.units import counted


def global_batch(config: RunConfig, data: Mapping[str, Any]) -> str:
    """Return the global batch in sequences, and in pairs or whatever else they hold whole.

    Args:
        config: the resolved configuration.
        data: the statistics of its data; empty if they are unknown.
    """
    told = counted(config.first_batch_size, "sequence")
    unit = _unit_in_rows(data)
    if not unit:
        return told
    in_a_step = config.first_batch_size * data["num_documents"] / data["num_sequences"]
    return f"{told}, about {in_a_step:,.3g} {unit}"


def batch_line(config: RunConfig, data: Mapping[str, Any]) -> str:
    """Return the global batch and the number of steps, with how it follows from the data, in one line.

    Args:
        config: the resolved configuration.
        data: the statistics of its data; empty if they are unknown.
    """
    batch = f"{global_batch(config, data)} a step{' at first' if config.stages else ''}"
    parts = [f"{batch}, {config.first_batch_size * config.first_seq_len:,} tokens"]
    if unit := _unit_in_rows(data):
        parts.append(
            f"{data['num_documents']:,} {unit} fill {counted(data['num_sequences'], 'sequence')} of "
            f"{config.first_seq_len:,} tokens, several in one where they fit"
        )
    return "; ".join([*parts, *_steps(config, data)])


def _steps(config: RunConfig, data: Mapping[str, Any]) -> list[str]:
    """Return the number of steps, and of epochs, as far as they are known."""
    training = config.training
    has_epochs = not (config.stages or config.data.sources)  # else an epoch is one of each source, and steps are given
    if not has_epochs or not data or not data["num_sequences"]:
        return [] if training.steps is None else [counted(training.steps, "step")]
    an_epoch = data["num_sequences"] / config.first_batch_size
    steps = training.total_steps(an_epoch)
    return [] if steps is None else [f"{counted(steps, 'step')}: {steps / an_epoch:.3g} epochs"]


def _unit_in_rows(data: Mapping[str, Any]) -> str:
    """Return what sequences hold whole; empty if documents are cut, or the data are unknown."""
    is_known = bool(data) and data["num_sequences"] > 0
    return str(data["unit"]) if is_known and data["unit"] != DOCUMENTS.name else ""
