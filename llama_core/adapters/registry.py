"""All kinds of adapters by name. To add one, add its ``AdapterType`` here, or bring it in a package of your own."""

from collections.abc import Mapping
from typing import Any

from llama_core.adapters.dora import DORA
from llama_core.adapters.lora import LORA
from llama_core.adapters.traits import AdapterType
from llama_core.registry import Registry

ADAPTERS = Registry("adapters", AdapterType, "lora.method", LORA, DORA)

DEFAULT_ADAPTER = LORA.name


def adapter_of_json(described: Mapping[str, Any]) -> AdapterType | None:
    """Return the kind that PEFT's ``adapter_config.json`` describes; None if it is none of these."""

    def marks(adapter: AdapterType) -> int:
        return len(adapter.json.marks)

    fitting = [
        adapter
        for adapter in map(ADAPTERS.named, ADAPTERS.names())
        if all(described.get(key) == value for key, value in adapter.json.marks.items())
    ]
    return max(fitting, key=marks, default=None)
