"""Read the arguments of a Megatron-LM run as a job: a script that starts it, a list of arguments, or YAML.

The names and defaults are those of ``megatron/training/arguments.py``. An argument that is not read has no effect on
memory or time, or none that is modelled.
"""

from dataclasses import replace
from pathlib import Path, PurePosixPath

from llama_core.config.hardware import MAX_DEVICES
from llama_core.config.settings import MAX_LAYERS
from llama_core.errors import ConfigError
from llama_core.planning.frameworks.architectures import (
    Architecture,
    RoutedExperts,
    published_architecture,
)
from llama_core.planning.frameworks.arguments import arguments_of
from llama_core.planning.frameworks.given import Given, ReadJob, read_text, remaining_shards
from llama_core.planning.frameworks.job import Job, Recompute
from llama_core.planning.frameworks.megatron import MEGATRON
from llama_core.planning.frameworks.traits import Efficiencies, Framework

_VOCABULARIES = {"Llama2Tokenizer": 32_000, "GPT2BPETokenizer": 50_257}
"""Sizes that a kind of tokenizer implies."""
_UNMODELLED = (
    *("multi-latent-attention", "mtp-num-layers", "hybrid-override-pattern", "hybrid-layer-pattern", "is-hybrid-model"),
    *("vision-model-type", "language-model-type", "encoder-num-layers", "bert-no-binary-head"),
)
"""Arguments of models that are not modelled."""
_VOCABULARY_MULTIPLE = 128
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_REMAINDER_BYTES = 2
"""A bf16 weight and this rest of it make its fp32 master (``store_param_remainders`` of TransformerEngine's Adam)."""


def read_megatron(file: Path, gpus: int | None = None) -> ReadJob:
    """Return the job that Megatron-LM's arguments describe.

    Args:
        file: the file.
        gpus: all devices; by default those of ``--nproc-per-node`` and ``--nnodes`` of torchrun in the same script.

    Raises:
        ConfigError: if the file cannot be read, lacks an argument, or asks for what is not modelled.
    """
    values, repeated = arguments_of(file, read_text(file))
    asked = _Megatron(Given(file, values), gpus).read()
    # what is given twice and ignored is of no interest
    counting = tuple(sentence for name, sentence in repeated.items() if name in asked.read)
    return replace(asked, assumed=(*asked.assumed, *counting))


class _Megatron:
    """Reads the arguments of one file."""

    def __init__(self, given: Given, gpus: int | None) -> None:
        self.given = given
        self.gpus = gpus

    def read(self) -> ReadJob:
        """Return the job."""
        given = self.given
        model = self._model()
        degrees = self._degrees()
        recompute, every = self._recompute(model, degrees["pp"])
        micro_batch = given.count("micro-batch-size")
        job = Job(
            architecture=model,
            framework=self._traits(),
            seq_len=given.count("seq-length"),
            micro_batch=micro_batch,
            num_microbatches=self._microbatches(micro_batch, degrees["dp_shard"]),
            tp=degrees["tp"],
            pp=degrees["pp"],
            cp=degrees["cp"],
            ep=degrees["ep"],
            expert_tp=self._expert_tp(degrees),
            dp_shard=degrees["dp_shard"],
            sequence_parallel=self._is_on("sequence-parallel") and degrees["tp"] > 1,
            num_chunks=self._chunks(model, degrees["pp"]),
            zero_stage=self._zero_stage(),
            weight_bytes=1 if self._is_on("fp8-param-gather") else 2,
            moment_bytes=self._moment_bytes(),
            recompute=recompute,
            recompute_every=every,
            float8=self._is_float8(),
        )
        return given.job(job)

    def _is_on(self, name: str) -> bool:
        """Return whether an argument without a value is there; in YAML it is true or false."""
        value = self.given.value(name)
        return value is not None and str(value).lower() != "false"

    def _model(self) -> Architecture:
        given = self.given
        for name in _UNMODELLED:
            if name in given.values and self._is_on(name):
                raise given.error(f"a model with --{name} is not modelled")
        hidden = given.count("hidden-size")
        heads = given.count("num-attention-heads")
        gated = self._is_on("swiglu")
        # Megatron's default keeps the parameters of a plain feed-forward of four times the width
        default_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        groups = given.count("num-query-groups", default=1)
        if not self._is_on("group-query-attention"):
            groups = heads
        ffn = given.count("ffn-hidden-size", default=default_ffn)
        return Architecture(
            hidden_size=hidden,
            num_layers=given.count("num-layers", maximum=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=groups,
            head_dim=given.count("kv-channels", default=hidden // heads),
            ffn_size=ffn,
            vocab_size=self._vocabulary(),
            tied=not self._is_on("untie-embeddings-and-output-weights"),
            gated=gated,
            norms_queries=self._is_on("qk-layernorm"),
            experts=self._experts(ffn),
        )

    def _experts(self, ffn: int) -> RoutedExperts | None:
        given = self.given
        if given.value("num-experts") is None:
            return None
        every = given.text("moe-layer-freq", default="1")
        if every != "1":
            raise given.error(f"--moe-layer-freq is {every!r}; only models with experts in every layer are modelled")
        return RoutedExperts(
            count=given.count("num-experts"),
            top_k=given.count("moe-router-topk", default=2),
            ffn_size=given.count("moe-ffn-hidden-size", default=ffn),
            shared_ffn_size=self._number("moe-shared-expert-intermediate-size"),
        )

    def _number(self, name: str) -> int:
        """Return a whole number, or 0 if it is not given."""
        return self.given.count(name) if self.given.value(name) is not None else 0

    def _vocabulary(self) -> int:
        given = self.given
        if given.value("padded-vocab-size") is not None:
            return given.count("padded-vocab-size")
        multiple = given.count("make-vocab-size-divisible-by", default=_VOCABULARY_MULTIPLE)
        multiple *= given.count("tensor-model-parallel-size", default=1)
        known = _VOCABULARIES.get(given.text("tokenizer-type", default="")) or self._vocabulary_of_tokenizer()
        if known is None and given.value("vocab-size") is None:
            raise given.error("--vocab-size is missing, and the tokenizer is not opened; add it to the file")
        size = given.count("vocab-size", default=known)
        return -(-size // multiple) * multiple

    def _vocabulary_of_tokenizer(self) -> int | None:
        """Return the vocabulary of the model that a tokenizer is named after, or None if that is unknown."""
        if self.given.value("vocab-size") is not None:
            return None
        name = PurePosixPath(self.given.text("tokenizer-model", default="")).name
        try:
            size = published_architecture(name, None, "")[0].vocab_size
        except ConfigError:
            return None
        self.given.assumed.append(f"--vocab-size not given: {size}, that of {name}")
        return size

    def _degrees(self) -> dict[str, int]:
        given = self.given
        spelled = {
            "tp": "tensor-model-parallel-size",
            "pp": "pipeline-model-parallel-size",
            "cp": "context-parallel-size",
            "ep": "expert-model-parallel-size",
        }
        degrees = {axis: given.count(name, default=1, maximum=MAX_DEVICES) for axis, name in spelled.items()}
        others = degrees["tp"] * degrees["pp"] * degrees["cp"]
        shards = remaining_shards(given, self.gpus or self._launched(), others, "data parallelism")
        return degrees | {"dp_shard": shards}

    def _expert_tp(self, degrees: dict[str, int]) -> int:
        """Return the ranks that divide every expert.

        Raises:
            ConfigError: if they and those that divide the experts cannot divide a pipeline stage's ranks.
        """
        given = self.given
        name = "expert-tensor-parallel-size"
        expert_tp = given.count(name, default=degrees["tp"], maximum=MAX_DEVICES)
        ranks = degrees["tp"] * degrees["cp"] * degrees["dp_shard"]
        if ranks % (expert_tp * degrees["ep"]):
            raise given.error(
                f"{ranks} ranks of a pipeline stage are no multiple of --expert-model-parallel-size {degrees['ep']} "
                f"times --{name} {expert_tp}"
            )
        return expert_tp

    def _launched(self) -> int | None:
        """Return the processes that torchrun starts, or None if the file does not say how many."""
        on_a_node = self._whole("nproc-per-node")
        nodes = self._whole("nnodes")
        if on_a_node is None:
            return None
        if nodes is None:
            nodes = 1
            if self.given.value("nnodes") is not None:
                return None
        return on_a_node * nodes

    def _whole(self, name: str) -> int | None:
        """Return a whole number; None if it is not given, or is a variable that the file does not set."""
        value = str(self.given.value(name))
        return int(value) if value.isdigit() else None

    def _microbatches(self, micro_batch: int, replicas: int) -> int:
        given = self.given
        batch = given.count("global-batch-size", default=micro_batch * replicas)
        if batch % (micro_batch * replicas):
            raise given.error(
                f"--global-batch-size {batch} is no multiple of {micro_batch} sequences on each of {replicas} "
                "data-parallel ranks"
            )
        return batch // (micro_batch * replicas)

    def _chunks(self, model: Architecture, pp: int) -> int:
        """Return the stages on one rank of a pipeline."""
        given = self.given
        name = "num-layers-per-virtual-pipeline-stage"
        stages = given.count("num-virtual-stages-per-pipeline-rank", default=1)
        if given.value(name) is not None:
            stages = max(1, model.num_layers // pp // given.count(name))
        return stages if pp > 1 else 1

    def _zero_stage(self) -> int:
        fsdp = [self._is_on(name) for name in ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2")]
        if any(fsdp):
            return 3
        return 1 if self._is_on("use-distributed-optimizer") else 0

    def _recompute(self, model: Architecture, pp: int) -> tuple[Recompute, int]:
        """Return the mode of recomputation, and n if one layer in n is recomputed."""
        given = self.given
        granularity = given.choice("recompute-granularity", default="none", choices=("none", "selective", "full"))
        if self._is_on("recompute-activations") and granularity == "none":
            granularity = "selective"
        method = given.choice("recompute-method", default="uniform", choices=("uniform", "block"))
        layers = self._number("recompute-num-layers")
        if granularity == "none":
            return "none", 1
        if granularity == "selective":
            modules = given.value("recompute-modules")
            if modules is not None and modules != "core_attn":
                given.assumed.append("selective recompute counts as that of attention alone, whatever its modules")
            return "selective", 1
        on_a_rank = max(1, model.num_layers // pp)
        if method == "block" and 0 < layers < on_a_rank:
            return "full", max(1, round(on_a_rank / layers))
        if layers > 1:
            given.assumed.append("full recompute counts as layer by layer")
        return "full", 1

    def _moment_bytes(self) -> float:
        share = 1 - self._offloaded_share()
        if not self._is_on("use-precision-aware-optimizer"):
            return 8 * share
        first = self._dtype_bytes("exp-avg-dtype")
        second = self._dtype_bytes("exp-avg-sq-dtype")
        return (first + second) * share

    def _dtype_bytes(self, name: str) -> int:
        return _DTYPE_BYTES[self.given.choice(name, default="fp32", choices=tuple(_DTYPE_BYTES))]

    def _offloaded_share(self) -> float:
        """Return the share of the optimizer's states in host memory."""
        given = self.given
        text = given.text("optimizer-offload-fraction", default="1.0")
        if not self._is_on("optimizer-cpu-offload"):
            return 0.0
        try:
            return min(1.0, max(0.0, float(text)))
        except ValueError:
            raise given.error(f"--optimizer-offload-fraction is {text!r}; a number from 0 to 1 is wanted") from None

    def _is_float8(self) -> bool:
        return self.given.value("fp8-format") is not None or self.given.value("fp8") is not None

    def _traits(self) -> Framework:
        given = self.given
        given.choice("optimizer", default="adam", choices=("adam",))
        if not self._is_on("bf16"):
            raise given.error("--bf16 is missing; only runs in bf16, or in fp8 beside it, are modelled")
        master_bytes = 4.0
        gradient_bytes = 4
        if self._is_on("use-precision-aware-optimizer"):
            keeps_fp32 = given.choice("main-params-dtype", default="fp32", choices=("fp32", "fp16")) == "fp32"
            master_bytes = _REMAINDER_BYTES
            if not keeps_fp32:
                given.assumed.append("masters of weights in fp16 count as two bytes")
            gradient_bytes = self._dtype_bytes("main-grads-dtype")
        if self._is_on("grad-reduce-in-bf16"):
            gradient_bytes = 2
        if self._offloaded_share():
            given.assumed.append("the time leaves out the optimizer's states in host memory")
        return replace(
            MEGATRON,
            master_bytes=master_bytes * (1 - self._offloaded_share()),
            gradient_bytes=gradient_bytes,
            efficiencies=self._efficiencies(),
        )

    def _efficiencies(self) -> Efficiencies:
        """Return the framework's efficiencies; without ``--tp-comm-overlap`` nothing hides tensor parallelism."""
        fitted = MEGATRON.efficiencies
        if self._is_on("tp-comm-overlap"):
            return fitted
        if self.given.count("tensor-model-parallel-size", default=1) > 1:
            self.given.assumed.append(
                "without --tp-comm-overlap nothing hides tensor parallelism, of which no row was published"
            )
        return replace(fitted, tensor_parallel=1.0)
