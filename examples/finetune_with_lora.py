"""Fine-tune LoRA adapters over a frozen model on conversations, and print the command that exports them for PEFT.

    python examples/finetune_with_lora.py --init-from ~/Llama-3.2-1B-Instruct --data conversations.jsonl
    python examples/finetune_with_lora.py --model tiny_llama3_50m --steps 20 --seq-len 256       # on a laptop

Each line of the data is {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]} or
{"text": ...}. Without --init-from the base weights are random, which is only good for trying things out.
"""

import argparse
import sys

from llama_core.errors import TrainingInfraError
from training_infra import LlamaTrainingOrchestrator, TrainingStrategy


def main() -> None:
    """Fine-tune, and print the command that exports the adapters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the model of --init-from, else llama3_8b_instruct")
    parser.add_argument("--init-from", help="a Hugging Face folder, or a run's directory")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--data", default="sample")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, help="default: two passes over the data")
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()

    strategy = TrainingStrategy(
        name="lora",
        parameters={"lora_rank": args.rank, "lora_alpha": 2 * args.rank, "target_modules": "all-linear"},
    )
    orchestrator = LlamaTrainingOrchestrator(
        args.model or args.init_from or "llama3_8b_instruct", strategy, args.gpus, device=args.device
    )
    orchestrator.configure(source=args.data, batch_size=args.batch_size, seq_len=args.seq_len, steps=args.steps)
    if args.init_from:
        orchestrator.configure(init_from=args.init_from)
    orchestrator.print_configuration()
    orchestrator.launch_training()
    print(f"adapters for PEFT: training-infra export-hf {orchestrator.run_dir} --out my-adapters")


if __name__ == "__main__":
    try:
        main()
    except TrainingInfraError as error:
        sys.exit(f"error: {error}")
