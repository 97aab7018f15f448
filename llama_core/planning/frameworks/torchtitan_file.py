"""Read the configuration file of a torchtitan run (TOML) as a job.

The keys are those of ``torchtitan/config/job_config.py`` in 2025, with the spellings of the versions before and after
it. A key of the file that is not read has no effect on memory or time, or none that is modelled.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from llama_core.config.hardware import MAX_DEVICES
from llama_core.errors import ConfigError
from llama_core.planning.frameworks.architectures import Architecture, published_architecture
from llama_core.planning.frameworks.given import Given, ReadJob, read_text, remaining_shards
from llama_core.planning.frameworks.job import Job, Recompute, Schedule
from llama_core.planning.frameworks.registry import compiled, framework
from llama_core.planning.frameworks.traits import Framework
from llama_core.records.files import by_dotted_key

_SCHEDULES: Mapping[str, tuple[Schedule, int]] = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved1f1b": ("1f1b", 2),
    "zbvzerobubble": ("v", 2),
    "dualpipev": ("v", 2),
}
"""torchtitan's names of schedules, each with its kind and its stages per rank."""
_BF16 = ("bfloat16", "float32")


def read_torchtitan(file: Path, gpus: int | None = None) -> ReadJob:
    """Return the job that a torchtitan configuration describes.

    Args:
        file: the file.
        gpus: all devices; needed if the file leaves the degree of sharding open.

    Raises:
        ConfigError: if the file cannot be read, lacks a key, or asks for what is not modelled.
    """
    text = read_text(file)
    try:
        given = Given(file, by_dotted_key(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file} is nested too deeply for a configuration") from None
    if not given.values:
        raise ConfigError(f"{file} is empty")
    return _Torchtitan(given, gpus).read()


class _Torchtitan:
    """Reads the values of one file."""

    def __init__(self, given: Given, gpus: int | None) -> None:
        self.given = given
        self.gpus = gpus

    def read(self) -> ReadJob:
        """Return the job."""
        given = self.given
        model = self._model()
        degrees = self._degrees()
        schedule, num_chunks = self._schedule(model, degrees["pp"])
        micro_batch, num_microbatches = self._batches(degrees)
        recompute, every = self._recompute()
        compiles = self._compiles()
        keeps_bf16 = given.choice("training.dtype", default="float32", choices=_BF16) == "bfloat16"
        given.choice("training.mixed_precision_param", default="bfloat16", choices=("bfloat16",))
        only_copies = degrees["dp_replicate"] > 1 and degrees["dp_shard"] * degrees["cp"] == 1
        job = Job(
            architecture=model,
            framework=self._traits(compiles=compiles, keeps_bf16=keeps_bf16),
            seq_len=given.count("training.seq_len", default=2048),
            micro_batch=micro_batch,
            num_microbatches=num_microbatches,
            tp=degrees["tp"],
            pp=degrees["pp"],
            cp=degrees["cp"],
            ep=degrees["ep"],
            expert_tp=self._expert_tp(degrees),
            dp_shard=degrees["dp_shard"],
            dp_replicate=degrees["dp_replicate"],
            sequence_parallel=degrees["tp"] > 1,
            schedule=schedule,
            num_chunks=num_chunks,
            zero_stage=0 if only_copies else 3,  # copies alone are DistributedDataParallel
            weight_bytes=2 if keeps_bf16 else 4,
            moment_bytes=4 if keeps_bf16 else 8,
            recompute=recompute,
            recompute_every=every,
            steps_in_backward=given.flag("optimizer.early_step_in_backward"),
            reshards=self._reshards(degrees["pp"]),
            offloads_states=given.flag("training.enable_cpu_offload"),
            compiles=compiles,
            float8=self._is_float8(),
        )
        if given.flag("parallelism.enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel"):
            given.assumed.append(
                "tensor parallelism is timed without its asynchronous kernels, of which no row was published"
            )
        return given.job(job)

    def _model(self) -> Architecture:
        name = self.given.text("model.name", default="llama3")
        flavor = self.given.value("model.flavor")
        if flavor is None:
            raise self.given.error("model.flavor is missing, such as 8B")
        try:
            return published_architecture(f"{name}_{flavor}", None, "")[0]
        except ConfigError:
            raise self.given.error(f"the sizes of model {name!r} with flavor {flavor!r} are not known here") from None

    def _expert_tp(self, degrees: dict[str, int]) -> int:
        """Return the ranks that divide every expert; the key has no effect if none divide the experts.

        Raises:
            ConfigError: if it is neither 1 nor the tensor-parallel degree.
        """
        key = "parallelism.expert_tensor_parallel_degree"
        expert_tp = self.given.count(key, default=1, maximum=MAX_DEVICES)
        tp = degrees["tp"]
        if expert_tp not in {1, tp}:
            raise self.given.error(f"{key} is {expert_tp}; torchtitan takes 1 or the tensor-parallel degree, {tp}")
        return expert_tp if degrees["ep"] > 1 else tp

    def _degrees(self) -> dict[str, int]:
        given = self.given
        spelled = {
            "tp": ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
            "pp": ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
            "cp": ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
            "ep": ("parallelism.expert_parallel_degree",),
            "dp_replicate": (
                "parallelism.data_parallel_replicate_degree",
                "training.data_parallel_replicate_degree",
            ),
        }
        degrees = {axis: given.count(*keys, default=1, maximum=MAX_DEVICES) for axis, keys in spelled.items()}
        others = degrees["tp"] * degrees["pp"] * degrees["cp"] * degrees["dp_replicate"]
        keys = (
            "parallelism.data_parallel_shard_degree",
            "training.data_parallel_shard_degree",
            "training.data_parallel_degree",
        )
        shard = given.value(*keys)
        if shard is None or shard == -1:
            return degrees | {"dp_shard": remaining_shards(given, self.gpus, others, keys[0])}
        degrees["dp_shard"] = given.count(*keys, maximum=MAX_DEVICES)
        if self.gpus is not None and degrees["dp_shard"] * others != self.gpus:
            raise given.error(f"its degrees make {degrees['dp_shard'] * others} ranks, and --gpus is {self.gpus}")
        return degrees

    def _batches(self, degrees: Mapping[str, int]) -> tuple[int, int]:
        """Return the sequences per microbatch, and the microbatches per step."""
        given = self.given
        local = given.count("training.local_batch_size", "training.batch_size", default=8)
        replicas = degrees["dp_shard"] * degrees["dp_replicate"]
        whole = given.value("training.global_batch_size")
        repeats = 1
        if whole is not None and whole != -1:
            whole = given.count("training.global_batch_size")
            if whole % (local * replicas):
                raise given.error(
                    f"training.global_batch_size={whole} is no multiple of {local} sequences on each of {replicas} "
                    "data-parallel ranks"
                )
            repeats = whole // (local * replicas)
        if degrees["pp"] == 1:
            return local, repeats
        key = "parallelism.pipeline_parallel_microbatch_size"
        old_key = "experimental.pipeline_parallel_microbatches"
        if given.value(key) is None and given.value(old_key) is not None:
            micro = max(1, local // given.count(old_key))
        else:
            micro = given.count(key, default=1)
        if local % micro:
            raise given.error(f"{key}={micro} does not divide the local batch of {local}")
        return micro, repeats * (local // micro)

    def _schedule(self, model: Architecture, pp: int) -> tuple[Schedule, int]:
        given = self.given
        keys = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
        schedule, num_chunks = _SCHEDULES[given.choice(*keys, default="1F1B", choices=tuple(_SCHEDULES))]
        layers = given.value("parallelism.pipeline_parallel_layers_per_stage")
        if pp == 1:
            return "1f1b", 1
        if layers is not None and schedule == "1f1b":
            per_stage = given.count("parallelism.pipeline_parallel_layers_per_stage")
            num_chunks = max(1, round(model.num_layers / pp / per_stage))
        return schedule, num_chunks

    def _recompute(self) -> tuple[Recompute, int]:
        """Return the mode of recomputation, and n if one layer in n is recomputed."""
        given = self.given
        modes = ("none", "selective", "full")
        mode = given.choice("activation_checkpoint.mode", default="selective", choices=modes)
        option = given.text("activation_checkpoint.selective_ac_option", default="op")
        if mode == "none":
            return "none", 1
        if mode == "full":
            return "full", 1
        if option == "op":
            return "selective", 1
        return "full", given.count("activation_checkpoint.selective_ac_option")

    def _compiles(self) -> bool:
        given = self.given
        if given.flag("training.compile"):
            return True
        components = given.value("compile.components")
        return given.flag("compile.enable") and (components is None or "model" in components)

    def _is_float8(self) -> bool:
        given = self.given
        named = given.value("model.converters")
        converters = named if isinstance(named, list) else str(named or "").split(",")
        if given.flag("float8.enable_float8_linear", "training.enable_float8_linear"):
            return True
        return any("float8" in str(converter) or "mx" in str(converter) for converter in converters)

    def _reshards(self, pp: int) -> bool:
        policy = self.given.choice(
            "parallelism.fsdp_reshard_after_forward", default="default", choices=("default", "always", "never")
        )
        return pp == 1 if policy == "default" else policy == "always"

    def _traits(self, *, compiles: bool, keeps_bf16: bool) -> Framework:
        given = self.given
        given.choice("optimizer.name", default="AdamW", choices=("adam", "adamw"))
        traits = framework("torchtitan", month="", remarks="")
        given.assumed.append(f"torchtitan as of {traits.since}: the file does not say its version")
        implementations = ("fused", "foreach", "for-loop")
        implementation = given.choice("optimizer.implementation", default="fused", choices=implementations)
        is_unfused = not given.flag("optimizer.fused", default=True) or implementation == "foreach"
        if is_unfused:
            traits = replace(traits, foreach_bytes=4)
        reduces_bf16 = given.choice("training.mixed_precision_reduce", default="float32", choices=_BF16) == "bfloat16"
        if reduces_bf16:
            traits = replace(traits, reduce_bytes=2)
        if keeps_bf16:
            traits = replace(traits, gradient_bytes=2)
        return compiled(traits) if compiles else traits
