"""Turn a row of text into the job it describes; a framework's defaults fill the gaps.

If a row leaves the recipe open, several jobs are possible; the first that fits the row's GPU is taken, since the row
did run on it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from llama_core.errors import ConfigError, PlanError
from llama_core.planning.frameworks.architectures import Architecture, published_architecture
from llama_core.planning.frameworks.job import Job, Recompute, Schedule
from llama_core.planning.frameworks.registry import compiled, framework
from llama_core.planning.frameworks.traits import CROSS_ENTROPY, Framework

Row = Mapping[str, str]

_UNSAID = {"", "n/a", "na", "unknown", "unspecified", "default"}
_LEVERS = ("packed", "compile", "chunked", "activation checkpointing", "optimizer in bwd", "activation offload", "8bit")
"""Memory levers in the order of torchtune's README, in a table whose rows each add one to the row before."""
_CONDITIONS = ("gpu_type", "ac_mode", "vpp", "extra")
"""Columns in which a row says what it leaves open."""
_UNCERTAIN = ("presumed", "unspecified", "unknown", "-class")
_REMAINDER_BYTES = 2.0
"""A bf16 weight and the other half of its fp32 master, as TransformerEngine's precision-aware optimizer keeps it."""
_EIGHT_BIT_MOMENTS = 2.0
_BF16_MOMENTS = 4.0
_FP32_MOMENTS = 8.0


class Reader:
    """Reads one row as a job.

    Args:
        row: text by column.

    Raises:
        ConfigError: if nothing is known about its framework.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        self.assumptions: list[str] = []
        self.extra = f"{self.text('extra')} {self.text('optimizer')}".lower()
        remarks = " ".join(self.text(name) for name in ("extra", "compile", "notes"))
        self.traits = framework(self.text("framework"), month=self._month(), remarks=remarks)
        self.levers = self._levers()

    def text(self, column: str) -> str:
        """Return a cell, or an empty string."""
        return (self._row.get(column) or "").strip()

    def count(self, column: str) -> int | None:
        """Return the whole number at the start of a cell, or None if the cell gives none.

        Raises:
            ConfigError: if it holds something else.
        """
        text = self.text(column).replace(",", "")
        if text.lower() in _UNSAID:
            return None
        number = re.match(r"(\d+)(\.0*)?(?=$|[\s(])", text)  # a remark may follow
        if number is None or int(number.group(1)) < 1:
            raise ConfigError(f"{column} is {text!r}; a whole number above 0 is wanted")
        return int(number.group(1))

    def number(self, column: str) -> float | None:
        """Return a cell's number, or None if it has none."""
        try:
            return float(self.text(column))
        except ValueError:
            return None

    def states_conditions(self) -> bool:
        """Return whether the row states what its figure depends on; to be asked once it has been read.

        A condition is not stated if it was assumed here, or if its cell says that it was presumed when the row was
        written, or names a class of devices.
        """
        cells = " ".join(self.text(column) for column in _CONDITIONS).lower()
        return not self.assumptions and not any(word in cells for word in _UNCERTAIN)

    def _assume(self, what: str) -> None:
        self.assumptions.append(what)

    def _month(self) -> str:
        """Return the row's month; a bare year counts as January, because figures are older than their publication."""
        dates = re.findall(r"20\d\d-\d\d", f"{self.text('date')} {self.text('location')}")
        year = re.match(r"20\d\d", self.text("date"))
        return dates[0] if dates else f"{year.group()}-01" if year else ""

    def _levers(self) -> set[str]:
        """Return the memory levers of a row that have no column of their own."""
        own = {lever for lever in _LEVERS if lever in self.extra}
        if "stacks on previous" not in self.text("notes"):
            return own
        if "lora" in self.text("method").lower():
            return set(_LEVERS) - {"optimizer in bwd", "8bit"}
        if "+ac" in self.extra:
            own.add("activation checkpointing")
        last = max((_LEVERS.index(lever) for lever in own), default=-1)
        return set(_LEVERS[: last + 1])

    def statistic(self) -> str:
        """Return the statistic that the row's source printed."""
        printed = self.text("mem_stat").lower()
        named = [statistic for statistic in ("allocated", "active", "reserved") if statistic in printed]
        if len(named) == 1:
            return named[0]
        self._assume(f"statistic left open: {self.traits.prints}, as {self.traits.name} logs")
        return self.traits.prints

    def jobs(self) -> Iterator[Job]:
        """Yield the jobs that a row may mean, the one with the most memory first.

        Raises:
            ConfigError: if the row does not say enough.
            PlanError: if its degrees of parallelism contradict each other.
        """
        job = self._job()
        open_recipe = self.text("ac_mode").lower().startswith("per recipe")
        if not open_recipe:
            yield job
            return
        self._assume("recipe left open: no recompute, unless it does not fit or weights are quantised, then full")
        if not job.quantised:
            yield replace(job, recompute="none")
        yield replace(job, recompute="full")
        yield replace(job, recompute="full", offloads_activations=True)

    def _job(self) -> Job:
        degrees = self._degrees()
        model = self._architecture()
        micro_batch, num_microbatches = self._batches(degrees)
        recompute, every = self._recompute()
        compiles = self.text("compile").lower() in {"yes", "true", "inductor"}
        finetunes = any(word in self.text("method").lower() for word in ("lora", "dora"))
        job = Job(
            architecture=model,
            framework=self._traits(compiles=compiles),
            seq_len=self._needed("seq_len"),
            micro_batch=micro_batch,
            num_microbatches=num_microbatches,
            **degrees,
            # no column: torchtitan's default, and what Megatron-LM's release test of Mixtral 8x7B asks for
            expert_tp=1 if degrees["ep"] > 1 else None,
            sequence_parallel=self.text("sp").lower().startswith("yes"),
            schedule=self._schedule(),
            num_chunks=self._chunks(model, degrees["pp"]),
            zero_stage=self._zero_stage(),
            weight_bytes=self._weight_bytes(),
            frozen=finetunes,
            quantised=finetunes and any(sign in self._finetuning() for sign in ("qlora", "qdora", "nf4")),
            moment_bytes=self._moment_bytes(degrees),
            recompute=recompute,
            recompute_every=every,
            offloads_activations="activation offload" in self.levers,
            steps_in_backward=self._steps_in_backward(degrees),
            reshards=self._reshards(degrees["pp"]),
            compiles=compiles,
            float8=self.text("float8").lower() not in _UNSAID | {"none", "no"},
            offloads_states="cpu offload" in self.extra and self.traits.sharding == "fully_shard",
        )
        return replace(job, adapter_parameters=self._adapter_parameters(job)) if finetunes else job

    def _finetuning(self) -> str:
        return f"{self.text('method')} {self.text('param_dtype')} {self.extra}".lower()

    def _needed(self, column: str) -> int:
        value = self.count(column)
        if value is None:
            raise ConfigError(f"{column} is not given")
        return value

    def _traits(self, *, compiles: bool) -> Framework:
        traits = self.traits
        stacked = "stacks on previous" in self.text("notes")
        if stacked and "chunked" not in self.levers:
            traits = replace(traits, loss=CROSS_ENTROPY)
        elif "chunked" in self.text("extra").lower() and traits.name.startswith("torchtitan"):
            traits = replace(traits, loss=replace(traits.loss, num_pieces=8))
        if traits.sharding == "optimizer":
            traits = self._conditions_of_optimizer(traits)
        return compiled(traits) if compiles else traits

    def _conditions_of_optimizer(self, traits: Framework) -> Framework:
        """Return the traits of a framework with masters of its weights, under the conditions that the row states."""
        said = f"{self.extra} {self.text('opt_state_dtype')}".lower().replace("_", "-")
        if "precision-aware" in said:
            traits = replace(traits, master_bytes=_REMAINDER_BYTES)
        if "bf16 main grads" in said or "grad-reduce-in-bf16" in said:
            traits = replace(traits, gradient_bytes=2)
        if "optimizer-cpu-offload" in said or "optimizer offload" in said:
            traits = replace(traits, master_bytes=0)
        return traits

    def _architecture(self) -> Architecture:
        billions = self.number("n_params_b")
        described = f"{self.text('extra')} {self.text('notes')}"
        model, assumed = published_architecture(self.text("model"), billions and billions * 1e9, described)
        if assumed:
            self._assume(assumed)
        return model

    def _recompute(self) -> tuple[Recompute, int]:
        """Return the mode of recomputation, and n if one layer in n is recomputed."""
        text = self.text("ac_mode").lower()
        every = re.search(r"layer\s*\(?(\d+)", text)
        if every:
            return "full", int(every.group(1))
        modes: tuple[Recompute, ...] = ("none", "full", "selective")
        for mode in modes:
            if text.startswith(mode):
                return mode, 1
        default: Recompute = "selective" if self.traits.name.startswith("torchtitan") else "none"
        if not text.startswith("per recipe"):
            self._assume(f"recompute not said: {default}")
        return default, 1

    def _degrees(self) -> dict[str, int]:
        """Return the degrees of parallelism; a missing dp_shard follows from the number of GPUs."""
        degrees = {name: self.count(name) or 1 for name in ("tp", "pp", "cp", "ep", "dp_replicate")}
        others = degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["dp_replicate"]
        shard = self.count("dp_shard")
        gpus = self.count("gpus")
        if shard is None:
            if gpus is None and self.traits.num_gpus is not None:
                gpus = self.traits.num_gpus
                self._assume(f"number of GPUs not said: {gpus}")
            if gpus is None:
                raise ConfigError("neither gpus nor dp_shard is given, and states are divided by them")
            if gpus % others:
                raise PlanError(f"{gpus} GPUs are no multiple of tp x pp x cp x dp_replicate = {others}")
            shard = gpus // others
        elif gpus is not None and shard * others != gpus:
            raise PlanError(f"gpus is {gpus}, but the degrees of parallelism make {shard * others}")
        if self.traits.sharding == "optimizer" and self._zero_stage() >= 1:  # replicas shard the optimizer too
            return degrees | {"dp_shard": shard * degrees["dp_replicate"], "dp_replicate": 1}
        return degrees | {"dp_shard": shard}

    def _zero_stage(self) -> int:
        """Return the ZeRO stage; ``fully_shard`` stores weights sharded even if it never frees the gathered ones."""
        stage = re.match(r"[0-3]", self.text("zero_stage"))
        if self.traits.sharding == "fully_shard":
            return 0 if stage and stage.group() == "0" else 3
        return int(stage.group()) if stage else 1

    def _reshards(self, pp: int) -> bool:
        """Return whether gathered weights are freed after a forward; in a pipeline, by default they are not."""
        said = self.text("reshard_after_fwd").lower()
        if said.startswith(("false", "no", "never")) or self.text("zero_stage").startswith("2"):
            return False
        return pp == 1 or said.startswith(("true", "yes", "always"))

    def _batches(self, degrees: Mapping[str, int]) -> tuple[int, int]:
        """Return the sequences per microbatch, and the microbatches per step."""
        local = self.count("local_batch")
        micro = self.count("micro_batch")
        steps = self.count("grad_accum")
        whole = self.count("global_batch")
        pp = degrees["pp"]
        if micro is None and local is None:
            raise ConfigError("neither micro_batch nor local_batch is given")
        if micro is None:
            micro = local or 1
            if pp > 1:
                micro = max(1, micro // pp)
                self._assume("microbatches not said: as many as stages")
        if steps is None and whole is not None:
            steps = max(1, whole // (degrees["dp_shard"] * degrees["dp_replicate"] * micro))
        if steps is None:
            steps = max(1, local // micro) if local else 2 if self.traits.accumulates else 1
        return micro, steps

    def _schedule(self) -> Schedule:
        text = self.text("pp_schedule").lower()
        if "gpipe" in text:
            return "gpipe"
        return "v" if any(name in text for name in ("zbv", "dualpipev")) else "1f1b"

    def _chunks(self, model: Architecture, pp: int) -> int:
        """Return the stages on one rank of a pipeline."""
        if pp == 1:
            return 1
        layers = re.search(r"layers/vstage=(\d+)", self.text("vpp"))
        if layers:
            return max(1, model.num_layers // pp // int(layers.group(1)))
        has_two = self._schedule() == "v" or "interleaved" in self.text("pp_schedule").lower()
        return self.count("vpp") or (2 if has_two else 1)

    def _weight_bytes(self) -> float:
        dtype = self.text("param_dtype").lower()
        if not dtype:
            return 4 if self.traits.gradient_bytes == 4 and self.traits.sharding == "fully_shard" else 2
        return 4 if dtype in {"fp32", "float32"} else 2

    def _moment_bytes(self, degrees: Mapping[str, int]) -> float:
        kept = f"{self.text('optimizer')} {self.text('opt_state_dtype')} {self.text('extra')}".lower()
        pages = "paged" in kept or (self._is_low_memory_recipe(degrees) and not self.text("optimizer"))
        if pages or "sgd" in kept or "optimizer-cpu-offload" in kept.replace("_", "-") or "optimizer offload" in kept:
            return 0
        if "8bit" in kept or "8-bit" in kept:
            return _EIGHT_BIT_MOMENTS
        if "fp32" in kept:
            return _FP32_MOMENTS
        return _BF16_MOMENTS if "bf16" in kept else self.traits.moment_bytes

    def _steps_in_backward(self, degrees: Mapping[str, int]) -> bool:
        said = "optimizer in bwd" in self.levers or "optimizer_in_bwd" in self.extra
        return said or (self._is_low_memory_recipe(degrees) and not self.text("optimizer"))

    def _is_low_memory_recipe(self, degrees: Mapping[str, int]) -> bool:
        alone = all(degree == 1 for degree in degrees.values())
        return self.traits.pages_on_one_gpu and alone and self.text("method").lower() == "full"

    def _adapter_parameters(self, job: Job) -> int:
        stated = re.search(r"trainable ([\d,]+)", self.extra)
        if stated:
            return int(stated.group(1).replace(",", ""))
        model = job.architecture
        adapters = self.traits.adapters
        widths = 2 * model.hidden_size + model.query_size + model.value_size
        widths += (model.hidden_size + model.output_size) * adapters.on_output
        widths += 3 * (model.hidden_size + model.ffn_size) * adapters.on_ffn
        return adapters.rank * widths * model.num_layers // job.tp
