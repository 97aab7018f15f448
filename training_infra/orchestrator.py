"""``LlamaTrainingOrchestrator``: one run as a Python object."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llama_core.chain import environment, steps
from llama_core.chain.chain import run_chain
from llama_core.chain.loader import refuse_started_ranks, run_loader_chain
from llama_core.chain.planned import plan_anywhere, plan_for_gpu
from llama_core.chain.preview import preview
from llama_core.config.overrides import Override
from llama_core.config.parameter_counts import counts_in_words
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.machine.validate import EnvironmentReport
from llama_core.planning.memory.verdict import MemoryEstimate
from llama_core.records.directory import RunDirectory
from llama_core.records.measurements import TrainingSummary
from llama_core.runs.console import say
from llama_core.runs.continuing import run_here
from llama_core.storage.stores import is_url
from llama_core.units import GB
from training_infra.config import TrainingConfig, TrainingStrategy, check_kind, with_settings
from training_infra.distributed.config import MADE_BY_FACTORY, DistributedConfig
from training_infra.interruption import one_line_if_interrupted
from training_infra.local import local_steps
from training_infra.spelling import in_python, python_spelling

if TYPE_CHECKING:
    from llama_core.rehearsal.dry_run import DryRunResult


Loader = Iterable[Any] | Callable[[], Iterable[Any]]
"""An iterable of batches, or a function that makes one."""


class LlamaTrainingOrchestrator:
    """One run: configure it, estimate it, rehearse it, and launch it.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face
            folder.
        training_strategy: the strategy or its name.
        num_gpus: devices in all; without CUDA, one device is the CPU.
        auto_configure: search for the fastest plan that fits wherever settings are left open; False
            uses no tensor, pipeline or context parallelism that is not asked for.
        training_config: how the model is trained.
        distributed_config: how the work is divided, with the number of
            devices; replaces ``num_gpus``.
        **settings: see ``configure``.

    Raises:
        ConfigError: if settings are wrong; the message names all of them.
    """

    @python_spelling()
    def __init__(
        self,
        model_variant: str,
        training_strategy: TrainingStrategy | str = "standard",
        num_gpus: int = 1,
        *,
        auto_configure: bool = True,
        training_config: TrainingConfig | None = None,
        distributed_config: DistributedConfig | None = None,
        **settings: Any,
    ) -> None:
        remedy = "make it with TrainingConfig(...)"
        check_kind("training_config", training_config, TrainingConfig | None, remedy)
        strategy = training_strategy
        if isinstance(strategy, str):
            strategy = TrainingStrategy(strategy)
        self.auto_configure = auto_configure
        keys = {"model": model_variant, "parallel": self._divided({"gpus": num_gpus})}
        self.config = RunConfig.from_mapping(keys | strategy.as_keys())
        self.run_dir: Path | None = None
        """The run's directory; None before launch."""
        if distributed_config is not None:
            self.distributed_config = distributed_config
        self.configure(**(dict(training_config.settings if training_config else {}) | settings))

    @python_spelling()
    def configure(self, **settings: Any) -> None:
        """Change settings by the last word of their key: ``configure(batch_size=16)``.

        If several sections have the word, the first in ``RunConfig`` counts: ``steps`` is
        ``training.steps``.

        Raises:
            ConfigError: if there is no such setting, or its value is invalid.
        """
        self.config = with_settings(self.config, settings)

    @property
    def distributed_config(self) -> DistributedConfig:
        """How the work is divided.

        Assign a value of ``ConfigurationFactory`` to replace all of it, ``gpus`` too.

        Raises:
            ConfigError: if the assigned value contradicts the other settings.
        """
        return self.config.parallel

    @distributed_config.setter
    @python_spelling()
    def distributed_config(self, asked: DistributedConfig) -> None:
        check_kind("distributed_config", asked, DistributedConfig, MADE_BY_FACTORY)
        divided = self._divided(asked.model_dump())
        self.config = self.config.with_overrides(Override("parallel", divided))

    def _divided(self, parallel: dict[str, Any]) -> dict[str, Any]:
        """Return a request for devices; without auto-configuration, degrees left open are 1."""
        if self.auto_configure:
            return parallel
        given = {key: value for key, value in parallel.items() if value != "auto"}
        return parallel | dict.fromkeys(("tp", "pp", "cp"), 1) | given

    @python_spelling()
    def print_configuration(self) -> None:
        """Print the model, the filled-in defaults, the plan and its memory.

        The plan is for this machine if it has the devices, otherwise for GPUs that need not be
        here.
        """
        planned = plan_anywhere(self.config)
        spec = self.config.spec
        say("model", f"{self.config.model_in_words}, {spec.num_parameters:,} parameters")
        if spec.lora:
            say("weights", counts_in_words(spec))
        for choice in planned.choices:
            say("default", in_python(choice))
        say("plan", planned.plan.summary())
        for note in planned.plan.notes:
            say("note", in_python(note))
        say("estimate", planned.estimate.summary())
        for note in planned.estimate.notes:
            say("note", in_python(note))

    @python_spelling()
    def estimate_memory(self) -> MemoryEstimate:
        """Return the estimated bytes of a rank by category and phase."""
        return plan_anywhere(self.config).estimate

    @python_spelling()
    def dry_run(self) -> "DryRunResult | None":
        """Return the bytes of every rank, counted on fake tensors; None under DeepSpeed.

        That needs no device.
        """
        return preview(self.config, here=True, data=False).rehearsed

    @one_line_if_interrupted()
    @python_spelling()
    def launch_training(
        self,
        train_dataloader: Loader | None = None,
        val_dataloader: Loader | None = None,
        *,
        run_dir: Path | str | None = None,
        resume: bool = False,
        allow_data_change: bool = False,
    ) -> TrainingSummary:
        """Train, and write the run's report.

        With a dataloader, one device trains in this process. Several devices train on the
        ranks started by torchrun or srun, if this is one of them; otherwise this starts
        ranks on this machine and sends them the dataloader. Without a dataloader, a job
        trains on ``data.source``.

        Args:
            train_dataloader: an iterable of global batches, or a function that makes one:
                arrays of tokens [B, S], pairs of inputs and targets, or mappings with
                ``input_ids``, whose ``labels`` are not shifted, as in Hugging Face. Ranks
                divide the rows of every batch.
            val_dataloader: held-out batches in the same forms.
            run_dir: the run's directory; by default ``runs/<model>-<date>-<fingerprint>``. With
                ``resume``, also its address on a mirror.
            resume: continue the run in ``run_dir``, or the newest unfinished
                one of this configuration.
            allow_data_change: let the run in ``run_dir`` go on with other sources, weights or
                stages of its mixture; each source that is the same goes on where it was. Not with a
                dataloader, whose order is its own.

        Raises:
            TrainingInfraError: if the request is wrong or the run does not finish.
            InterruptedRunError: if Ctrl-C has stopped the run; it is a KeyboardInterrupt too.
        """
        if is_url(run_dir):
            run_dir = run_here(str(run_dir), resume=resume, tell=partial(say, "resume"))
        path = None if run_dir is None else Path(run_dir)
        if train_dataloader is not None and allow_data_change:
            what = "allow_data_change is for a mixture (data.sources)"
            raise ConfigError(f"{what}; leave it out with a dataloader")
        own = local_steps(self.config, path, resume=resume, allow_data_change=allow_data_change)

        def validate(run: RunDirectory) -> EnvironmentReport:
            self.run_dir = run.path  # set early, for runs that fail
            return steps.validate(run)

        own = replace(own, validate=validate)
        if train_dataloader is not None:
            loaders = (train_dataloader, val_dataloader)
            run = run_loader_chain(self.config, *loaders, own, path, resume=resume)
        else:
            refuse_started_ranks()
            run = run_chain(own)
        self.run_dir = run.path
        return steps.training_summary(run)


def quick_start(
    model_variant: str,
    strategy: TrainingStrategy | str = "standard",
    num_gpus: int = 1,
    **settings: Any,
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for ``model_variant`` with defaults for everything else.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face
            folder.
        strategy: the strategy or its name.
        num_gpus: devices in all.
        **settings: as for ``LlamaTrainingOrchestrator.configure``.
    """
    return LlamaTrainingOrchestrator(model_variant, strategy, num_gpus, **settings)


def create_tiny_llama3_orchestrator(
    size: str = "50m",
    num_gpus: int = 1,
    strategy: TrainingStrategy | str = "standard",
    **settings: Any,
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for the Llama 3 of ``size`` 50m or 150m.

    Other arguments are those of ``quick_start``.
    """
    return LlamaTrainingOrchestrator(f"tiny_llama3_{size}", strategy, num_gpus, **settings)


def create_llama3_8b_orchestrator(
    num_gpus: int = 1,
    strategy: TrainingStrategy | str = "standard",
    *,
    instruct: bool = False,
    **settings: Any,
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3 8B or its instruct variant.

    Other arguments are those of ``quick_start``.
    """
    return LlamaTrainingOrchestrator(_llama3("8b", instruct), strategy, num_gpus, **settings)


def create_llama3_70b_orchestrator(
    num_gpus: int = 8,
    strategy: TrainingStrategy | str = "standard",
    *,
    instruct: bool = False,
    **settings: Any,
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3 70B or its instruct variant.

    Other arguments are those of ``quick_start``.
    """
    return LlamaTrainingOrchestrator(_llama3("70b", instruct), strategy, num_gpus, **settings)


def create_llama3_405b_orchestrator(
    num_gpus: int = 64,
    strategy: TrainingStrategy | str = "standard",
    *,
    instruct: bool = False,
    **settings: Any,
) -> LlamaTrainingOrchestrator:
    """Return an orchestrator for Llama 3.1 405B, also as an instruct model.

    Other arguments are those of ``quick_start``.
    """
    own = {"instruct": True} if instruct else {}
    return LlamaTrainingOrchestrator("llama3_405b", strategy, num_gpus, **(own | settings))


def _llama3(size: str, instruct: bool) -> str:
    return f"llama3_{size}_instruct" if instruct else f"llama3_{size}"


@python_spelling()
def estimate_requirements(
    model_variant: str,
    batch_size: int = 8,
    sequence_length: int | None = None,
    num_gpus: int = 1,
    strategy: TrainingStrategy | str = "standard",
    **settings: Any,
) -> dict[str, Any]:
    """Return the estimated memory of training.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face
            folder.
        batch_size: sequences per optimizer step over all devices.
        sequence_length: tokens per sequence; by default the model's usual length.
        num_gpus: GPUs in all.
        strategy: the strategy or its name.
        **settings: as for ``LlamaTrainingOrchestrator.configure``.

    Returns:
        ``memory_per_gpu_gb`` (peak of the fullest GPU, in GB of 1e9 bytes),
        ``min_memory_per_gpu_gb`` (peak of the emptiest), ``host_memory_per_node_gb``, ``fits``,
        ``device``, ``plan`` (a sentence), ``recommendations`` (sentences), ``categories`` (bytes at
        the peak by category) and ``ranks`` (the same for every rank of a pipeline).
    """
    orchestrator = LlamaTrainingOrchestrator(
        model_variant,
        strategy,
        num_gpus,
        batch_size=batch_size,
        seq_len=sequence_length,
        **settings,
    )
    planned = plan_for_gpu(orchestrator.config)
    estimate = planned.estimate
    return {
        "memory_per_gpu_gb": estimate.profile.peak_bytes / GB,
        "min_memory_per_gpu_gb": min(rank.peak_bytes for rank in estimate.ranks) / GB,
        "host_memory_per_node_gb": estimate.host_bytes_of_node / GB,
        "plan": planned.plan.summary(),
        "fits": estimate.fits,
        "device": estimate.device,
        "recommendations": list(estimate.notes),
        "categories": dict(estimate.profile.peak),
        "ranks": [dict(rank.peak) for rank in estimate.ranks],
    }


@one_line_if_interrupted()
@python_spelling()
def tokenize(
    model_variant: str,
    source: str | list[str] | None = None,
    *,
    num_workers: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Tokenise the data of a run with all cores, so that no job waits for it.

    It goes on where an earlier call was stopped.

    Args:
        model_variant: a model listed by ``training-infra models``, or the path of a Hugging Face
            folder.
        source: what ``data.source`` takes: files, folders or wildcards; None for a
            mixture, or the default.
        num_workers: processes on this machine, or jobs, if the launcher gives some to tasks.
        **settings: as for ``LlamaTrainingOrchestrator.configure``, such as ``tokenizer``.

    Returns:
        ``num_shards``, ``num_new_shards``, ``num_documents``, ``num_tokens``,
        ``seconds`` and ``directories``.
    """
    from llama_core.chain.tokenize import tokenize as tokenize_data

    own = {} if source is None else {"source": source}
    orchestrator = LlamaTrainingOrchestrator(model_variant, **(own | settings))
    return tokenize_data(orchestrator.config, num_workers).as_dict()


def evaluate(
    source: str | Path,
    data: Mapping[str, str | list[str]] | None = None,
    *,
    tasks: Sequence[str] | None = None,
    include_path: str | Path | None = None,
    steps: int | Literal["best", "all"] | None = None,
    num_sequences: int | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Return the loss and perplexity of weights on what their run has held out, or on other data.

    With ``tasks``, return the scores on them instead. What checkpoints of a run score is also
    recorded in its directory.

    Args:
        source: a run's directory, one of its checkpoints, or a folder with a Hugging Face
            Llama or PEFT's adapters.
        data: what to evaluate on, by name, as ``data.source`` takes it; by default
            what the run has held out.
        tasks: instead of data, names of tasks, groups or tags of lm-evaluation-harness.
        include_path: a folder with the YAML files of further tasks.
        steps: the step of a run's checkpoint, ``"best"`` or ``"all"``; by
            default the newest intact one.
        num_sequences: most sequences of each of the data, spread evenly; 0 for all. By default
            those of an evaluation in training.
        **settings: ``tokenizer``, ``device`` (cpu or cuda), ``dtype`` (fp32, bf16 or fp16),
            ``num_gpus`` (devices that share the work), ``tensor_parallel`` and
            ``pipeline_parallel`` (devices among them that divide the matrices and the layers of
            each copy of the model), ``num_nodes`` (of the job around this process); for data also
            ``seq_len``; for tasks also ``limit`` (most questions of each), ``num_fewshot``,
            ``chat``, ``system`` and ``allow_code`` (execute Python code that comes with a task, or
            that the model writes for one).

    Returns:
        For each checkpoint and name of data: ``weights``, ``step``, ``data``, ``loss`` (nats per
        token), ``standard_error``, ``perplexity``, ``tokens`` and ``seq_len``. For each checkpoint,
        task and metric: ``weights``, ``step``, ``task``, ``metric``, ``value``, ``standard_error``,
        ``higher_is_better``, ``examples``, ``version`` and ``num_fewshot``.

    Raises:
        ConfigError: if both data and tasks are given.
    """
    if tasks is not None:
        if data is not None or num_sequences is not None:
            remedy = "evaluate on data in a call of its own"
            raise ConfigError(f"tasks and data exclude each other; {remedy}")
        return _scores_on_tasks(Path(source), tasks, include_path, steps, settings)
    if include_path is not None:
        raise ConfigError("include_path has no effect without tasks; name tasks, or drop it")
    from llama_core.evaluation.held_out import evaluate as evaluate_weights
    from llama_core.evaluation.questions import Devices
    from llama_core.evaluation.recording import recorded_losses

    named = None
    if data is not None:
        named = {}
        for name, paths in data.items():
            named[name] = paths if isinstance(paths, str) else tuple(paths)
    devices = _taken_from(settings, Devices)
    asked = settings | {"num_sequences": num_sequences}
    found = evaluate_weights(Path(source), named, steps=steps, devices=devices, **asked)
    return [one.as_dict() for one in recorded_losses(found, dtype=devices.dtype, **asked)]


def _scores_on_tasks(
    source: Path,
    names: Sequence[str],
    folder: str | Path | None,
    steps: int | Literal["best", "all"] | None,
    settings: dict[str, Any],
) -> list[dict[str, Any]]:
    from llama_core.evaluation.questions import Devices
    from llama_core.evaluation.recording import recorded_tasks
    from llama_core.evaluation.tasks import Asked, evaluate_tasks

    if isinstance(names, str):
        raise ConfigError(f"tasks={names!r}: give a list of names, [{names!r}]")
    asked = _taken_from(settings, Asked)
    devices = _taken_from(settings, Devices)
    found = evaluate_tasks(
        source,
        names,
        folder=folder,
        steps=steps,
        asked=asked,
        devices=devices,
        **settings,
    )
    tokenizer = settings.get("tokenizer")
    records: list[dict[str, Any]] = []
    for one in recorded_tasks(found, asked, tokenizer=tokenizer, dtype=devices.dtype):
        records += one.as_dicts()
    return records


def _taken_from(settings: dict[str, Any], kind: Any) -> Any:
    """Take the fields of a dataclass out of ``settings``, and return one with their values."""
    own = {field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings}
    return kind(**own)


def validate_environment() -> dict[str, Any]:
    """Check this machine.

    Returns:
        ``errors``, ``warnings``, ``facts``, and ``problems`` (of the facts, by name).
    """
    return asdict(environment.validate_environment())
