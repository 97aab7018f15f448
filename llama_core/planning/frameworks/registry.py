"""The frameworks that are known here, each with its defaults: an entry holds until the next one of the same name."""

from dataclasses import replace

from llama_core.errors import ConfigError, did_you_mean
from llama_core.planning.frameworks.deepspeed import DEEPSPEED
from llama_core.planning.frameworks.fms_fsdp import FMS_FSDP
from llama_core.planning.frameworks.fsdp2 import FSDP2
from llama_core.planning.frameworks.litgpt import LITGPT
from llama_core.planning.frameworks.megatron import MEGATRON
from llama_core.planning.frameworks.nanotron import NANOTRON
from llama_core.planning.frameworks.torchtitan import TORCHTITAN
from llama_core.planning.frameworks.torchtune import TORCHTUNE
from llama_core.planning.frameworks.traits import Framework

FRAMEWORKS = (FSDP2, *TORCHTITAN, MEGATRON, NANOTRON, LITGPT, *TORCHTUNE, FMS_FSDP, DEEPSPEED)
"""All entries; those of one framework in chronological order."""

_EXPERIMENTS = {"simplefsdp": "simple_fsdp", "compiler_toolkit": "compiler_toolkit", "graph_trainer": "graph_trainer"}


def framework(name: str, *, month: str, remarks: str) -> Framework:
    """Return a framework's defaults in a given month.

    Args:
        name: its name in a source, such as ``nanotron v0.5``.
        month: such as ``2024-07``; an empty string means the newest.
        remarks: may name one of torchtitan's experiments.

    Raises:
        ConfigError: if the framework is unknown.
    """
    spelled = name.lower()
    names = sorted({entry.name for entry in FRAMEWORKS if " " not in entry.name})
    family = next((known for known in names if spelled.startswith(known)), None)
    if family is None:
        hint = did_you_mean(spelled, names) or f"; known are {', '.join(names)}"
        raise ConfigError(f"nothing is known about framework {name!r}{hint}")
    for sign, experiment in _EXPERIMENTS.items():
        if family == "torchtitan" and sign in remarks.lower():
            family = f"torchtitan {experiment}"
    entries = [entry for entry in FRAMEWORKS if entry.name == family]
    return next((entry for entry in reversed(entries) if not month or entry.since <= month), entries[0])


def compiled(traits: Framework) -> Framework:
    """Return a framework's traits once ``torch.compile`` has fused the operators between matrix products.

    Its partitioner keeps the inputs of fused regions instead of their intermediate results: a norm's input, the gate
    and up of a gated feed-forward, one copy of keys and values.

    Source: torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``.
    """
    loss = replace(traits.loss, eager=traits.loss.compiled, sharded=traits.loss.compiled)
    return replace(traits, norm_saved=2, norm_frozen=2, ffn_tensors=2, repeats_kv=False, loss=loss)
