"""Runs of two ranks with an injected fault, and how they go on."""

import importlib
import json
import os
import shlex
import shutil
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path

import pytest

from llama_core.chain.prepare import prepare_run
from llama_core.config.run import RunConfig
from llama_core.launch.attempts import read_rank_exits
from llama_core.launch.jobs import submission
from llama_core.records.checkpoints import recorded_sums
from llama_core.records.files import read_json, read_typed
from llama_core.records.job import JobRecord
from llama_core.records.metrics import read_metrics
from llama_core.runs.diagnosis import diagnose
from llama_core.runs.loading import load_config, load_plan
from training_infra import cli

INJECTION = Path(__file__).with_name("injection")
NUM_RANKS = 2
STEPS = 6
MODEL = {"hidden_size": 32, "num_layers": 2, "ffn_size": 64, "head_dim": 8, "vocab_size": 512}
TRAINING = {
    "batch_size": 4, "seq_len": 64, "steps": STEPS, "precision": "fp32", "checkpoint_every": 2, "eval_every": 2,
    "eval_sequences": 2, "keep_checkpoints": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A part of a run, and the function that stands for it."""

    module: str = ""
    function: str = ""
    """Its name in the module; without one, the phase is the first moment of a process."""
    step: int = 0
    """The first step in which the fault acts."""
    after: bool = False
    """Whether it acts when the function has returned, instead of when it is called."""
    argument: str = ""
    """How an argument of the call ends, as text."""
    process: str = "worker"
    """Whose process it is: ``worker`` or ``supervisor``."""
    ranks: tuple[int, ...] = (0, 1)
    """The ranks that come here."""


PHASES = {
    "start of the supervisor": Phase(process="supervisor"),
    "supervisor, handlers of submitit": Phase(
        "submitit.core.job_environment", "JobEnvironment._handle_signals", after=True, process="supervisor"
    ),
    "start of the rank": Phase(),
    "start-up, before the ranks meet": Phase("llama_core.launch.rank.checks", "check_own_device"),
    "start-up, after they have met": Phase("llama_core.launch.rank.checks", "check_ranks_agree"),
    "tokenising": Phase("llama_core.data.shards.store", "write_shard", ranks=(0,)),
    "reading the data": Phase("llama_core.data.datasets", "load_datasets"),
    "forward": Phase("llama_core.models.llama", "Llama.forward", step=5),
    "backward": Phase("llama_core.parallel.pipeline", "_Execution._backward", step=5),
    "collective": Phase("llama_core.parallel.apply", "ParallelModel._sum_over_ranks", step=5),
    "optimizer step": Phase("torch.optim.optimizer", "Optimizer.zero_grad", step=5),
    "checkpoint: staging": Phase("llama_core.training.saving", "KeptStager.stage", step=6),
    "checkpoint: writing": Phase("llama_core.records.checksums", "SummedFile.write", step=6, after=True),
    "checkpoint: before the rename": Phase(
        "llama_core.records.checkpoints", "write_manifest", step=5, after=True, ranks=(0,)
    ),
    "checkpoint: after the rename": Phase(
        "llama_core.records.files", "atomic_write", step=5, argument="latest", ranks=(0,)
    ),
    "metrics flush": Phase("llama_core.records.metrics", "_write_part", step=6, after=True, ranks=(0,)),
    "evaluation": Phase("llama_core.parallel.apply", "ParallelModel.evaluate", step=5),
    "end of training": Phase("llama_core.training.engine", "NativeEngine.end_saving", step=6),
    "shut-down": Phase("torch.distributed.distributed_c10d", "destroy_process_group", step=6),
}
"""Every phase, and the function whose call is the moment of the fault. Ranks that never call it have no such phase."""


@dataclass(frozen=True)
class Fault:
    """What to break, and when; ``injection/sitecustomize.py`` does it.

    An action is ``{"signal": "SIGKILL"}`` (with ``count``, and ``to="supervisor"``), ``{"sleep": seconds}``,
    ``{"raise": message}``, ``{"errno": number}``, ``{"environment": variables}``, ``{"factor": "nan"}``, which
    multiplies what the function returns, with ``"lasts": True`` in every call from then on, or ``{"flip": bit}``, in a
    weight of the optimizer whose method it is.
    """

    phase: str
    action: dict
    rank: int | None = 0
    """None: every rank."""
    step: int | None = None
    """The first step in which it acts, if not the phase's."""
    times: int = 1
    """In how many steps it acts in all."""

    def to_json(self, proof):
        """Return what the processes of the run read; each that acts adds a line to a file that begins as ``proof``.

        Fails if the function that stands for the phase is gone.
        """
        phase = PHASES[self.phase]
        if phase.function:
            try:
                reduce(getattr, phase.function.split("."), importlib.import_module(phase.module))
            except (ImportError, AttributeError):
                pytest.fail(
                    f"{phase.module}.{phase.function} is gone: name the function that now stands for the phase "
                    f"{self.phase!r} in PHASES of {__file__}",
                    pytrace=False,
                )
        place = asdict(phase) | {"function": [phase.module, phase.function] if phase.function else None}
        step = phase.step if self.step is None else self.step
        own = {"action": self.action, "rank": self.rank, "times": self.times, "step": step, "proof": str(proof)}
        return json.dumps(place | own)


class FaultyRun:
    """A run of two ranks that ends, or goes on, after a fault.

    Args:
        folder: an empty folder for the run and the proof.
        data: a file of texts.
        settings: changes of the configuration, as ``key=value``.
        token_cache: the folder of the token cache; by default one of its own.
    """

    def __init__(self, folder, data, *settings, token_cache=None):
        self.folder = folder
        self.token_cache = token_cache or folder / "cache"
        config = RunConfig.from_mapping(
            {
                "architecture": MODEL,
                "training": TRAINING,
                "data": {"source": str(data), "validation_fraction": 0.1, "cache_dir": str(self.token_cache)},
                "parallel": {"gpus": NUM_RANKS, "tp": 1, "pp": 1},
                "launch": {"device": "cpu"},
                "tracking": {"tensorboard": False},
                "benchmark": {"steps": 0},
            },
            settings,
        )
        self.run = prepare_run(config, folder / "run")
        self.outcome = None
        self.attempts = 0

    def train(self, fault=None, while_running=lambda handle: None):
        """Train until the job ends, with a fault; return the outcome. Fails if the fault was not injected."""
        self.attempts += 1
        proof = self.folder / f"proof-{self.attempts}"
        with pytest.MonkeyPatch.context() as patch:
            if fault is not None:
                patch.setenv("INJECTED_FAULT", fault.to_json(proof))
                patch.setenv("PYTHONPATH", os.pathsep.join([str(INJECTION), *filter(None, [os.getenv("PYTHONPATH")])]))
            handle = submission.submit(self.run, load_config(self.run), load_plan(self.run).world_size)
        try:
            while_running(handle)
            self.outcome = handle.wait()
        finally:
            handle.cancel(grace_seconds=0)
        if fault is not None:
            due = range(NUM_RANKS) if fault.rank is None else [fault.rank]
            acted = [rank for rank in due if Path(f"{proof}-{rank}").exists()]
            assert acted, f"the fault was not injected; the run ended as {self.outcome}"
        return self.outcome

    def forget_tokens(self):
        """Remove the token cache, so that the ranks tokenise the data."""
        shutil.rmtree(self.token_cache)

    def resume(self):
        """Run the command that ``doctor`` prints, if any; return the state that it told before.

        Fails if a checkpoint is damaged, or if metrics and checkpoint contradict each other.
        """
        diagnosis = diagnose(self.run)
        wrong = [fact for fact in diagnosis.facts if fact.is_problem and fact.subject != "state"]
        assert not wrong, wrong
        if diagnosis.command:
            program, *arguments = shlex.split(diagnosis.command)
            assert program == "training-infra"
            assert cli.main(arguments) == 0
        after = diagnose(self.run)
        assert (after.state, after.is_healthy) == ("finished", True), after
        return diagnosis

    def rank_exits(self):
        """Return how the ranks of the last job ended."""
        return read_rank_exits(self.run, read_typed(self.run.job, JobRecord), 0)

    def rows(self):
        """Return what every step computed."""
        return read_metrics(self.run).select(["step", "tokens", "loss", "grad_norm", "eval_loss"]).to_pylist()

    def sums(self):
        """Return the checksums of the tensors of the last checkpoint: weights and both moments."""
        sums = recorded_sums(self.run.checkpoints / f"step-{STEPS:08d}")
        return {name: one for name, one in sums.items() if name.endswith(".distcp")}

    def summary(self):
        """Return what the run's summary says about its training, without times and sizes."""
        summary = read_json(self.run.training)
        return {name: summary[name] for name in ("steps", "tokens", "train_loss", "eval_loss", "eval_tokens")}

    def equals(self, other):
        """Fail unless every loss, norm, weight and moment is that of another run, bit for bit."""
        assert self.rows() == other.rows()
        assert self.sums() == other.sums()
        assert self.summary() == other.summary()


def where(diagnosis):
    """Return where a run went on, for the table."""
    good = [one.step for one in diagnosis.checkpoints if not one.problem]
    if not diagnosis.command:
        return "nothing to do"
    return f"from step {good[-1]}" if good else "from the start"
