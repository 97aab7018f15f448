"""A profile times plans wherever its device is planned for, says so, and tells nothing else than a data sheet would."""

import json
from dataclasses import replace

import pytest

from llama_core.calibration import lookup
from llama_core.calibration.demand import device_for
from llama_core.calibration.grid import gpu_grids, grids
from llama_core.calibration.profile import MachineProfile, own_profile_path, own_profiles, write_profile
from llama_core.chain.expected import expected_step
from llama_core.chain.planned import plan_for_gpu
from llama_core.config.hardware import HALF_RATE_DIM, gpu_spec
from llama_core.config.measured_rates import MeasuredRates
from llama_core.config.run import RunConfig
from llama_core.errors import ConfigError
from llama_core.machine.detect import software_versions
from llama_core.planning.time.compute import MEMORY_SHARE, MODEL_SHAPES
from llama_core.planning.time.step_time import step_time_of
from llama_core.records.directory import RunDirectory
from llama_core.records.files import write_json
from training_infra import cli

H200 = gpu_spec("h200")
GPU = ("--model", "llama3_2_1b", "--gpus", "2", "--gpu-type", "h200", "--seq-len", "2048", "--batch-size", "2")
CPU = ("--model", "tiny_llama3_50m", "--device", "cpu", "--seq-len", "64", "--batch-size", "2", "--steps", "3",
       "--mixed-precision", "bf16")  # fmt: skip


def profile_of(kind, seconds, **others):
    """Return a profile in which every operation takes as long as another, whatever its size."""
    found = {}
    for name, grid in (grids(1) if kind == "cpu" else gpu_grids(1)).items():
        found[name] = grid.measured(dict.fromkeys(grid.points(), seconds))
    here = MachineProfile.of_this_machine(kind)
    if kind == "cuda":
        here = replace(here, device="NVIDIA H200")
    return replace(here, rates={1: MeasuredRates(found)}, **others)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache without profiles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    own_profiles().mkdir(parents=True)
    return own_profiles()


@pytest.fixture
def said(capsys):
    """Run a command and return its exit code, its output and its errors."""

    def run(*arguments):
        capsys.readouterr()
        code = cli.main(arguments)
        return code, *capsys.readouterr()

    return run


def config_of(**launch):
    settings = {"model": "llama3_2_1b", "parallel": {"gpus": 2}, "training": {"precision": "bf16", "batch_size": 2}}
    return RunConfig.from_mapping(settings | {"launch": {"device": "cuda", "gpu_type": "h200"} | launch})


@pytest.mark.parametrize(
    ("command", "asked", "kind"),
    [
        ("estimate-memory", GPU, "cuda"),
        ("estimate-memory", CPU, "cpu"),
        ("dry-run", CPU, "cpu"),
    ],
)
def test_profiles_of_different_speeds_give_different_steps_and_are_named(cache, said, tmp_path, command, asked, kind):
    seconds = {}
    for name, of_operation in (("slow", 2e-4), ("fast", 1e-4)):
        path = tmp_path / f"{name}.json"
        write_profile(path, profile_of(kind, of_operation, measured_at="2026-11-27T00:00:00Z"))
        code, out, _ = said(command, *asked, "--machine-profile", str(path), "--json")
        record = json.loads(out)
        assert code == 0
        assert "on 2026-11-27" in record["rates"]["source"]
        seconds[name] = record["step"]["step_seconds"]
    assert seconds["slow"] > seconds["fast"]
    _, out, _ = said(command, *asked, "--machine-profile", str(path))
    assert len([line for line in out.splitlines() if line.startswith("rates: measured ")]) == 1


def test_a_predicted_sweep_is_timed_by_the_profile_and_names_it_once(cache, said, tmp_path):
    sweep = {"name": "two", "base": {"model": "llama3_2_1b", "parallel": {"gpus": 2}, "launch": {"gpu_type": "h200"}},
             "grid": {"training.seq_len": [1024, 2048]}}  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(json.dumps(sweep))
    asked = ("sweep", "--config", "sweep.yaml", "--predict", "--set", "training.batch_size=2")
    _, out, _ = said(*asked, "--json")
    sheet = json.loads(out)["rows"]
    write_profile(tmp_path / "h200.json", profile_of("cuda", 1.0))
    asked += ("--set", f"launch.machine_profile={tmp_path / 'h200.json'}")
    _, out, _ = said(*asked, "--json")
    measured = json.loads(out)["rows"]
    for one, other in zip(measured, sheet, strict=True):
        assert one["step_seconds"] > other["step_seconds"]
        assert one["rates"]["is_measured"]
        assert other["rates"]["source"] == f"data sheet of {H200.label}"
    _, out, _ = said(*asked)
    assert out.count("rates: measured ") == 1


def test_whoever_waits_for_a_step_learns_where_its_expected_time_is_from(cache, tmp_path):
    path = tmp_path / "h200.json"
    write_profile(path, profile_of("cuda", 1e-3))
    planned = plan_for_gpu(config_of(machine_profile=str(path)))
    run = RunDirectory(tmp_path)
    run.config.write_text(planned.config.to_yaml())
    write_json(run.plan, planned.plan.as_dict())
    assert f"(rates: {planned.device.source})" in expected_step(run)
    assert planned.device.spec.measured


class SheetRates(MeasuredRates):
    """What kernels take according to the data sheet of the H200."""

    def seconds(self, kind, sizes):
        words = kind.split()
        if kind == "launch":
            return H200.launch_seconds
        if kind == "copy":
            return sizes[0] / (H200.memory_bandwidth * MEMORY_SHARE)
        if "product" not in kind:
            return None
        *groups, rows, columns, outputs = sizes
        peak = {"fp8": H200.fp8_flops, "fp32": H200.fp32_flops}.get(words[-2], H200.bf16_flops)
        shortest = min(rows, columns, outputs)
        rate = peak * H200.matmul_share * MODEL_SHAPES * shortest / (shortest + HALF_RATE_DIM)
        return 2 * rows * columns * outputs * (groups[0] if groups else 1) / rate


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training": {"precision": "fp8"}},
        {"parallel": {"gpus": 4, "tp": 2}},
        {"parallel": {"gpus": 4, "pp": 2, "compile": False}},
        {"strategy": "lora", "lora": {"base": "nf4"}},
    ],
)
@pytest.mark.parametrize("rates", [MeasuredRates(), SheetRates()], ids=["nothing measured", "the rates of the sheet"])
def test_a_profile_with_the_rates_of_the_data_sheet_gives_its_times(cache, settings, rates):
    request = config_of().model_dump(mode="json", exclude_unset=True)
    for section, values in settings.items():
        request[section] = values if isinstance(values, str) else request.get(section, {}) | values
    planned = plan_for_gpu(RunConfig.from_mapping(request))
    profile = replace(MachineProfile.of_this_machine("cuda"), device="NVIDIA H200", rates={1: rates})
    device = replace(profile.gpu(), measured={1: rates})
    step = step_time_of(planned.config, planned.plan, device)
    assert step.parts == pytest.approx(planned.step.parts, rel=1e-9)


def test_the_profile_in_the_cache_is_used_if_it_fits(cache):
    write_profile(cache / "cuda-nvidia-h200--node7.json", profile_of("cuda", 1.0, host="node7"))
    known = device_for(config_of())
    assert known.source.startswith("measured on node7 on ")
    assert not known.is_foreign
    assert not device_for(config_of(gpu_type="h100")).spec.measured


@pytest.mark.parametrize("damage", ["other torch", "no JSON"])
def test_a_profile_in_the_cache_that_does_not_fit_is_a_line_and_the_data_sheet_counts(cache, said, damage):
    path = cache / "cuda-nvidia-h200--node7.json"
    write_profile(path, profile_of("cuda", 1.0, versions=software_versions() | {"torch": "1.0"}))
    if damage == "no JSON":
        path.write_text("{")
    known = device_for(config_of())
    assert known.spec == H200
    assert not known.spec.measured
    code, out, _ = said("estimate-memory", *GPU)
    assert code == 0
    assert f"rates: data sheet of {H200.label}" in out
    assert [line for line in out.splitlines() if str(path) in line] == [f"note: {known.note}"]


def test_another_processors_profile_is_used_if_it_is_named_and_called_foreign(cache, said, tmp_path):
    path = tmp_path / "colleague.json"
    write_profile(path, profile_of("cpu", 1e-4, device="A Faster CPU", cores=64, measured_at="2026-11-01T00:00:00Z"))
    _, out, _ = said("estimate-memory", *CPU, "--machine-profile", str(path))
    torch = software_versions()["torch"]
    assert f"rates: measured on another machine on 2026-11-01 (A Faster CPU, 64 cores, torch {torch})" in out
    assert "may differ" in out
    _, out, _ = said("estimate-memory", *CPU, "--machine-profile", str(path), "--json")
    assert json.loads(out)["rates"]["is_foreign"]


def test_of_a_named_folder_the_devices_own_profile_is_taken(cache, tmp_path):
    folder = tmp_path / "profiles"
    write_profile(folder / "cpu.json", profile_of("cpu", 1.0, device="A Faster CPU"))
    write_profile(folder / "gpu.json", profile_of("cuda", 1.0))
    assert device_for(config_of(machine_profile=str(folder))).spec.measured
    other = device_for(config_of(machine_profile=str(folder), gpu_type="h100"))
    assert other.note == f"launch.machine_profile={folder} has no profile of {gpu_spec('h100').label}"
    assert not other.spec.measured


@pytest.mark.parametrize(
    ("content", "asked", "problem"),
    [
        (None, GPU, "does not exist"),
        ("{", GPU, "cannot be read"),
        ("cpu", GPU, "a cpu device, and the run is planned for cuda"),
        ("cuda", CPU, "a cuda device, and the run is planned for cpu"),
        ("cuda", (*GPU, "--gpu-type", "h100"), "and launch.gpu_type=h100; leave one of them out"),
    ],
)
def test_a_named_profile_that_cannot_be_used_is_an_error_in_a_line(cache, said, tmp_path, content, asked, problem):
    path = tmp_path / "named.json"
    if content in {"cpu", "cuda"}:
        write_profile(path, profile_of(content, 1.0))
    elif content is not None:
        path.write_text(content)
    code, _, errors = said("estimate-memory", *asked, "--machine-profile", str(path))
    assert code == ConfigError.exit_code == 2
    assert problem in errors
    assert str(path) in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_plan_is_made_for_the_gpu_of_the_named_profile(cache, tmp_path):
    write_profile(tmp_path / "named.json", profile_of("cuda", 1e-4))
    planned = plan_for_gpu(config_of(gpu_type=None, machine_profile=str(tmp_path / "named.json")))
    assert planned.config.launch.gpu_type == "h200"
    assert planned.choices == ("launch.gpu_type=h200 (that of the profile)",)


def test_measured_links_count_inside_a_machine_only(cache):
    links = gpu_grids(2)
    slow = MeasuredRates({kind: grid.measured(dict.fromkeys(grid.points(), 1.0)) for kind, grid in links.items()})
    device = replace(profile_of("cuda", 1e-4), rates={1: MeasuredRates(), 2: slow}).gpu()
    inside = plan_for_gpu(config_of())
    assert step_time_of(inside.config, inside.plan, device).parts["dp"] > 1
    across = plan_for_gpu(config_of(nodes=2))
    assert step_time_of(across.config, across.plan, device).parts["dp"] == pytest.approx(across.step.parts["dp"])


def test_the_own_profiles_of_a_processor_and_of_gpus_are_apart(cache, monkeypatch):
    monkeypatch.setattr(lookup, "_here", MachineProfile.of_this_machine)
    assert own_profile_path("cpu") != own_profile_path("cuda")
    assert own_profile_path("cuda").name.startswith("cuda-")
