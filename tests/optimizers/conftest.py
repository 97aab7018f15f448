import pytest
import torch
from torch import nn


@pytest.fixture
def model():
    """A matrix and a vector inside a layer, and a head."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"0": nn.Sequential(nn.Linear(16, 8, bias=False), nn.RMSNorm(8))})
    return nn.ModuleDict({"layers": layers, "output": nn.Linear(8, 4, bias=False)})
