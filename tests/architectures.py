"""Architectures over every field of ``ModelSpec``, and of the records in it: laws about blocks draw from one table.

A field is called by its path, such as ``qk_norm`` or ``moe.num_experts``. One that is neither in ``VALUES`` nor in
``SAME_BLOCK`` fails whatever draws, so that no law about blocks forgets a new one.
"""

from dataclasses import MISSING, fields, is_dataclass, replace
from typing import get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from llama_core.adapters.registry import ADAPTERS, DEFAULT_ADAPTER
from llama_core.config.models import ModelSpec, model_spec
from llama_core.config.strategy import ATTENTION_MATRICES, FEED_FORWARD_MATRICES, MATRICES, LoRA
from llama_core.errors import ConfigError

BLOCK = ModelSpec("block", "llama", 512, 1, 8, 4, 64, 1024, 512, 1e4, 1e-5, 4096, 256)
"""A plain block."""
SAME_BLOCK = {
    "name": "what people call a model",
    "family": "which chat template belongs to it",
    "num_layers": "how many blocks it has",
    "mtp_layers": "which further blocks follow, with programs of their own",
    "vocab_size": "rows of the tables outside of blocks",
    "tied_embeddings": "likewise",
    "scaled_embedding": "a factor outside of blocks",
    "rope_theta": "cosines and sines are made outside of blocks",
    "rope_scaling": "likewise",
    "query_temperature_floor": "likewise",
    "windowed_rope_theta": "likewise",
    "norm_eps": "a number that is added to a mean",
    "max_context": "which sequences are refused",
    "default_seq_len": "how long the sequences of a training are",
    "instruct": "on what it is trained",
    "moe.balance_bias_rate": "what happens to numbers between steps",
    "base": "how fast it is trained, and how it begins",
}
"""The fields that cannot change what a block holds, computes or sends, with what they are instead."""
VALUES = {
    "hidden_size": (512, 768, 2048),
    "num_heads": (8, 16, 32),
    "num_kv_heads": (4, 8, 1),
    "head_dim": (64, 96, 128),
    "ffn_size": (1024, 1536, 2816),
    "qkv_bias": (False, True),
    "o_bias": (False, True),
    "rope_pairs": ("halves", "adjacent"),
    "nope_layers": ((), (0,)),
    "query_temperature_scale": (0.0, 0.1),
    "qk_norm": (False, True),
    "qk_norm_width": ("head", "all"),
    "qk_norm_weights": (True, False),
    "norms": ("pre", "post", "both"),
    "sliding_window": (0, 100),
    "windowed_layers": ((), (0,)),
    "attention_chunk": (0, 60),
    "query_pre_attn_scalar": (0, 168),
    "score_factor": (1.0, 1.3),
    "kv_rank": (0, 128, 64),
    "query_rank": (0, 192),
    "rope_dim": (0, 32, 16),
    "value_dim": (0, 48, 32),
    "attention_soft_cap": (0.0, 20.0),
    "attention_sinks": (False, True),
    "activation": ("silu", "gelu_tanh", "clamped_swiglu"),
    "lora.method": tuple(ADAPTERS),
    "lora.lora_rank": (16, 64),
    "lora.lora_alpha": (None, 4.0),
    "lora.rslora": (False, True),
    "lora.initial_values": ("random", "pissa"),
    "lora.base": ("plain", "nf4"),
    "lora.lora_dropout": (0.0, 0.1),
    "lora.target_modules": (
        ATTENTION_MATRICES,
        *((matrix,) for matrix in MATRICES),
        ("q_proj", "v_proj", "up_proj"),
        ("k_proj", "o_proj", "gate_proj"),
        FEED_FORWARD_MATRICES,
        MATRICES,
    ),
    "moe.num_experts": (8, 4),
    "moe.expert_size": (0, 768),
    "moe.shared_size": (0, 1280),
    "moe.experts_per_token": (2, 1),
    "moe.moe_layers": (None, (0,)),
    "moe.gates": ("softmax_chosen", "softmax_all", "sigmoid", "sigmoid_chosen"),
    "moe.gate_scale": (1.0, 2.5),
    "moe.expert_groups": (1, 4),
    "moe.groups_per_token": (1, 2),
    "moe.balance_bias": (False, True),
    "moe.gate_inputs": (False, True),
    "moe.biases": (False, True),
    "moe.balance_loss_coefficient": (0.01, 0.0),
    "moe.z_loss_coefficient": (0.001, 0.0),
    "trainable": (
        (),
        ("*_norm*",),
        ("*_post_norm*",),
        ("*ffn_norm*", "*.wq.*"),
        ("*attention_norm*", "*.wv.*", "*.w1.*"),
        ("*.wo.*", "*.w2.*"),
        ("*.wk.*", "*.w3.*"),
    ),
}
"""Values of every other field; the first is that of a plain block."""
FROM_ONE_MODEL = ("hidden_size", "num_heads", "num_kv_heads", "ffn_size")
"""Sizes that random blocks take from one of ``SIZES_OF``, since their relations decide what peaks."""
SIZES_OF = ("tiny_llama3_150m", "llama3_2_1b", "llama3_8b", "llama2_7b", "llama3_70b")
OF_LATENTS = ("kv_rank", "query_rank", "rope_dim", "value_dim")
LATENTS = {"kv_rank": 128, "rope_dim": 32, "num_kv_heads": 8}
"""What attention through latents needs; no other number of key/value heads does, nor some other traits."""
NEEDS = {
    "qk_norm_width": {"qk_norm": True},
    "qk_norm_weights": {"qk_norm": True},
    "windowed_layers": {"sliding_window": 100},
    "query_temperature_scale": {"nope_layers": (0,)},
    "moe.groups_per_token": {"moe.expert_groups": 4},
    **dict.fromkeys(OF_LATENTS, LATENTS),
    "trainable": {"lora": LoRA(), "qkv_bias": True, "o_bias": True, "qk_norm": True, "norms": "both"},
}
"""What a field has no effect without, or is refused without."""


ONLY_SOME = ("attention_soft_cap", *OF_LATENTS)
"""Traits with which some plans or other traits are refused, so that relatives under every plan lack them."""


def records_of(hint):
    """Return the classes of the records that a field may hold."""
    classes = [kind for kind in get_args(hint) or (hint,) if isinstance(kind, type)]
    return [kind for kind in classes if is_dataclass(kind) or issubclass(kind, BaseModel)]


def keys_of(record):
    if issubclass(record, BaseModel):
        return list(record.model_fields)
    return [field.name for field in fields(record) if field.init]


def paths(spec=ModelSpec):
    """Return the path of every field of a model, and of the records in it but for those that cannot change a block."""
    found = []
    for name, hint in get_type_hints(spec).items():
        records = [] if name in SAME_BLOCK else records_of(hint)
        found += [f"{name}.{key}" for record in records for key in keys_of(record)] or [name]
    return found


def check_table(spec=ModelSpec):
    """Fail for every field that laws about blocks would forget, and for every entry that is no field."""
    known = VALUES.keys() | SAME_BLOCK.keys()
    for path in paths(spec):
        assert path in known, (
            f"{path} of {spec.__name__} is neither in VALUES nor in SAME_BLOCK of tests/architectures.py: say which "
            "values a block may have of it, or why it cannot change a block"
        )
    assert known <= set(paths(spec)), f"{sorted(known - set(paths(spec)))} are no fields of {spec.__name__}"
    assert all(len(set(values)) > 1 for values in VALUES.values()), "a field needs another value than a plain block's"


def with_values(spec, values):
    """Return a model with other values of some fields, by path; records that it lacks begin with their defaults.

    Raises:
        ConfigError, ValidationError: if they contradict each other.
    """
    hints = get_type_hints(type(spec))
    changes = {path: value for path, value in values.items() if "." not in path}
    for name in sorted({path.partition(".")[0] for path in values if "." in path}):
        given = {path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{name}.")}
        changes[name] = records_of(hints[name])[0](**given)
    return replace(spec, **changes)


def each_alone():
    """Return every other value of every field, as pairs of its path and the value."""
    return [(path, value) for path, values in VALUES.items() for value in values[1:]]


def alone(path, value, spec=BLOCK):
    """Return a plain block but for one field, and for what that has no effect without."""
    return with_values(spec, NEEDS.get(path, {}) | {path: value})


def traits(spec=ModelSpec):
    """Return the fields with a default whose other values tell a model from a Llama of its sizes, but for records."""
    with_default = {field.name for field in fields(spec) if field.default is not MISSING}
    return [path for path in paths(spec) if path in with_default and path in VALUES and path != "trainable"]


def with_every_trait(spec, turn=0, **values):
    """Return a model with another value than a Llama's of every trait: of several, the one of a turn.

    Args:
        spec: its sizes.
        turn: counts up to ``NUM_TURNS``, so that each value has one.
        values: of traits whose value depends on the sizes.
    """
    others = {trait: VALUES[trait][1:] for trait in traits() if trait not in ONLY_SOME}
    for trait in NEEDS.keys() & others.keys():
        others[trait] += VALUES[trait][:1]  # which says how another trait is, and is one of several values
    chosen = {trait: those[turn % len(those)] for trait, those in others.items()}
    chosen["qk_norm_weights"] = chosen["qk_norm_width"] == "all"  # norms without weights are of each head
    return replace(spec, **chosen | values)


NUM_TURNS = max(len(VALUES[trait]) - 1 for trait in traits())


def drawn_block(draw, *, moe=False, method=None, base=None, latents=False):
    """Return a random model of one block, whose fields fit each other.

    Args:
        draw: the generator.
        moe: whether it has experts.
        method: the kind of its adapters; default: LoRA, or none.
        base: what LoRA's matrices are held in; default: any.
        latents: whether its keys and values are made from latents.
    """
    check_table()
    sizes = model_spec(draw.choice(SIZES_OF))
    plain = replace(BLOCK, **{path: getattr(sizes, path) for path in FROM_ONE_MODEL})
    kind = method or DEFAULT_ADAPTER
    has_adapters = bool(method or base) or draw.random() < 0.5
    without = {*FROM_ONE_MODEL, "score_factor", *OF_LATENTS}
    if latents:
        plain = replace(plain, num_kv_heads=plain.num_heads)
        without |= {"qkv_bias", "qk_norm", "qk_norm_width", "qk_norm_weights"}
    for path in VALUES:
        record, _, key = path.rpartition(".")
        is_of_another_kind = key not in {"method", "target_modules", *ADAPTERS[kind].keys}
        if (record == "moe" and not moe) or (record == "lora" and (not has_adapters or is_of_another_kind)):
            without.add(path)
    while True:
        values = {path: draw.choice(VALUES[path]) for path in VALUES if path not in without}
        if latents:
            sizes = ("kv_rank", "rope_dim", "score_factor", "query_rank", "value_dim")
            values |= {path: draw.choice(VALUES[path][path in LATENTS :]) for path in sizes}
        if has_adapters:
            values |= {"lora.method": kind} | ({"lora.base": base} if base else {})
        try:
            spec = with_values(plain, values)
        except (ConfigError, ValidationError):
            continue
        if spec.lora is None or not list(spec.lora.misfits(spec.target_shapes, tied=False)):
            return spec
