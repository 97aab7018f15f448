"""Plan a mixture of experts: choose the layers that have experts, and estimate the memory of training.

    python examples/train_with_moe.py --model llama2_13b --gpus 8 --experts 16 --layers 4 8 12 16 20 24 28

Training mixtures is not supported yet: this script ends with a one-line refusal.
"""

import argparse
import sys

from llama_core.errors import TrainingInfraError
from training_infra import LlamaTrainingOrchestrator, TrainingStrategy


def main() -> None:
    """Print the mixture's size and memory, then try to train it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2_13b")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16, help="experts per layer that has them")
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 12], help="layers with experts, counted from 0")
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()

    strategy = TrainingStrategy(
        name="moe",
        parameters={
            "num_experts": args.experts,
            "experts_per_token": args.experts_per_token,
            "moe_layers": args.layers,
        },
    )
    orchestrator = LlamaTrainingOrchestrator(args.model, strategy, args.gpus, steps=args.steps)
    spec = orchestrator.config.spec
    print(f"{spec.num_parameters:,} parameters, {spec.num_active_parameters:,} of them active for each token")
    orchestrator.print_configuration()
    orchestrator.launch_training()


if __name__ == "__main__":
    try:
        main()
    except TrainingInfraError as error:
        sys.exit(f"error: {error}")
