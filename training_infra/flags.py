"""The command-line flags of a run, each with the configuration key that it sets."""

from dataclasses import dataclass
from typing import get_args

from llama_core.config.run import LauncherName


@dataclass(frozen=True)
class Flag:
    """A flag that sets one key of the run configuration."""

    name: str
    key: str
    metavar: str = "N"
    constant: str | None = None
    """The value set by a flag that takes no argument."""


LAUNCHERS = "|".join(get_args(LauncherName))
MODEL_FLAGS = (
    Flag("--model", "model", "NAME|FOLDER"),
    Flag("--strategy", "strategy", "standard|lora|moe|hybrid"),
    Flag("--lora-rank", "lora.lora_rank"),
    Flag("--gpus", "parallel.gpus"),
    Flag("--nodes", "launch.nodes"),
    Flag("--gpu-type", "launch.gpu_type", "NAME"),
    Flag("--device", "launch.device", "cpu|cuda"),
    Flag("--batch-size", "training.batch_size"),
    Flag("--seq-len", "training.seq_len"),
    Flag("--microbatch-size", "parallel.microbatch_size"),
    Flag("--microbatches", "parallel.num_microbatches"),
    Flag("--tensor-parallel", "parallel.tp"),
    Flag("--pipeline-parallel", "parallel.pp"),
    Flag("--context-parallel", "parallel.cp"),
    Flag("--expert-parallel", "parallel.ep"),
    Flag("--schedule", "parallel.schedule", "NAME"),
    Flag("--zero-stage", "parallel.zero_stage", "0|1|2|3"),
    Flag("--activation-checkpointing", "parallel.recompute", constant="full"),
    Flag("--gradient-compression", "parallel.gradient_compression", constant="bf16"),
    Flag("--mixed-precision", "training.precision", "bfloat16|float16|fp32"),
)
RUN_FLAGS = (
    Flag("--data", "data.source", "PATH"),
    Flag("--validation-data", "data.validation", "PATH"),
    Flag("--tokenizer", "data.tokenizer", "PATH"),
    Flag("--steps", "training.steps"),
    Flag("--epochs", "training.epochs"),
    Flag("--lr", "training.learning_rate", "X"),
    Flag("--lr-schedule", "training.lr_schedule", "cosine|wsd|constant"),
    Flag("--warmup-steps", "training.warmup_steps"),
    Flag("--seed", "training.seed"),
    Flag("--init-from", "training.init_from", "PATH"),
    Flag("--deterministic", "training.deterministic", constant="true"),
    Flag("--eval-every", "training.eval_every"),
    Flag("--checkpoint-every", "training.checkpoint_every"),
    Flag("--launcher", "launch.launcher", LAUNCHERS),
    Flag("--force", "launch.force", constant="true"),
    Flag("--wandb", "tracking.wandb", "off|offline|online"),
)
