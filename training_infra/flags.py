"""The command-line flags of a run, each with the configuration key that it sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llama_core.launchers.registry import LAUNCHERS as ROWS


@dataclass(frozen=True)
class Flag:
    """A flag that sets one key of the run configuration."""

    name: str
    key: str
    example: str = ""
    """A value, for the help; empty for a flag that takes none."""
    constant: str | int | None = None
    """The value if the flag is given without one."""
    long_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Other spellings of its values."""
    also: tuple[str, ...] = ()
    """Other names of the flag."""
    takes_several: bool = False
    """Whether it takes several values, and may be repeated."""
    is_common: bool = False
    """Whether the short help has it."""

    @property
    def group(self) -> str:
        """The group that the flag belongs to in the help."""
        return group_of(self.key)


LONG_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
"""Long names of dtypes, also accepted by ``--mixed-precision`` and ``--dtype``."""

LAUNCHERS = "|".join(ROWS)
FLAGS = (
    Flag("--model", "model", "llama3_8b", is_common=True),
    Flag("--strategy", "strategy", "lora", is_common=True),
    Flag("--lora-rank", "lora.lora_rank", "64"),
    Flag("--lora-alpha", "lora.lora_alpha", "128"),
    Flag("--lora-base", "lora.base", "nf4"),
    Flag("--data", "data.source", "texts.jsonl", takes_several=True, is_common=True),
    Flag("--validation-data", "data.validation", "held-out.jsonl", takes_several=True),
    Flag("--num-workers", "data.num_workers", "4"),
    Flag("--tokenizer", "data.tokenizer", "~/my-tokenizer", is_common=True),
    Flag("--init-from", "training.init_from", "~/Llama-3.2-1B", is_common=True),
    Flag("--steps", "training.steps", "1000", is_common=True),
    Flag("--epochs", "training.epochs", "2"),
    Flag("--batch-size", "training.batch_size", "32", is_common=True),
    Flag("--seq-len", "training.seq_len", "2048", is_common=True),
    Flag("--objective", "training.objective", "dpo"),
    Flag("--optimizer", "training.optimizer", "adamw"),
    Flag("--learning-rate", "training.learning_rate", "1e-4", also=("--lr",), is_common=True),
    Flag("--lr-schedule", "training.lr_schedule", "wsd"),
    Flag("--warmup-steps", "training.warmup_steps", "100"),
    Flag("--weight-decay", "training.weight_decay", "0.05"),
    Flag("--mixed-precision", "training.precision", "bfloat16", long_names=LONG_NAMES),
    Flag("--seed", "training.seed", "1"),
    Flag("--deterministic", "training.deterministic", constant=True),
    Flag("--eval-every", "training.eval_every", "100"),
    Flag("--checkpoint-every", "training.checkpoint_every", "500"),
    Flag("--gpus", "parallel.gpus", "8", is_common=True),
    Flag("--tensor-parallel", "parallel.tp", "2"),
    Flag("--pipeline-parallel", "parallel.pp", "4"),
    Flag("--context-parallel", "parallel.cp", "2"),
    Flag("--expert-parallel", "parallel.ep", "4"),
    Flag("--microbatch-size", "parallel.microbatch_size", "2"),
    Flag("--microbatches", "parallel.num_microbatches", "8"),
    Flag("--schedule", "parallel.schedule", "1f1b"),
    Flag("--zero-stage", "parallel.zero_stage", "3"),
    Flag("--activation-checkpointing", "parallel.recompute", "selective", constant="full"),
    Flag("--gradient-compression", "parallel.gradient_compression", "powersgd", constant="bf16"),
    Flag("--device", "launch.device", "cpu", is_common=True),
    Flag("--gpu-type", "launch.gpu_type", "a100_80gb"),
    Flag("--machine-profile", "launch.machine_profile", "profiles/h100.json"),
    Flag("--price", "launch.dollars_per_gpu_hour", "3.20"),
    Flag("--nodes", "launch.nodes", "2"),
    Flag("--min-nodes", "launch.min_nodes", "1"),
    Flag("--spare-nodes", "launch.spare_nodes", "1"),
    Flag("--launcher", "launch.launcher", "slurm", is_common=True),
    Flag("--partition", "launch.slurm.partition", "gpu"),
    Flag("--account", "launch.slurm.account", "llm"),
    Flag("--time", "launch.slurm.time_limit_min", "12:00:00"),
    Flag("--force", "launch.force", constant=True),
    Flag("--wandb", "tracking.wandb", "offline"),
    Flag("--history", "benchmark.history", "/shared/history"),
    Flag("--no-benchmark", "benchmark.steps", constant=0),
)
_GROUPS = {
    "strategy": "model",
    "trainable": "model",
    "architecture": "model",
    "lora": "model",
    "moe": "model",
    "benchmark": "tracking",
}
"""Sections of the configuration whose keys are in the group of another one."""


def group_of(key: str) -> str:
    """Return the group of a configuration key in the help: its section, or that of a section close to it."""
    section = key.partition(".")[0]
    return _GROUPS.get(section, section)
