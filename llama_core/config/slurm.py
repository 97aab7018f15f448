"""Settings of a Slurm job, checked so that no value can inject a line into the job script."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from llama_core.config.job_request import JobRequest, WrongRequest
from llama_core.redaction import assigns_secret

_TAKEN = frozenset(
    ("account", "array", "chdir", "clusters", "comment", "constraint", "cpus-per-task", "error", "export",
     "export-file", "gpus", "gpus-per-node", "gpus-per-task", "help", "input", "job-name", "kill-on-bad-exit", "mem",
     "multi-prog", "no-kill", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable",
     "partition", "qos", "quiet", "requeue", "signal", "test-only", "time", "usage", "version", "wait", "wrap")
)  # fmt: skip
"""Options that have their own keys here, or that this software relies on."""
_HARMLESS = frozenset(
    ("begin", "contiguous", "core-spec", "cores-per-socket", "cpu-bind", "cpu-freq", "cpus-per-gpu", "deadline",
     "dependency", "distribution", "exclude", "exclusive", "extra-node-info", "gpu-bind", "gpu-freq", "gres",
     "gres-flags", "hint", "licenses", "mail-type", "mail-user", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus",
     "network", "nice", "nodelist", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "oversubscribe",
     "overcommit", "power", "priority", "reservation", "segment", "sockets-per-node", "spread-job", "switches",
     "thread-spec", "threads-per-core", "time-min", "tmp", "use-min-nodes", "wckey")
)  # fmt: skip
"""Options that choose what a job gets, and name no program, file or environment."""


def _one_word(text: str) -> str:
    if not re.fullmatch(r"[\w.,:&|!()\[\]*@+-]+", text):
        raise PydanticCustomError("word", "input should be a Slurm name, without spaces or quotes")
    return text


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("line", "input should be one line of printable characters")
    return text


def _without_secret(line: str) -> str:
    if assigns_secret(line):
        raise PydanticCustomError(
            "secret",
            "input should hold no secret, since it is written to files: read it from a private one, or set it "
            "in the environment of sbatch",
        )
    return line


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise PydanticCustomError("option", "input should be the long name of an option, such as 'reservation'")
    if name in _TAKEN:
        raise PydanticCustomError("taken", "this option is set from other keys of launch and parallel; use those")
    return name


def _value(value: Any) -> Any:
    if value is not True and not isinstance(value, str | int):
        raise PydanticCustomError("value", "input should be text, an integer, or true for an option without a value")
    if value is False:
        raise PydanticCustomError("value", "leave the option out, or give it the value true")
    return _without_secret(_one_line(value)) if isinstance(value, str) else value


@dataclass(frozen=True)
class GresGpus:
    """The GPUs of each node that an option ``gres`` asks for."""

    kind: str
    """Their type in the cluster's configuration; empty for any."""
    count: int | None
    """How many; None if it does not say."""

    @classmethod
    def parse(cls, entry: str) -> Self | None:
        """Return what one entry of ``gres`` asks for, such as ``gpu:h100:8``; None if it is not about GPUs."""
        name, *rest = entry.split(":")
        if name != "gpu":
            return None
        count = int(rest.pop()) if rest and rest[-1].isdigit() else None
        return cls(":".join(rest), count)

    def entry(self, count: int) -> str:
        """Return the entry that asks for ``count`` of them."""
        kind = [self.kind] if self.kind else []
        return ":".join(["gpu", *kind, str(count)])


def _minutes(value: Any) -> Any:
    """Return the minutes of a time as Slurm writes it; anything else as it is, for the next check."""
    if not isinstance(value, str):
        return value
    written = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if written is None:
        raise PydanticCustomError("time", "input should be minutes, or a time such as 90:00, 12:00:00 or 1-12:00:00")
    days, first, second, third = (int(part) if part else 0 for part in written.groups())
    if written[1] or written[4]:  # days-hours[:minutes[:seconds]], or hours:minutes:seconds
        return days * 24 * 60 + first * 60 + second + math.ceil(third / 60)
    return first + math.ceil(second / 60)  # minutes[:seconds]


SlurmName = Annotated[str, AfterValidator(_one_word)]
OptionName = Annotated[str, AfterValidator(_option)]
OptionValue = Annotated[str | int | bool, BeforeValidator(_value)]
Line = Annotated[str, AfterValidator(_one_line), AfterValidator(_without_secret)]

Minutes = Annotated[int, Field(ge=1), BeforeValidator(_minutes)]
"""A time limit."""


class SlurmConfig(JobRequest):
    """Settings of a Slurm job."""

    partition: SlurmName | None = None
    """Partition, or several separated by commas; default: the cluster's."""
    account: SlurmName | None = None
    """Account to charge; default: the user's."""
    qos: SlurmName | None = None
    """Quality of service; default: the account's."""
    constraint: SlurmName | None = None
    """Features that nodes must have, such as 'h100&infiniband'."""
    time_limit_min: Minutes = 24 * 60
    """Time limit in minutes, or as Slurm writes it: 12:00:00, 1-12 (a day and 12 hours)."""
    cpus_per_rank: int | None = Field(None, ge=1)
    """CPU cores of each rank; default: 4 on the CPU; on CUDA its GPU's share of a node's cores, or 8 if unknown."""
    memory_gb_per_node: int | None = Field(None, ge=1)
    """Host memory per node in GiB; default: the partition's, or what the estimate needs if that is more."""
    setup: list[Line] = Field(default_factory=list)
    """Shell lines to run on the first node before the ranks start, such as 'module load cuda'."""
    options: dict[OptionName, OptionValue] = Field(default_factory=dict)
    """Further sbatch options by their long names, such as {reservation: training, exclusive: true}."""
    srun_options: dict[OptionName, OptionValue] = Field(default_factory=dict)
    """Further srun options for starting the ranks, such as {container-image: /images/llama.sqsh}."""
    requeue: bool = True
    """Requeue the job after preemption, at its time limit, and after a node failure."""
    max_attempts: int = Field(20, ge=1)
    """Give up on a job after this many starts."""
    max_parallel_jobs: int = Field(256, ge=1)
    """Maximum number of array elements that run at once."""

    @property
    def gres(self) -> list[str]:
        """The entries of ``options.gres``."""
        return [entry for entry in str(self.options.get("gres", "")).split(",") if entry]

    @property
    def gres_gpus(self) -> GresGpus | None:
        """The GPUs that ``options.gres`` asks for; None if it names none."""
        return next(filter(None, map(GresGpus.parse, self.gres)), None)

    def options_with_gpus(self, count: int) -> dict[str, str | int | bool]:
        """Return the options, of which ``gres`` asks for ``count`` GPUs of each node if it names GPUs."""
        gpus = self.gres_gpus
        if gpus is None:
            return self.options
        others = [entry for entry in self.gres if GresGpus.parse(entry) is None]
        entries = [gpus.entry(count), *others] if count else others
        without = {key: value for key, value in self.options.items() if key != "gres"}
        return without | ({"gres": ",".join(entries)} if entries else {})

    @property
    def node_memory_gb(self) -> int | None:
        """Host memory that it asks for on each node, in GiB; None if it leaves that open."""
        return self.memory_gb_per_node

    @property
    def gpus_of_a_node(self) -> int | None:
        """GPUs that ``options.gres`` asks for on each node; None if it gives no number."""
        return self.gres_gpus.count if self.gres_gpus else None

    @property
    def max_starts(self) -> int:
        """How often its job may start under one id."""
        return self.max_attempts if self.requeue else 1

    def cores_of_a_rank(self, device: str) -> int:
        """Return the cores of a rank on ``device``; on CUDA, if none were asked for, a job may get others."""
        return self.cpus_per_rank or super().cores_of_a_rank(device)

    def wrong_gpus(self, num_ranks: int) -> Iterator[WrongRequest]:
        """Yield why ``options.gres`` does not ask for the GPUs of the ``num_ranks`` ranks of a node."""
        gpus = self.gres_gpus
        if gpus is None:
            return
        text = ""
        if sum(entry.partition(":")[0] == "gpu" for entry in self.gres) > 1:
            text = " names GPUs twice; use one kind"
        elif gpus.count not in {None, num_ranks}:
            text = f" asks for {gpus.count} GPUs on each node, which gets {num_ranks} ranks; use "
            text += f"{gpus.entry(num_ranks)}, or set launch.nodes"
        if text:
            yield WrongRequest("options.gres", self.options["gres"], text)

    def of_an_evaluation(self, partition: str | None, qos: str | None, time_limit_min: int, *, with_gpus: bool) -> Self:
        """Return what the job of an evaluation asks for; the arguments are those of ``JobRequest``."""
        options = self.options if with_gpus else self.options_with_gpus(0)
        return self.model_copy(
            update={
                "partition": partition or self.partition,
                "qos": qos or self.qos,
                "time_limit_min": time_limit_min,
                "memory_gb_per_node": None,
                # the whole nodes that ranks may want
                "options": {key: value for key, value in options.items() if key != "exclusive"},
            }
        )

    @classmethod
    def runs_programs(cls, key: str) -> bool:
        """Return whether a setting, by its dotted name inside the section, may run programs as this user."""
        section, _, name = key.partition(".")
        return section in {"setup", "options", "srun_options"} and name not in _HARMLESS
