"""Train on several nodes of a Slurm cluster, with given tensor- and pipeline-parallel sizes instead of a search.

    python examples/multi_node_training.py --nodes 4 --gpus 32 --tensor-parallel 8 --partition gpu   # on a login node
    python examples/multi_node_training.py --launcher local --nodes 1 --gpus 2 --tensor-parallel 2 --device cpu

The job outlives this script: the same command with --resume follows it again. After preemption, a time limit or a lost
node, the job continues from a checkpoint by itself.
"""

import argparse
import sys

from llama_core.errors import TrainingInfraError
from training_infra import quick_start
from training_infra.distributed import ConfigurationFactory


def main() -> None:
    """Submit the job and follow it to its end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_70b")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=32, help="over all nodes")
    parser.add_argument("--tensor-parallel", type=int, default=8, help="GPUs that divide every matrix")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="groups of such GPUs that divide the layers")
    parser.add_argument("--partition", help="Slurm partition")
    parser.add_argument("--launcher", default="slurm", help="slurm or local")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--data", default="sample", help="a path visible on all nodes")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    orchestrator = quick_start(args.model, num_gpus=args.gpus, source=args.data, device=args.device)
    inner = args.tensor_parallel * args.pipeline_parallel
    orchestrator.distributed_config = ConfigurationFactory.create_hybrid_parallel_config(
        tensor_parallel_size=args.tensor_parallel,
        pipeline_parallel_size=args.pipeline_parallel,
        data_parallel_size=args.gpus // inner,
    )
    orchestrator.configure(launcher=args.launcher, nodes=args.nodes, partition=args.partition)
    orchestrator.configure(seq_len=args.seq_len, steps=args.steps, checkpoint_every=200)
    orchestrator.print_configuration()
    summary = orchestrator.launch_training(resume=args.resume)
    print(summary.summary())


if __name__ == "__main__":
    try:
        main()
    except TrainingInfraError as error:
        sys.exit(f"error: {error}")
