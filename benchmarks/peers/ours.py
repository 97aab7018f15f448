"""This engine's side of a comparison; it also writes the initial weights for the other side."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.turns import WEIGHTS, Step, serve
from llama_core.config.model_weights import adapter_weight, hugging_face_name
from llama_core.config.run import RunConfig
from llama_core.hugging_face.peft import peft_name
from llama_core.models.batch import Batch
from llama_core.models.llama import Llama
from llama_core.planning.plan import ParallelPlan
from llama_core.training.engine import build_engine, train_step


def build(folder: Path) -> Callable[[dict[str, Any]], Step]:
    """Return a function that builds the engine of a job as a run does, and writes its weights to the job's folder."""

    def engine_steps(job: dict[str, Any]) -> Step:
        config = RunConfig.from_mapping(job["config"])
        plan = ParallelPlan(microbatch_size=config.batch_size, compile=job["compile_ours"])
        engine = build_engine(config, plan, torch.device("cpu"))
        engine.initialize_weights(0)
        torch.save(_renamed(engine.model), folder / WEIGHTS)

        def step(tokens_BS: Tensor, targets_BS: Tensor) -> float:
            batch = Batch(tokens_BS, targets_BS, None)
            taken = train_step(engine, [batch], learning_rate=job["learning_rate"], max_grad_norm=job["max_grad_norm"])
            return float(taken.loss)

        return step

    return engine_steps


def _renamed(model: Llama) -> dict[str, Tensor]:
    """Return the weights by the names of transformers, and the adapters by those of PEFT."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {(peft_name if adapter_weight(name) else hugging_face_name)(name): weight for name, weight in named.items()}


if __name__ == "__main__":
    serve(Path(sys.argv[1]), build(Path(sys.argv[1])))
