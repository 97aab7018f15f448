"""A peer's side of a comparison: its model, with the loop that its own scripts use. Runs in the peer's environment.

Each takes the same weights, tokens and hyperparameters, and mixes precision as its own scripts do: fp32 weights under
autocast. AdamW is fused where the peer's own scripts fuse it on a CPU, and for all peers in a tuned comparison.
"""

# mypy: ignore-errors

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.turns import WEIGHTS, Step, serve

Weights = dict[str, Tensor]


def transformers(job: dict[str, Any], weights: Weights) -> Step:
    """Hugging Face's Llama, with the loss that it computes itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**job["hugging_face"]))
    _load(model, weights)
    return _transformers_steps(job, model)


def peft(job: dict[str, Any], weights: Weights) -> Step:
    """PEFT's adapters on Hugging Face's Llama, whose frozen weights are in the precision of the products."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**job["hugging_face"])).to(DTYPES[job["precision"]])
    _load(model, {name: weight for name, weight in weights.items() if "lora_" not in name})
    lora = LoraConfig(**job["lora"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)  # its adapters are in fp32
    adapters = {re.sub(r"(lora_[AB])\.weight", r"\1.default.weight", name): weight for name, weight in weights.items()}
    _load(model, {name: weight for name, weight in adapters.items() if "lora_" in name})
    return _transformers_steps(job, model)


def _transformers_steps(job: dict[str, Any], model: nn.Module) -> Step:
    model.train()
    model.config.use_cache = False
    run = torch.compile(model) if job["tuned"] else model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, fused=True, **job["adamw"])
    mixed = _autocast(job)

    def step(tokens_BS: Tensor, targets_BS: Tensor) -> float:
        with mixed():
            loss = run(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, job["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def litgpt(job: dict[str, Any], weights: Weights) -> Step:
    """The GPT of litgpt under Lightning Fabric, with its chunked cross-entropy, as in ``litgpt pretrain``."""
    from lightning import Fabric
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from litgpt.utils import chunked_cross_entropy

    shape = job["shape"]
    config = Config(
        name="llama",
        block_size=job["seq_len"],
        vocab_size=shape["vocab_size"],
        padded_vocab_size=shape["vocab_size"],
        n_layer=shape["num_layers"],
        n_head=shape["num_heads"],
        n_query_groups=shape["num_kv_heads"],
        head_size=shape["head_dim"],
        n_embd=shape["hidden_size"],
        intermediate_size=shape["ffn_size"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=shape["norm_eps"],
        mlp_class_name="LLaMAMLP",
        rope_base=int(shape["rope_theta"]),
    )
    precision = {"bf16": "bf16-mixed", "fp32": "32-true"}[job["precision"]]
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    renamed: Weights = {}
    copy_weights_hf_llama(config, {}, renamed, weights)
    _load(model, renamed)
    model.transformer.wte.weight = model.lm_head.weight
    model = fabric.setup(torch.compile(model) if job["tuned"] else model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), fused=job["tuned"], **job["adamw"]))

    def step(tokens_BS: Tensor, targets_BS: Tensor) -> float:
        loss = chunked_cross_entropy(model(tokens_BS), targets_BS)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=job["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def torchtitan(job: dict[str, Any], weights: Weights) -> Step:
    """The Llama 3 of torchtitan with its loss; when tuned, blocks and loss are compiled, as its trainer does."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    shape = job["shape"]
    arguments = TransformerModelArgs(
        dim=shape["hidden_size"],
        n_layers=shape["num_layers"],
        n_heads=shape["num_heads"],
        n_kv_heads=shape["num_kv_heads"],
        vocab_size=shape["vocab_size"],
        multiple_of=32,
        ffn_dim_multiplier=(shape["ffn_size"] + 0.5) / int(8 * shape["hidden_size"] / 3),
        rope_theta=shape["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),  # by default the frequencies are those of Llama 3.1
        norm_eps=shape["norm_eps"],
        max_seq_len=job["seq_len"],
    )
    model = Transformer(arguments)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    _load(model, Llama3StateDictAdapter(arguments, None).from_hf(weights))
    model.output.weight = model.tok_embeddings.weight
    compute_loss: Any = cross_entropy_loss
    if job["tuned"]:
        for block in model.layers.values():
            block.compile(fullgraph=True)
        compute_loss = torch.compile(cross_entropy_loss)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **job["adamw"])
    mixed = _autocast(job)

    def step(tokens_BS: Tensor, targets_BS: Tensor) -> float:
        with mixed():
            loss = compute_loss(model(tokens_BS), targets_BS) / targets_BS.numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job["max_grad_norm"], foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


PEERS = {peer.__name__: peer for peer in (transformers, litgpt, torchtitan, peft)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _autocast(job: dict[str, Any]) -> Callable[[], Any]:
    return (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if job["precision"] == "bf16" else nullcontext


def _load(model: nn.Module, weights: Weights) -> None:
    """Copy all of ``weights`` into ``model``; its other weights are tied to them."""
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    if unknown:
        raise KeyError(f"the model has no {unknown}")


def build(folder: Path) -> Callable[[dict[str, Any]], Step]:
    """Return a function that builds the peer of a job."""
    return lambda job: PEERS[job["peer"]](job, torch.load(folder / WEIGHTS))


if __name__ == "__main__":
    serve(Path(sys.argv[1]), build(Path(sys.argv[1])))
