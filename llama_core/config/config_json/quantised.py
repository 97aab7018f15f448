"""Which quantised weights ``hugging_face`` reads, by a file's ``quantization_config``."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator

from llama_core.errors import ConfigError

FP8_BLOCK = 128
"""Rows and columns of a block of 8-bit floats with one scale."""
_READ = {"nf4", "mxfp4", "fp8"}


def _only_read(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse quantised weights of another kind than those that are read."""
    kind = given.get("quant_method", "an unnamed format")
    if kind == "bitsandbytes":
        # without bnb_4bit_quant_type, transformers takes fp4
        kind = "int8" if given.get("load_in_8bit") else given.get("bnb_4bit_quant_type", "fp4")
    if kind == "fp8":
        numbers, block = given.get("fmt", "e4m3"), given.get("weight_block_size")
        if (numbers, block) != ("e4m3", [FP8_BLOCK, FP8_BLOCK]):
            kind = f"fp8 of {numbers} in blocks of {json.dumps(block)}"
    if kind not in _READ:
        raise ConfigError(
            f"quantization_config: weights in {json.dumps(kind)} cannot be read, only those in bitsandbytes' nf4, in "
            f"fp8 of e4m3 in blocks of {FP8_BLOCK} x {FP8_BLOCK}, and experts in mxfp4; give the folder of the "
            "unquantised model"
        )
    return given


Quantisation = Annotated[dict[str, Any], AfterValidator(_only_read)]
"""``quantization_config``."""
