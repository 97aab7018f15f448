"""LoRA: a product of two narrow matrices beside a frozen one.

Source: Hu et al. 2021, arXiv:2106.09685, section 4; names and initial values are PEFT's.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llama_core.adapters.traits import AdapterJson, AdapterType
from llama_core.weight_rows import Weight

A = Weight("lora_A.weight", "lora_A.weight", ("lora_rank", "inputs"), "adapted", "uniform")
B = Weight("lora_B.weight", "lora_B.weight", ("outputs", "lora_rank"), "adapted", "zeros")


class LoraJson(AdapterJson):
    """PEFT's ``LoraConfig``."""

    marks: ClassVar[Mapping[str, Any]] = {"peft_type": "LORA"}
    settings: ClassVar[Mapping[str, str]] = {
        "r": "lora_rank",
        "lora_alpha": "lora_alpha",
        "use_rslora": "rslora",
    }
    of_training: ClassVar[Mapping[str, str]] = {"lora_dropout": "lora_dropout"}
    written: ClassVar[Mapping[str, Any]] = {
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }

    peft_type: Literal["LORA"]
    r: Annotated[int, Field(ge=1)] = 8
    lora_alpha: Annotated[float, Field(gt=0)] = 8.0
    lora_dropout: float = 0.0
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] = False
    init_lora_weights: Literal["gaussian", "orthogonal", "eva"] | bool | None = None
    """How they were initialised. The values left out change the base too, which then differs from its folder."""


LORA = AdapterType(
    "lora",
    module="llama_core.models.lora",
    program="llama_core.planning.program.lora",
    weights=(A, B),
    json=LoraJson,
    of_embedding=(
        Weight("lora_A.weight", "lora_embedding_A", ("lora_rank", "inputs"), "adapted", "zeros"),
        Weight("lora_B.weight", "lora_embedding_B", ("outputs", "lora_rank"), "adapted", "standard"),
    ),
    adapts_head=True,
    keys=("base", "lora_rank", "lora_alpha", "rslora", "initial_values", "lora_dropout"),
)
