"""What the ``config.json`` of each type of models may say, a class each: keys and our traits.

A class reads and writes: its fields are the keys of a file, with the defaults of transformers' own
configuration and, as the text below a key, the error message for any value that it does not admit.
``traits``, ``moe`` and the other properties turn them into those of ``ModelSpec``, and ``keys_of``
turns them back. The required keys and ``rope.py`` are the same for all types.

A relative is a Llama with traits; its ``row`` in ``config/model_types.py`` says which. To add one, write
such a class with a row in the file of its makers, and list it here.
"""

from llama_core.config.config_json.deepseek import DeepseekV3Json
from llama_core.config.config_json.gemma import Gemma3TextJson
from llama_core.config.config_json.gpt_oss import GptOssJson
from llama_core.config.config_json.llama import LlamaJson
from llama_core.config.config_json.llama4 import Llama4TextJson
from llama_core.config.config_json.mistral import MistralJson, MixtralJson
from llama_core.config.config_json.olmo import Olmo2Json, Olmo3Json
from llama_core.config.config_json.qwen import Qwen2Json, Qwen3Json, Qwen3MoeJson

FAMILIES: dict[str, type[LlamaJson]] = {
    family.row.name: family
    for family in (
        *(LlamaJson, MixtralJson, MistralJson, Qwen2Json, Qwen3Json, Qwen3MoeJson),
        *(Olmo2Json, Olmo3Json, Gemma3TextJson, GptOssJson, Llama4TextJson, DeepseekV3Json),
    )
}
"""The types of models that can be read and written, by ``model_type``."""
