import pytest

from llama_core.config.hardware import PCIE_BANDWIDTH, gpu_names, gpu_spec, recognise_gpu
from llama_core.errors import ConfigError


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_device_is_recognised_by_the_name_its_driver_reports(reported, name):
    assert recognise_gpu(reported) == gpu_spec(name)


def test_an_unknown_device_is_not_mistaken_for_another():
    assert recognise_gpu("Quadro K620") is None


@pytest.mark.parametrize("name", gpu_names())
def test_a_program_gets_less_memory_than_the_data_sheet_says(name):
    assert 0 < gpu_spec(name).usable_bytes < gpu_spec(name).memory_bytes


def test_a_misspelt_gpu_type_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown gpu type 'h10'; did you mean 'h100'"):
        gpu_spec("h10")


@pytest.mark.parametrize("name", gpu_names())
def test_programs_reach_a_fraction_of_peak_speed(name):
    device = gpu_spec(name)
    assert 0 < device.attention_share < device.matmul_share <= 1
    assert 0 < device.fp32_flops < device.bf16_flops


@pytest.mark.parametrize("name", gpu_names())
def test_neighbours_in_a_node_have_at_least_pcie_bandwidth(name):
    assert gpu_spec(name).neighbour_bandwidth >= PCIE_BANDWIDTH
