"""What the checkpoints of a run are evaluated on while it trains."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from llama_core.config.section import Key, Section
from llama_core.config.settings import Count, DataSource, Device, SourceName, differ_in_more_than_case, paths_by_name
from llama_core.config.slurm import Minutes, SlurmName

EvaluationDtype = Literal["fp32", "bf16", "fp16"]


class EvaluationConfig(Section):
    """What checkpoints are evaluated on while a run trains: in jobs of their own, which never hold it up."""

    every_key: ClassVar[Key | None] = Key(on_resume="allow", changes="nothing")

    tasks: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tasks, groups or tags of lm-evaluation-harness (the extra `eval`), such as [hellaswag, arc_easy]."""
    include_path: str | None = None
    """A folder with the YAML files of further tasks."""
    limit: int | None = Field(None, ge=1)
    """Most questions of each task, the first ones; default: all."""
    num_fewshot: int | None = Field(None, ge=0)
    """Solved examples before each question; default: as many as the task says."""
    chat: bool = False
    """Ask tasks in the run's chat template, with solved examples as turns."""
    system: str | None = None
    """The system prompt of tasks, with `evaluation.chat`."""
    data: Annotated[
        dict[SourceName, DataSource], BeforeValidator(paths_by_name), AfterValidator(differ_in_more_than_case)
    ] = Field(default_factory=dict)
    """Tell the loss on named data, in the forms of `data.source`: {law: law.jsonl, news: news}."""
    sequences: int = Field(256, ge=0)
    """Most sequences of each of the data, spread evenly over it; 0: all."""
    every_tokens: int = Field(0, ge=0)
    """Evaluate the first checkpoint at or after each multiple of this many tokens, and the last; 0: each checkpoint."""
    keep_waiting: int = Field(4, ge=1)
    """Most checkpoints that stay on disk because their evaluation has not ended; of more, the later ones go without."""
    max_attempts: int = Field(3, ge=1)
    """Give up on a checkpoint after this many evaluations that were killed or crashed."""
    device: Device = "auto"
    """cpu or cuda; auto: the run's in a job of its own, and the CPU in a process beside the ranks."""
    dtype: EvaluationDtype = "fp32"
    """dtype of the weights and of the arithmetic: fp32, bf16 or fp16."""
    gpus: int | None = Field(None, ge=1)
    """Devices that share each evaluation, in a process each; default: those of evaluation.nodes, or of one copy."""
    tp: Count = "auto"
    """Devices that divide the matrices of each copy; auto: the fewest GPUs that hold the model, or one CPU process."""
    pp: Count = "auto"
    """Devices that divide the layers of each copy; auto: 1 if the GPUs of a node hold it, or else as few as do."""
    nodes: Count = "auto"
    """Nodes of each job, with as many devices each; auto: as few as have these, or one for CPU processes."""
    partition: SlurmName | None = None
    """Partition of the jobs, on Slurm; default: that of the run."""
    qos: SlurmName | None = None
    """Their quality of service; default: that of the run."""
    time_limit_min: Minutes = 120
    """Their time limit, in minutes or as 12:00:00, 1-12 (a day and 12 hours)."""

    @field_validator("tp", "pp", "nodes", mode="before")
    @classmethod
    def _null_is_auto(cls, value: Any) -> Any:
        return "auto" if value is None else value

    @property
    def is_asked_for(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.tasks or self.data)
