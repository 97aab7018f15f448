"""What people type because other software has it, and what there is here instead: a sentence for each."""

from llama_core.objectives.registry import OBJECTIVES

_FINE_TUNING = "`training-infra train --init-from FOLDER --data chats.jsonl` does this; with adapters: --strategy lora"

FLAGS_OF_OTHER_TOOLS = {
    "--best": "--step best of generate and export-hf takes the checkpoint with the lowest held-out loss, and "
    "training.keep_best keeps it",
}
"""Answers to flags, by name."""

COMMANDS_OF_OTHER_TOOLS = {
    "eval": "`training-infra evaluate RUN_DIR` tells the held-out loss, and with --tasks the scores on tasks",
    "dpo": "`training-infra train --objective dpo --init-from FOLDER --data pairs.jsonl` does this; objectives: "
    f"{', '.join(OBJECTIVES)}",
    "kto": "`training-infra train --objective kto --init-from FOLDER --data answers.jsonl` does this",
    "finetune": _FINE_TUNING,
    "sft": _FINE_TUNING,
}
"""Answers to commands, by name."""
