"""How tensor-parallel ranks divide a model; ``test_parity.py`` compares what they compute."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from parity import UNTIED
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_core.models.llama import Llama
from llama_core.parallel.tensor import apply_tensor_parallel


@pytest.fixture
def two_ranks():
    """Two ranks, of which the other does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_a_parameter_beside_a_matrix_without_a_row_is_refused_too(two_ranks):
    with torch.device("meta"):
        model = Llama(UNTIED)
        model.layers["0"].attention.wo.register_parameter("scale", nn.Parameter(torch.zeros(UNTIED.hidden_size)))
    with pytest.raises(
        NotImplementedError, match=r"^scale is not divided: neither its matrix nor the adapter has a row"
    ):
        apply_tensor_parallel(model, two_ranks, sequence_parallel=True)


def test_a_weight_without_a_row_is_refused_when_the_model_is_divided(two_ranks):
    with torch.device("meta"):
        model = Llama(UNTIED)
        model.layers["1"].attention.register_parameter("slopes", nn.Parameter(torch.zeros(UNTIED.num_heads)))
    with pytest.raises(NotImplementedError, match=r"^layers\.1\.attention\.slopes is not divided: it has no row among"):
        apply_tensor_parallel(model, two_ranks, sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_weight_of_attention_itself_is_divided_as_the_heads_are(two_ranks, sequence_parallel):
    with torch.device("meta"):
        model = Llama(replace(UNTIED, attention_sinks=True))
    apply_tensor_parallel(model, two_ranks, sequence_parallel=sequence_parallel)
    for block in model.layers.values():
        assert block.attention.sinks.placements == (Shard(0),)
        assert block.attention.sinks.to_local().shape == (UNTIED.num_heads // 2,)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bias_that_is_added_after_the_sum_over_ranks_is_whole_on_each(two_ranks, sequence_parallel):
    with torch.device("meta"):
        model = Llama(replace(UNTIED, o_bias=True))
    apply_tensor_parallel(model, two_ranks, sequence_parallel=sequence_parallel)
    for block in model.layers.values():
        assert block.attention.wo.bias.placements == (Replicate(),)
