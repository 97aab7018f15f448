"""Hugging Face's Llama and its relatives: their names and shapes for our weights. No torch.

Both sides store the same numbers, in the same rotary layout, so conversion only renames weights. Files of most mixtures
hold the matrices of each expert apart, which are one tensor here. What some types' files lay out otherwise, such as the
two inner matrices of experts as one, says the ``Layout`` of their row.
"""

from collections.abc import Callable, Mapping

from llama_core.config.model_types import Layout
from llama_core.config.model_weights import hugging_face_name, layout_of
from llama_core.config.models import ModelSpec
from llama_core.errors import WeightsError

HEAD = "lm_head.weight"


def hugging_face_names(name: str, spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the tensors that Hugging Face stores our parameter in: one, or one for each expert."""
    template = hugging_face_name(name, spec.model_type)
    num_experts = spec.num_experts if is_per_expert(name, spec) else 1
    return tuple(template.format(expert) for expert in range(num_experts))


def is_per_expert(name: str, spec: ModelSpec) -> bool:
    """Return whether Hugging Face stores the part of each expert of our parameter in a tensor of its own."""
    return "{}" in hugging_face_name(name, spec.model_type)


def other_layouts(spec: ModelSpec) -> dict[str, Layout]:
    """Return how Hugging Face lays out those of our parameters that it does not lay out as we do, by our names."""
    layouts = {name: layout_of(name, spec.model_type) for name in spec.weight_shapes}
    return {name: layout for name, layout in layouts.items() if layout != Layout()}


def dense_name(name: str) -> str:
    """Return the name of the matrix that takes the place of a tensor of experts in a dense model."""
    return name.replace(".experts.", ".")


def hugging_face_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that Hugging Face stores for a model, by its names."""
    shapes = {}
    for ours, shape in spec.weight_shapes.items():
        stored = layout_of(ours, spec.model_type).stored_shape(shape)
        for name in hugging_face_names(ours, spec):
            shapes[name] = stored[1:] if is_per_expert(ours, spec) else stored
    return shapes


def check_weights(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Refuse weights of another model.

    A tied head and the rotary frequencies of old files are allowed: the model already has both.

    Args:
        spec: the model.
        shapes: shapes of the given weights, by Hugging Face's names.
        source: where the weights are, for the error.

    Raises:
        WeightsError: if a weight is missing, unknown or differs in shape from ``spec``.
    """
    expected = hugging_face_shapes(spec)
    derived = {HEAD} if spec.tied_embeddings else set()
    check_shapes(
        expected,
        {
            name: shape
            for name, shape in shapes.items()
            if name in expected or not (name in derived or name.endswith("rotary_emb.inv_freq"))
        },
        wrong=f"the weights in {source} are not those of {spec.name}",
        remedy="choose the model they were made for",
        hint=lambda name, shape: _kv_heads_hint(spec, name, shape),
    )


def check_shapes(
    expected: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    wrong: str,
    remedy: str,
    hint: Callable[[str, tuple[int, ...]], str] = lambda name, shape: "",
) -> None:
    """Refuse weights unless they are exactly the expected ones.

    Args:
        expected: shapes by name.
        shapes: shapes of the given weights, by name.
        wrong: the beginning of the error.
        remedy: the end of the error.
        hint: returns a note on a weight of the wrong shape, for the error.

    Raises:
        WeightsError: naming up to three weights that are missing, unknown or of the wrong shape.
    """
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is unknown" for name in shapes if name not in expected]
    for name, shape in expected.items():
        given = shapes.get(name, shape)
        if given != shape:
            problems.append(f"{name} is {list(given)} instead of {list(shape)}{hint(name, given)}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise WeightsError(f"{wrong}: {', '.join(problems[:3])}{more}; {remedy}")


def _kv_heads_hint(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> str:
    if not name.endswith(("k_proj.weight", "v_proj.weight")):
        return ""
    return f" ({shape[0] / spec.head_dim:g} key/value heads instead of {spec.num_kv_heads})"
