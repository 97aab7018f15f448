"""Train Llama 2 7B on a file of texts, on as many GPUs as you have.

    python examples/train_llama_7b.py --gpus 8 --data texts.jsonl
    python examples/train_llama_7b.py --model tiny_llama3_50m --gpus 1 --steps 20 --seq-len 64   # on a laptop

Without --data, it trains on the source code of Python's standard library. Run it again with --run-dir and --resume to
continue from the newest checkpoint.
"""

import argparse
import sys

from llama_core.errors import TrainingInfraError
from training_infra import estimate_requirements, quick_start


def main() -> None:
    """Print the memory that training needs, then train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2_7b")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--data", default="sample", help=".jsonl or .parquet file, or a folder of them")
    parser.add_argument("--batch-size", type=int, default=64, help="sequences per step over all GPUs")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, help="default: one pass over the data")
    parser.add_argument("--run-dir")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    needs = estimate_requirements(args.model, args.batch_size, args.seq_len, args.gpus)
    print(f"{needs['memory_per_gpu_gb']:.1f} GB per {needs['device']}: {needs['plan']}")

    orchestrator = quick_start(args.model, num_gpus=args.gpus, device=args.device, source=args.data)
    orchestrator.configure(batch_size=args.batch_size, seq_len=args.seq_len, steps=args.steps, learning_rate=3e-4)
    orchestrator.print_configuration()
    summary = orchestrator.launch_training(run_dir=args.run_dir, resume=args.resume)
    print(summary.summary())
    print(f"weights for transformers: training-infra export-hf {orchestrator.run_dir} --out my-llama")


if __name__ == "__main__":
    try:
        main()
    except TrainingInfraError as error:
        sys.exit(f"error: {error}")
