"""Train a mixture of experts: choose the layers that have experts, and how many ranks divide them.

python examples/train_with_moe.py --model llama2_13b --gpus 64 --experts 16 --layers 4 8 12 16 20 24 28 --ep 8
python examples/train_with_moe.py --model tiny_llama3_50m --gpus 1 --experts 4 --layers 1 3 --steps 5 --seq-len 64
"""

import argparse
import sys

from llama_core.errors import TrainingInfraError
from training_infra import LlamaTrainingOrchestrator, TrainingStrategy


def main() -> None:
    """Print the mixture's size and plan, then train it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2_13b")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16, help="experts per layer that has them")
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 12], help="layers with experts, counted from 0")
    parser.add_argument("--ep", default="auto", help="ranks that divide the experts; default: the fastest")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--batch-size", type=int, help="sequences per step over all GPUs")
    parser.add_argument("--seq-len", type=int)
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
    sizes = {"batch_size": args.batch_size, "seq_len": args.seq_len, "steps": args.steps}
    orchestrator = LlamaTrainingOrchestrator(args.model, strategy, args.gpus, ep=args.ep, device=args.device, **sizes)
    spec = orchestrator.config.spec
    print(f"{spec.num_parameters:,} parameters, {spec.num_active_parameters:,} of them active for each token")
    orchestrator.print_configuration()
    print(orchestrator.launch_training().summary())


if __name__ == "__main__":
    try:
        main()
    except TrainingInfraError as error:
        sys.exit(f"error: {error}")
