"""How the layers of a model are cut into the stages of a pipeline."""

from functools import lru_cache
from itertools import accumulate

from llama_core.config.models import ModelSpec
from llama_core.config.parameter_counts import active_parameters


@lru_cache(maxsize=1024)
def cut_layers(spec: ModelSpec, num_stages: int) -> tuple[range, ...]:
    """Return the layers of every stage: consecutive, and as even in the parameters that a token uses as possible.

    The first stage also holds the embedding and the last one the head, so they get fewer layers: LLaMA 3 405B over
    8 stages is cut into 15, six times 16, and 15. With experts in some layers, moving one layer to a neighbouring
    stage does not make the heavier of the two lighter. The prediction modules, each with a pass of the head, belong to
    the last stage.
    """
    tables = [0] * num_stages
    tables[0] += spec.embedding_parameters
    tables[-1] += spec.embedding_parameters
    for block in range(spec.num_layers, spec.num_blocks):
        tables[-1] += active_parameters(spec, block) + spec.embedding_parameters
    starts = _starts_for_equal_layers(spec.num_layers, active_parameters(spec, 0), tables)
    if spec.num_sparse_layers not in {0, spec.num_layers}:
        sizes = [active_parameters(spec, layer) for layer in range(spec.num_layers)]
        _even_out(starts, sizes, tables)
    starts[-1] = spec.num_blocks
    return tuple(map(range, starts, starts[1:]))


def _starts_for_equal_layers(num_layers: int, size: int, tables: list[int]) -> list[int]:
    """Return the first layer of each stage and the number of layers, if all layers have as many parameters.

    Args:
        num_layers: layers of the model.
        size: parameters of a layer.
        tables: parameters of each stage outside the layers.
    """
    used = list(tables)
    counts = [0] * len(tables)
    for _ in range(num_layers):
        # first one layer each, then to the lightest stage; of two the later, as earlier ones hold
        # more microbatches
        stage = min(range(len(tables)), key=lambda s: (counts[s] > 0, used[s], -s))
        counts[stage] += 1
        used[stage] += size
    return [0, *accumulate(counts)]


def _even_out(starts: list[int], sizes: list[int], tables: list[int]) -> None:
    """Move layers from one stage to its neighbour, while that lowers the heavier of both.

    Args:
        starts: the first layer of each stage and the number of layers; changed in place.
        sizes: parameters of each layer.
        tables: parameters of each stage outside the layers.
    """
    before = [0, *accumulate(sizes)]

    def load(stage: int, start: int, end: int) -> int:
        return tables[stage] + before[end] - before[start]

    moved = True
    while moved:
        moved = False
        for right in range(1, len(tables)):
            left = right - 1
            start, cut, end = starts[left : right + 2]
            heavier: dict[int, int] = {}
            for at in (cut, cut - 1, cut + 1):
                if start < at < end:
                    heavier[at] = max(load(left, start, at), load(right, at, end))
            starts[right] = min(heavier, key=heavier.__getitem__)
            moved |= starts[right] != cut
