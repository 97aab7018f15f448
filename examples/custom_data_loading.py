"""Train on your own batches: a torch Dataset in a DataLoader, on one device or several.

    python examples/custom_data_loading.py --model tiny_llama3_50m --steps 20
    python examples/custom_data_loading.py --model tiny_llama3_50m --gpus 2 --device cpu --steps 20
    torchrun --nproc-per-node=2 examples/custom_data_loading.py --gpus 2 --device cpu

The loader yields global batches; with several devices, each takes its own rows of every batch.
"""

import argparse
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from llama_core.errors import TrainingInfraError
from training_infra import quick_start


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences of consecutive numbers from random starts, which a model soon learns to continue."""

    def __init__(self, num_sequences: int, seq_len: int, seed: int) -> None:
        self.starts = torch.randint(0, 1000, (num_sequences,), generator=torch.Generator().manual_seed(seed))
        self.seq_len = seq_len

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sequence; the target of each token is the next one."""
        return {"input_ids": self.starts[index] + torch.arange(self.seq_len)}


def main() -> None:
    """Make two loaders and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny_llama3_150m")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    train = DataLoader(Counting(512, args.seq_len, seed=0), batch_size=args.batch_size)
    held_out = DataLoader(Counting(16, args.seq_len, seed=1), batch_size=args.batch_size)
    orchestrator = quick_start(args.model, num_gpus=args.gpus, device=args.device, steps=args.steps)
    orchestrator.configure(learning_rate=1e-3, warmup_steps=min(2, args.steps))
    summary = orchestrator.launch_training(train, held_out)
    print(f"loss after {summary.steps} steps: {summary.train_loss:.3f}, held-out {summary.eval_loss:.3f}")


if __name__ == "__main__":
    try:
        main()
    except TrainingInfraError as error:
        sys.exit(f"error: {error}")
