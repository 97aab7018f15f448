"""Run FlashAttention 3 or 4 in place of torch's own kernels."""

import logging

import torch
from torch.nn import attention

from llama_core.config.run import RunConfig
from llama_core.machine.flash import (
    Implementation,
    choose_flash_attention,
    installed_flash_attention,
    wants_flash_attention,
)

logger = logging.getLogger(__name__)


def activate_flash_attention(config: RunConfig) -> Implementation | None:
    """Make torch compute this process's attention on CUDA with the installed implementation that suits its device.

    torch then calls it wherever it would call its own flash kernel: for causal rows, documents and the blocks of the
    ring. Call it once, before the model is built.

    Returns:
        The implementation; None if torch's own kernels stay.
    """
    if not wants_flash_attention(config):
        return None
    name = choose_flash_attention(torch.cuda.get_device_capability(), installed_flash_attention())
    if name is None or name not in getattr(attention, "list_flash_attention_impls", tuple)():
        return None
    try:
        attention.activate_flash_attention_impl(name)
    except Exception as error:  # a package built for another torch may raise anything
        logger.warning("%s is installed but cannot be used, so torch's own kernels run: %s", name, error)
        return None
    logger.info("attention: %s", name)
    return name
