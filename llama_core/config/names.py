"""Which key was meant: the names that settings have elsewhere, and misspellings."""

from collections.abc import Iterable
from difflib import get_close_matches

ALSO_CALLED = {
    "model": ("model_name", "model_variant", "base_model", "model_name_or_path"),
    "lora.method": ("peft_method", "peft_type", "use_dora"),
    "lora.lora_rank": ("rank", "r", "lora_r"),
    "lora.lora_alpha": ("alpha",),
    "lora.lora_dropout": ("dropout",),
    "lora.target_modules": ("targets", "lora_targets", "lora_target_modules"),
    "data.source": ("data", "dataset", "dataset_path", "data_path", "train_data", "train_file"),
    "data.validation": ("validation_data", "val_data", "eval_data", "eval_dataset", "validation_file"),
    "data.fields": ("field_names", "field_mapping", "columns", "column_names", "column_mapping"),
    "data.tokenizer": ("tokenizer_path", "tokenizer_name"),
    "data.num_workers": ("workers", "dataloader_num_workers", "dataloader_workers", "num_data_workers"),
    "training.seq_len": ("sequence_length", "seq_length", "max_seq_len", "max_seq_length", "max_length",
                         "context_length", "block_size"),
    "training.batch_size": ("bs", "global_batch_size", "train_batch_size"),
    "training.steps": ("max_steps", "num_steps", "train_steps", "total_steps", "max_iters", "iters"),
    "training.epochs": ("num_epochs", "num_train_epochs", "max_epochs"),
    "training.precision": ("mixed_precision", "dtype", "bf16", "fp16", "fp8"),
    "training.objective": ("criterion", "loss", "loss_fn", "loss_type"),
    "training.optimizer": ("optim", "optimiser", "optimizer_name", "optimizer_type"),
    "training.learning_rate": ("lr", "max_lr", "peak_lr"),
    "training.lr_schedule": ("scheduler", "lr_scheduler", "lr_scheduler_type"),
    "training.warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_steps"),
    "training.min_lr_ratio": ("min_lr",),
    "training.weight_decay": ("wd",),
    "training.beta1": ("adam_beta1",),
    "training.beta2": ("adam_beta2",),
    "training.epsilon": ("eps", "adam_epsilon"),
    "training.max_grad_norm": ("grad_clip", "clip_grad", "clip_grad_norm", "gradient_clipping", "max_norm"),
    "training.init_from": ("pretrained", "pretrained_model", "load_from"),
    "training.eval_every": ("eval_steps", "eval_interval"),
    "training.checkpoint_every": ("save_every", "save_steps", "save_interval", "checkpoint_interval"),
    "training.keep_checkpoints": ("save_total_limit",),
    "training.keep_best": ("load_best_model_at_end", "save_top_k"),
    "training.patience": ("early_stopping_patience", "early_stopping"),
    "training.keep_best_by": ("metric_for_best_model",),
    "training.checkpoint_mirror": ("remote_checkpoint_path", "cloud_path", "save_folder", "upload_dir", "storage_path"),
    "training.on_bad_step": ("on_spike", "on_loss_spike", "on_nan"),
    "training.replica_check_every": ("check_weight_hash_across_dp_replicas_interval",),
    "parallel.gpus": ("num_gpus", "ngpus", "devices", "world_size"),
    "parallel.tp": ("tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "parallel.pp": ("pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "parallel.cp": ("context_parallel", "context_parallel_size"),
    "parallel.ep": ("expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
    "parallel.expert_tp": ("expert_tensor_parallel_size", "expert_tensor_parallel_degree", "etp"),
    "parallel.zero_stage": ("zero",),
    "parallel.schedule": ("pipeline_schedule",),
    "parallel.microbatch_size": ("micro_batch_size", "per_device_train_batch_size", "per_device_batch_size"),
    "parallel.num_microbatches": ("microbatches", "gradient_accumulation_steps", "gradient_accumulation",
                                  "accumulation_steps", "grad_accum"),
    "parallel.recompute": ("activation_checkpointing", "gradient_checkpointing"),
    "parallel.compile": ("torch_compile",),
    "launch.nodes": ("num_nodes", "nnodes"),
    "launch.gpu_type": ("gpu", "gpu_name"),
    "launch.slurm.partition": ("queue",),
    "launch.slurm.time_limit_min": ("time", "time_limit", "walltime"),
    "launch.slurm.cpus_per_rank": ("cpus_per_task",),
    "launch.slurm.memory_gb_per_node": ("mem",),
    "tracking.run_name": ("name", "experiment_name"),
    "tracking.wandb": ("use_wandb", "report_to"),
    "tracking.wandb_project": ("project",),
    "notify.webhook_variable": ("webhook", "webhook_url", "slack_webhook", "slack_webhook_url"),
}  # fmt: skip
"""Names of our settings in other software, on Slurm's command line, or among our flags."""

_NEAR = 0.75
"""Least similarity of a misspelling."""


def keys_called(name: str, known: Iterable[str]) -> list[str]:
    """Return the keys that ``name`` means: by another name, or by their last word in whatever section."""
    word = _last(name).lower().replace("-", "_")
    same_last_word = [key for key in known if _last(key) == word]
    return same_last_word[:2] or [key for key, names in ALSO_CALLED.items() if word in names]


def keys_meant(name: str, known: Iterable[str]) -> list[str]:
    """Return the keys that an unknown key may mean, by meaning or else by spelling; empty if none is near."""
    known = list(known)
    section = name[: -len(_last(name))]
    siblings = dict.fromkeys(key[len(section) :].partition(".")[0] for key in known if key.startswith(section))
    near = get_close_matches(_last(name), siblings, n=1, cutoff=_NEAR)
    called = keys_called(name, known)
    inside = [key for key in called if key.startswith(section)]
    return inside or called or [section + word for word in near]


def _last(key: str) -> str:
    return key.rpartition(".")[2]
