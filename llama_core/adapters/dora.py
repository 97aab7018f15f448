"""DoRA: LoRA that trains the length of every row of a matrix apart from its direction.

Source: Liu et al. 2024, arXiv:2402.09353, section 4; names and initial values are PEFT's.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from llama_core.adapters.lora import LORA, A, B, LoraJson
from llama_core.adapters.traits import AdapterType
from llama_core.weight_rows import Weight

MAGNITUDE = Weight("lora_magnitude_vector", "lora_magnitude_vector", ("outputs",), "adapted", "adapted", decayed=False)


class DoraJson(LoraJson):
    """PEFT's ``LoraConfig`` with ``use_dora``."""

    marks: ClassVar[Mapping[str, Any]] = {"peft_type": "LORA", "use_dora": True}
    written: ClassVar[Mapping[str, Any]] = {key: LoraJson.written[key] for key in LoraJson.written if key != "use_dora"}

    use_dora: Literal[True]


DORA = AdapterType(
    "dora",
    module="llama_core.models.dora",
    program="llama_core.planning.program.dora",
    weights=(A, B, MAGNITUDE),
    json=DoraJson,
    keys=tuple(key for key in LORA.keys if key not in {"base", "initial_values"}),
)
