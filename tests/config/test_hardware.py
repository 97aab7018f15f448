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
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X OAM", "mi300x"),
    ],
)
def test_a_device_is_recognised_by_the_name_its_driver_reports(reported, name):
    assert recognise_gpu(reported) == gpu_spec(name)


@pytest.mark.parametrize(
    "reported",
    [
        "Quadro K620",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_an_unknown_device_is_not_mistaken_for_another(reported):
    assert recognise_gpu(reported) is None


@pytest.mark.parametrize("name", ["a100_pcie", "a100_pcie_40gb", "h100_pcie"])
def test_pcie_cards_are_joined_by_no_other_link(name):
    assert gpu_spec(name).neighbour_bandwidth == PCIE_BANDWIDTH


@pytest.mark.parametrize("name", gpu_names())
def test_a_program_gets_less_memory_than_the_data_sheet_says(name):
    assert 0 < gpu_spec(name).usable_bytes < gpu_spec(name).memory_bytes


@pytest.mark.parametrize(
    ("spelt", "name"),
    [
        ("a100_80gb", "a100"),
        ("a100-40gb", "a100_40gb"),
        ("A100-SXM4-80GB", "a100"),
        ("a100-pcie-40gb", "a100_pcie_40gb"),
        ("a100-pcie", "a100_pcie"),
        ("H100-SXM5-80GB", "h100"),
        ("H100 PCIe", "h100_pcie"),
        ("H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_may_be_spelt_as_others_spell_it(spelt, name):
    assert gpu_spec(spelt).name == name


@pytest.mark.parametrize("name", gpu_names())
def test_a_gpu_may_be_spelt_as_its_maker_does(name):
    assert gpu_spec(gpu_spec(name).label).name == name


@pytest.mark.parametrize("name", ["h10", "a100_20gb", "h100 nvl", "v100", ""])
def test_an_unknown_gpu_type_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError) as refused:
        gpu_spec(name)
    assert str(refused.value) == f"unknown GPU type {name!r}; choose one of {', '.join(gpu_names())}"


@pytest.mark.parametrize("name", gpu_names())
def test_programs_reach_a_fraction_of_peak_speed(name):
    device = gpu_spec(name)
    assert 0 < device.attention_share < device.matmul_share <= 1
    assert 0 < device.fp32_flops < device.bf16_flops


@pytest.mark.parametrize("name", gpu_names())
def test_fp8_products_have_twice_the_peak_where_there_are_any(name):
    device = gpu_spec(name)
    assert device.fp8_flops == (pytest.approx(2 * device.bf16_flops, rel=0.02) if device.fp8_flops else 0)
    assert bool(device.fp8_flops) == (name.startswith(("h", "b", "gb", "l40", "rtx")))


@pytest.mark.parametrize("name", gpu_names())
def test_neighbours_in_a_node_have_at_least_pcie_bandwidth(name):
    assert gpu_spec(name).neighbour_bandwidth >= PCIE_BANDWIDTH
