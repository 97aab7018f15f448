"""Ask a question about weights: of one checkpoint after another, on one device or on several that share the work."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from llama_core.config.models import ModelSpec
from llama_core.config.run import RunConfig
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.evaluation.generate import choose_device, find_model, own_tokenizer
from llama_core.evaluation.plan import EvaluationPlan, shared_plan
from llama_core.evaluation.ranks import answers_of_ranks
from llama_core.hugging_face.pretrained import is_checkpoint
from llama_core.imports import importing_torch
from llama_core.planning.plan import ParallelPlan
from llama_core.records.checkpoints import checkpoint_step, list_checkpoints
from llama_core.records.directory import RunDirectory
from llama_core.runs.checkpoints import Best

if TYPE_CHECKING:
    from llama_core.evaluation.inference.divided import EvaluatingRanks
    from llama_core.models.llama import Llama

All = Literal["all"]
"""Stands for the steps of all checkpoints."""
Models = Iterable[tuple[Path, RunConfig]]
"""Where weights are, all of them intact, and the configuration of a run that has them."""
Tell = Callable[[str], None]
OnProgress = Callable[[str, int, int], None]
"""Called with a name, and how many of its requests are done and there are, of those of the first device."""


class Answer(Protocol):
    """What is found out about some weights."""

    def as_record(self) -> dict[str, Any]:
        """Return it for another process."""


@dataclass(frozen=True)
class Devices:
    """What computes an evaluation.

    Raises:
        ConfigError: if the numbers do not divide each other.
    """

    device: str | None = None
    """cpu or cuda; None for cuda if present."""
    dtype: str = "fp32"
    """dtype of the weights and of the arithmetic, one of ``config_json.writing.DTYPES``."""
    num_gpus: int = 1
    """Devices that share the work, each with a process of its own."""
    tensor_parallel: int = 1
    """Devices that divide the matrices of each copy of the model."""
    pipeline_parallel: int = 1
    """Devices that divide the layers of each copy."""
    num_nodes: int = 1
    """Nodes of the job around this process that have them, as many each; 1 for this machine."""

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        if min(numbers.values()) < 1:
            raise ConfigError(
                f"{', '.join(f'{name}={number}' for name, number in numbers.items())}: use at least 1 of each"
            )
        numbers["tensor_parallel x pipeline_parallel"] = self.tensor_parallel * self.pipeline_parallel
        for name, number in numbers.items():
            if self.num_gpus % number:
                raise ConfigError(f"{name}={number} does not divide num_gpus={self.num_gpus}; use a divisor")

    @classmethod
    def of(cls, shared: EvaluationPlan, device: str | None, dtype: str) -> Self:
        """Return the devices of a plan."""
        plan = shared.plan
        return cls(device, dtype, plan.world_size, plan.tp, plan.pp, shared.nodes)

    def plan(self, spec: ModelSpec) -> ParallelPlan:
        """Return how they divide a model.

        Raises:
            PlanError: if they cannot.
        """
        return shared_plan(spec, self.num_gpus, self.tensor_parallel, self.pipeline_parallel)


_NUMBERS = ("num_gpus", "tensor_parallel", "pipeline_parallel", "num_nodes")
ONE_DEVICE = Devices()

A = TypeVar("A", bound=Answer)
A_co = TypeVar("A_co", bound=Answer, covariant=True)


@dataclass(frozen=True)
class AskedModel:
    """A model that a question is about."""

    weights: Path
    config: RunConfig
    tokenizer: Tokenizer
    model: "Llama"
    """The whole model, or this rank's part of it."""
    ranks: "EvaluatingRanks"
    """Those that share the work; just this process, if it is alone."""

    @property
    def step(self) -> int | None:
        """The step of a checkpoint; None for a folder."""
        return checkpoint_step(self.weights) if is_checkpoint(self.weights) else None


class Question(Protocol[A_co]):
    """A question about weights, with everything that is needed to ask it."""

    kind: ClassVar[str]
    """Names the type for another process."""
    tokenizer: str | None
    """'bytes' or a path; None for the run's or the folder's."""

    def check(self, weights: Path, config: RunConfig) -> None:
        """Refuse what cannot be answered, before any weights are read.

        Raises:
            TrainingInfraError: with what to change.
        """

    def prepare(self, weights: Path, config: RunConfig, tell: Tell) -> None:
        """Fetch what is asked, unless that has been done; on each machine, one rank goes first.

        Raises:
            TrainingInfraError: with what to change.
        """

    def answers(self, asked: AskedModel, tell: Tell, on_progress: OnProgress) -> Iterator[A_co]:
        """Yield what is found out about a model. All ranks of ``asked`` call it together."""

    def as_record(self) -> dict[str, Any]:
        """Return the question for another process."""

    def answer(self, record: Mapping[str, Any]) -> A_co:
        """Return the answer that a record describes."""


def ask(
    question: Question[A],
    source: Path,
    *,
    steps: int | Best | All | None,
    devices: Devices,
    tell: Tell,
    on_progress: OnProgress,
) -> Iterator[A]:
    """Yield the answers for each of the checkpoints asked for.

    Args:
        question: the question.
        source: a run's directory, one of its checkpoints, or a folder with a Hugging Face Llama or PEFT's adapters.
        steps: the step of a run's checkpoint, ``best`` or ``all``; None for the newest intact one.
        devices: what computes.
        tell: called with a line about what is evaluated, and about each damaged checkpoint that is passed over.
        on_progress: called as the work goes on.

    Raises:
        PlanError: if the devices cannot divide the model.
        RunDirectoryError: if the run has no such checkpoint.
        CheckpointError, WeightsError: if weights are damaged or cannot be read.
        DataError: if the tokenizer cannot be used.
        EnvironmentMismatchError, DoesNotFitError: if a device is missing or too small.
        TrainingInfraError: if the question cannot be answered.
    """
    found = (find_model(source, step, tell) for step in steps_to_evaluate(source, steps))
    first = next(found)
    question.check(*first)  # before anything is started
    _, config = first
    plan = devices.plan(config.spec)
    device = choose_device(devices.device, config, devices.dtype, plan, num_nodes=devices.num_nodes)
    order = AskedQuestion(question, device, devices.dtype, plan)
    models = chain([first], found)
    if plan.world_size == 1:
        yield from order.follow(models, tell, on_progress)
        return
    record = order.as_record() | {"weights": [str(weights) for weights, _ in models]}
    for said in answers_of_ranks(record, plan.world_size, devices.num_nodes):
        match said:
            case {"tell": text}:
                tell(text)
            case {"progress": progress}:
                on_progress(*progress)
            case {"answer": answer}:
                yield question.answer(answer)


def steps_to_evaluate(source: Path, asked: int | Best | All | None) -> Sequence[int | Best | None]:
    """Return the steps to evaluate, ascending; None stands for the newest, or for a folder."""
    if asked != "all":
        return [asked]
    steps = [checkpoint_step(path) for path in list_checkpoints(RunDirectory(source))]
    if not steps:
        raise RunDirectoryError(f"{source} has no checkpoint; name a run's directory, or drop --step all")
    return sorted(steps)


@dataclass(frozen=True)
class AskedQuestion(Generic[A]):
    """A question, and what computes the answers, when all of it has been checked."""

    question: Question[A]
    device: str
    """cpu or cuda."""
    dtype: str
    plan: ParallelPlan

    def as_record(self) -> dict[str, Any]:
        """Return the order for another process."""
        question = {"kind": self.question.kind} | self.question.as_record()
        return {"question": question, "device": self.device, "dtype": self.dtype, "plan": self.plan.as_dict()}

    def follow(self, models: Models, tell: Tell, on_progress: OnProgress) -> Iterator[A]:
        """Yield the answers for models, in this process or, together with others, in each of the plan's ranks.

        Args:
            models: the models.
            tell: see ``ask``, also for the next.
            on_progress: called with what this rank has done.

        Raises:
            PlanError: if the plan's number of ranks is not the number started.
        """
        with importing_torch():
            from llama_core.evaluation.inference.divided import EvaluatingRanks
            from llama_core.parallel.ranks import one_per_machine_first, this_device
            from llama_core.training.stored_weights import whole_model

        ranks = EvaluatingRanks(self.plan, self.device)
        device = str(this_device(self.device))
        for weights, config in models:
            with one_per_machine_first():
                self.question.prepare(weights, config, tell)
            tokenizer = own_tokenizer(weights, config, self.question.tokenizer)
            tell(f"{weights} in {self.dtype} on {self._where}, tokenizer {tokenizer.name}")
            model = whole_model(
                config.spec,
                weights,
                device=device,
                dtype=self.dtype,
                layers=ranks.layers(config.spec),
                divide=ranks.divide,
            )
            asked = AskedModel(weights, config, tokenizer, model, ranks)
            yield from self.question.answers(asked, tell, on_progress)
            del model, asked  # before the next one takes its memory

    @property
    def _where(self) -> str:
        plan = self.plan
        if plan.world_size == 1:
            return self.device
        degrees = [f"{axis}={getattr(plan, axis)}" for axis in ("tp", "pp", "dp") if getattr(plan, axis) > 1]
        return f"{plan.world_size} {self.device} processes ({', '.join(degrees)})"
