"""The commands before a run: what can be trained here, what it takes, and whether it can start."""

import argparse

from llama_core.config.hardware import DEFAULT_GPU_TYPE, gpu_spec
from llama_core.config.run import RunConfig
from llama_core.config.settings import SAMPLE
from llama_core.errors import DoesNotFitError
from training_infra.commands import other_frameworks
from training_infra.commands.command import TOKENS, Argument, Command
from training_infra.commands.configuration import requested_config
from training_infra.flags import FLAGS
from training_infra.lines import print_json, print_line
from training_infra.tables import (
    print_choice,
    print_cost,
    print_environment,
    print_host,
    print_plan,
    print_profile,
    print_ranks,
    print_rates,
    print_variants,
)

_UNKNOWN_TIME = "unknown until something runs; dry-run with the same flags measures this CPU and predicts it"


def _models(options: argparse.Namespace) -> None:
    from llama_core.planning.search.model_variants import list_variants

    variants = list_variants(options.gpu_type)
    if options.json:
        print_json({variant.spec.name: variant.as_dict() for variant in variants})
    else:
        print_variants(variants, gpu_spec(options.gpu_type).label, markdown=options.markdown)


MODELS = Command(
    "models",
    "list the model variants, with the fewest GPUs that can train each",
    _models,
    only_prints=True,
    examples=("--gpu-type h200",),
    arguments=(
        Argument("--gpu-type", metavar="h200", default=DEFAULT_GPU_TYPE, help=f"default: {DEFAULT_GPU_TYPE}"),
        Argument("--markdown", action="store_true", help="print the table of docs/models.md"),
        Argument("--json", action="store_true", help="print JSON"),
    ),
)


def _estimate_memory(options: argparse.Namespace) -> int:
    if other_frameworks.is_asked_for(options):
        return other_frameworks.estimate_as(options)
    from llama_core.chain.downloads import DOCUMENTS, resolve
    from llama_core.chain.expected import expected_here
    from llama_core.chain.planned import plan_for_gpu
    from llama_core.data.check import check_data

    asked = resolve(requested_config(options))
    planned = plan_for_gpu(asked.config)
    data = planned.config.data
    no_data = asked.waits_for(*DOCUMENTS)
    checked = None
    if data.source != SAMPLE and not no_data:
        checked = check_data(data, planned.config.spec, reads=planned.config.objective.reads)
    cost = planned.cost(options.tokens, checked)
    code = 0 if planned.estimate.fits else DoesNotFitError.exit_code
    if options.json:
        choice = planned.choice.as_dict() if planned.choice else {}
        resolved = {
            "config": planned.config.model_dump(mode="json"),
            "num_nodes": planned.config.num_nodes,
            "batch_size": planned.config.batch_size,
            "plan": planned.plan.as_dict(),
        }
        times = {"step": planned.step_record(), "rates": planned.device.as_dict(), "cost": cost and cost.as_dict()}
        print_json(choice | planned.estimate.as_dict() | resolved | times)
        return code
    print_plan(planned)
    print_profile(planned.estimate.profile)
    print_ranks(planned, planned.estimate.ranks)
    print_choice(planned)
    print_rates(planned)
    print_cost(planned, cost)
    if not planned.is_on_gpu:
        num_tokens, _ = planned.length(options.tokens, checked)
        reference_tokens = planned.reference_tokens(checked) or 0
        told = expected_here(planned.config, planned.plan, num_tokens, reference_tokens, may_be_rough=False)
        print_line(f"time: {told or _UNKNOWN_TIME}")
    print_line(planned.estimate.summary())
    print_host(planned.estimate)
    for note in (*asked.notes, *no_data, *planned.estimate.notes):
        print_line(f"note: {note}")
    return code


ESTIMATE_MEMORY = Command(
    "estimate-memory",
    "find the fastest plan that fits, and estimate bytes per rank and category; needs no GPU",
    _estimate_memory,
    examples=(
        "--model llama3_8b --gpus 8",
        "--model llama3_70b --gpus 64 --gpu-type h200 --microbatches 8 --activation-checkpointing",
        "--model llama3_70b --strategy lora --gpus 8 --gpu-type a100_80gb --tokens 1B --price 2.10",
        "--from-torchtitan ~/llama3_8b.toml --gpus 64",
    ),
    arguments=(TOKENS, *other_frameworks.ARGUMENTS),
    flags=FLAGS,
)


def _dry_run(options: argparse.Namespace) -> int:
    config = requested_config(options)
    return rehearse(config, here=False, parity=options.parity, tokens=options.tokens, as_json=options.json)


def rehearse(config: RunConfig, *, here: bool, parity: bool = False, tokens: float | None = None, as_json: bool) -> int:
    """Plan and rehearse a run, print what came out, and return the exit code.

    Args:
        config: the run.
        here: whether it is for this machine or a launcher's nodes, not for the GPUs that it names.
        parity: also train a tiny model under the plan.
        tokens: the tokens to train on, for the cost; by default those of the configuration.
        as_json: print the record instead of tables.
    """
    from llama_core.chain.preview import preview

    shown = preview(config, here=here, parity=parity, tokens=tokens)
    if as_json:
        print_json(shown.as_dict())
        return shown.exit_code
    planned = shown.planned
    rehearsed = shown.rehearsed
    print_plan(planned)
    print_profile(shown.verdict.profile)
    print_ranks(planned, [rank.profile for rank in rehearsed.ranks] if rehearsed else planned.estimate.ranks)
    print_line(f"estimate: {planned.estimate.summary()}")
    if rehearsed is not None:
        print_line(f"dry run:  {rehearsed.summary()}")
        if rehearsed.device_overhead is not None:
            print_line(f"the device adds to that: {rehearsed.device_overhead.summary()}")
        if rehearsed.order is not None:
            print_line(f"order:    {rehearsed.order.summary()}")
    if shown.parity is not None:
        print_line(f"parity:   {shown.parity.summary()}")
    print_host(shown.verdict)
    print_rates(planned)
    print_cost(planned, shown.cost)
    if expected := shown.expected:
        print_line(f"expect:   {expected}")
    print_line(f"verdict:  {shown.verdict.summary()}")
    for note in shown.notes:
        print_line(f"note: {note}")
    return shown.exit_code


DRY_RUN = Command(
    "dry-run",
    "run a real step on fake tensors and count every byte; needs no GPU",
    _dry_run,
    examples=(
        "--model llama3_8b --gpus 8 --gpu-type h200",
        "--model tiny_llama3_50m --gpus 4 --tensor-parallel 2 --pipeline-parallel 2 --device cpu --parity",
    ),
    arguments=(
        TOKENS,
        Argument(
            "--parity",
            action="store_true",
            help="also train a tiny model under the plan on real processes, and compare it with one process",
        ),
    ),
    flags=FLAGS,
)


def _validate_environment(options: argparse.Namespace) -> int:
    from llama_core.chain.environment import validate_environment

    report = validate_environment(requested_config(options))
    num_errors = len(report.errors)
    if options.json:
        print_json(report.as_dict())
    else:
        print_environment(report)
        if not num_errors:
            print_line("environment ready for training")
        else:
            print_line(f"not ready: {num_errors} {'error' if num_errors == 1 else 'errors'}")
    return 2 if num_errors else 0


VALIDATE_ENVIRONMENT = Command(
    "validate-environment",
    "check whether a run can start on this machine",
    _validate_environment,
    examples=("", "--launcher slurm --gpus 16 --nodes 2 --partition gpu"),
    flags=FLAGS,
)
