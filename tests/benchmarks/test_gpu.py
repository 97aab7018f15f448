"""The measurement of a GPU: it brings its results home whatever happens. A CPU runs every stage."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import textwrap
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from tiers import nightly
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from waiting import eventually

from benchmarks.gpu import measure, parts, preflight
from benchmarks.gpu.environment import CACHES, environment_of_stages
from benchmarks.gpu.errors import in_one_line
from benchmarks.gpu.results import tables
from benchmarks.gpu.shapes import llama3
from benchmarks.gpu.stages import CALLS, STAGES, Stage
from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.launch.rank.supervisor import cuda_defaults
from llama_core.machine.detect import available_cores
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.step_time import step_time
from llama_core.planning.work import Work

pytestmark = pytest.mark.xdist_group("gpu")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = {"gpu.json", "gpu.md", "logs.tar.gz"}
NOT_ON_A_CPU = ("documents", "our kernel", "3B, fp8", "torchtitan")
"""What a CPU, or a machine without torchtitan, does not have; the rows hold an error."""


def results_in(out):
    assert {path.name for path in out.iterdir()} == FILES
    return json.loads((out / "gpu.json").read_text())


def by_stage(results):
    return {result["stage"]: result for result in results["stages"]}


def log_of(out, stage):
    with tarfile.open(out / "logs.tar.gz") as archive:
        return archive.extractfile(f"logs/{stage}.log").read().decode()


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


# --- whatever happens, the results come home


def finding(**found):
    """Return a stand-in for the processes that look at the machine, which find this."""
    return lambda measurement, module, *_: found if module == "preflight" else {}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Return the results of a stage that raises and one that hangs, and the number of the hanging one's child."""
    folder = tmp_path_factory.mktemp("faulty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.Measurement, "recorded", finding())
        patch.setenv("PYTHONPATH", str(HERE))
        patch.setenv("HANGING_STAGE_CHILD", str(folder / "child"))
        patch.setitem(STAGES, "raises", Stage("raises", 30, ("raising_stage:raises", "raising_stage:goes_on")))
        patch.setitem(STAGES, "hangs", Stage("hangs", 0.5, ("hanging_stage:never",)))  # a CPU gets four times as long
        code = measure.main(["--device", "cpu", "--out", str(folder / "out"), "--stages", "raises", "hangs"])
    assert code == 1
    return folder / "out", int((folder / "child").read_text())


def test_a_stage_that_raises_keeps_its_rows_and_the_next_sections_run(faulty):
    out, _ = faulty
    result = by_stage(results_in(out))["raises"]
    assert result["ended"].startswith("failed: TypeError: object of type 'int' has no len()")
    assert [(row["what"], "error" in row) for row in result["rows"]] == [
        ("before", False),
        ("one row", True),
        ("all of raises", True),
        ("after", False),
    ]
    assert "TypeError: len() takes exactly one argument" in result["rows"][1]["error"]
    assert re.search(r'Traceback.*raising_stage\.py", line \d+, in raises\s+len\(5\)', log_of(out, "raises"), re.DOTALL)


def test_a_stage_that_hangs_leaves_its_stacks_and_dies_with_its_children(faulty):
    out, child = faulty
    assert by_stage(results_in(out))["hangs"]["ended"] == "stopped after 2 s"
    assert re.search(r'Timeout \(.*hanging_stage\.py", line \d+ in <module>', log_of(out, "hangs"), re.DOTALL)
    eventually(lambda: not is_running(child))


def test_what_failed_is_told_before_the_tables_of_the_stages(faulty):
    out, _ = faulty
    text = (out / "gpu.md").read_text()
    wrong = text[text.index("## Missing or failed") : text.index("## Stages")]
    assert "- stage hangs: stopped after 2 s\n" in wrong
    assert "- raises: all of raises: TypeError" in wrong


def without(package, folder):
    """Return a PYTHONPATH under which a package cannot be imported."""
    folder.mkdir()
    code = f"""
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == {package!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Missing())
    """
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    return str(folder)


@pytest.mark.nightly
def test_without_a_package_of_every_stage_one_line_names_it_and_none_is_begun(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", without("pydantic", tmp_path / "path"))
    assert measure.main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    results = results_in(tmp_path / "out")
    assert {result["ended"] for result in results["stages"]} == {"not begun: missing: pydantic"}
    assert "\n- no stage can run without pydantic: install them, or" in (tmp_path / "out" / "gpu.md").read_text()


def test_stages_import_from_wheels_and_one_that_is_broken_does_not_hide_the_others(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with ZipFile(wheels / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "print('hello'); raise SystemExit(0)")
    (wheels / "broken-1.0-py3-none-any.whl").write_text("half a file")
    monkeypatch.setattr(measure.Measurement, "recorded", finding())
    monkeypatch.setitem(STAGES, "greets", Stage("greets", 30, ("greeting:never",)))
    out = tmp_path / "out"
    assert measure.main(["--device", "cpu", "--out", str(out), "--wheels", str(wheels), "--stages", "greets"]) == 0
    assert log_of(out, "greets") == "hello\n"
    (problem,) = results_in(out)["problems"]
    assert problem.startswith("broken-1.0-py3-none-any.whl cannot be unpacked")


def test_a_stage_is_not_begun_without_a_package_that_it_alone_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.Measurement, "recorded", finding(missing={"pyarrow": "No module named 'pyarrow'"}))
    assert measure.main(["--device", "cpu", "--out", str(tmp_path), "--stages", "run"]) == 1
    assert by_stage(results_in(tmp_path))["run"]["ended"] == "not begun: missing: pyarrow"


def test_each_missing_package_is_in_the_line_of_the_stages_that_lack_it():
    missing = {"pyarrow": "No module named 'pyarrow'", "yaml": "No module named 'yaml'", "tyro": "ImportError: old"}
    assert list(preflight.complaints(missing)) == [
        "no stage can run without PyYAML: install them, or give their wheels (--wheels FOLDER)",
        "the stage run cannot run without pyarrow",
        "the stages peer, peer_3b measure this engine alone without tyro (ImportError: old)",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGINT)])
def test_a_measurement_ended_by_a_signal_leaves_its_results_and_no_process(number, tmp_path):
    child, stages = tmp_path / "child", ("--stages", "hangs", "machine")
    paths = os.pathsep.join((str(ROOT), str(HERE)))
    process = subprocess.Popen(
        [sys.executable, HERE / "hanging_measurement.py", "--device", "cpu", "--out", tmp_path / "out", *stages],
        env=os.environ | {"PYTHONPATH": paths, "HANGING_STAGE_CHILD": str(child), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    eventually(lambda: child.exists() or process.poll() is not None)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    results = results_in(tmp_path / "out")
    assert results["ended_by"] == number.name
    assert [(result["stage"], result["ended"]) for result in results["stages"]] == [("hangs", "cut off")]
    assert f"- {number.name} ended the measurement" in (tmp_path / "out" / "gpu.md").read_text()
    eventually(lambda: not is_running(int(child.read_text())))
    assert not list(tmp_path.glob("llama-gpu-*"))


def test_stages_on_a_gpu_have_the_environment_of_a_rank_and_caches_that_can_be_written(tmp_path, monkeypatch):
    for variable in (*cuda_defaults(tmp_path, 1), *CACHES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    environment = environment_of_stages("cuda", tmp_path)
    own = cuda_defaults(tmp_path, available_cores())
    assert {name: environment[name] for name in own} == own
    assert all(Path(environment[variable]).is_dir() for variable in CACHES)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    environment = environment_of_stages("cuda", tmp_path)
    assert [environment[variable] for variable in CACHES] == [str(tmp_path / "inductor"), str(tmp_path / "triton")]


@pytest.fixture
def a_device(monkeypatch):
    """Let torch find a GPU, of which another process holds 30 of 80 GiB."""
    device = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))


def test_the_preflight_of_a_gpu_tells_what_it_is_and_who_else_uses_it(a_device):
    found = preflight.look("cuda")
    facts = {row["what"]: row["value"] for row in found.rows}
    assert (found.hopeless, facts["device"], facts["NCCL"]) == ("", "NVIDIA H100 80GB HBM3", "2.29.7")
    assert facts["compute capability"] == "9.0; this torch has code for sm_80, sm_90"
    assert "other processes hold 30.0 GiB of the device" in found.problems


def test_without_a_compiler_the_preflight_says_that_triton_builds_nothing(monkeypatch):
    monkeypatch.setenv("CC", "false")
    (problem,) = [line for line in preflight.look("cpu").problems if "Triton" in line]
    assert problem.startswith("false cannot compile a file that includes Python.h, so Triton builds nothing")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    (problem,) = [line for line in preflight.look("cpu").problems if "Triton" in line]
    assert problem.startswith("there is no C compiler, so Triton builds nothing")


def test_without_a_gpu_a_measurement_of_one_begins_no_stage(tmp_path, monkeypatch):
    found = {"hopeless": preflight.look("cuda").hopeless}
    monkeypatch.setattr(measure.Measurement, "recorded", finding(**found))
    assert measure.main(["--out", str(tmp_path)]) == 1
    (ended,) = {result["ended"] for result in results_in(tmp_path)["stages"]}
    assert re.fullmatch(r"not begun: torch \S+ finds no CUDA device", ended)


def test_no_stage_is_begun_after_its_time(tmp_path):
    assert measure.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0"]) == 1
    results = results_in(tmp_path)
    assert {result["ended"] for result in results["stages"]} == {"not begun: no time is left"}


def test_the_stages_of_a_call_fit_into_eight_minutes_with_a_minute_to_install_and_look():
    for call in CALLS.values():
        assert sum(stage.seconds for stage in call) <= 7 * 60


@pytest.mark.nightly
def test_the_stages_import_nothing_that_the_preflight_does_not_name():
    """The other packages of this environment cannot be imported in the process that imports all stages."""
    with_torch = {"torch", "torchgen", "functorch", "triton"} | required_by("torch")
    modules = sorted({section.partition(":")[0] for stage in STAGES.values() for section in stage.sections})
    known = with_torch | {*preflight.EVERY_STAGE_NEEDS, "llama_core", "benchmarks"}
    code = f"""
        import importlib, sys
        from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
        class Known:
            def find_spec(self, name, path=None, target=None):
                top = name.partition(".")[0]
                is_own = top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
                return PathFinder.find_spec(name, path, target) if is_own or top in {known!r} else None
        sys.meta_path = [BuiltinImporter, FrozenImporter, Known()]
        for name in {[*modules, "benchmarks.gpu.environment", "llama_core.launch.rank.worker"]!r}:
            importlib.import_module(name)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def required_by(distribution, found=None):
    """Return the packages of a distribution's requirements, and of theirs."""
    found = set() if found is None else found
    for requirement in metadata.requires(distribution) or ():
        name = re.match(r"[\w.-]+", requirement)[0]
        if "extra ==" in requirement or name.lower().replace("-", "_") in found:
            continue
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found.add(name.lower().replace("-", "_"))
        required_by(name, found)
    return found


def test_the_page_lists_the_stages_of_all_calls_in_order():
    page = (ROOT / "docs" / "gpu.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| \d+ s \|", page, re.MULTILINE)
    seconds = [int(number) for number in re.findall(r"^\| `\w+` \| (\d+) s \|", page, re.MULTILINE)]
    assert listed == list(STAGES)
    assert seconds == [stage.seconds for stage in STAGES.values()]


# --- what the files say


def test_an_error_is_its_first_and_last_line_without_advice():
    compiler = RuntimeError(
        "backend='inductor' raised:\nat 3:4:\n  x = 1\n  ^\nno such type\n\nSet TORCHDYNAMO_VERBOSE=1"
    )
    assert in_one_line(compiler) == "RuntimeError: backend='inductor' raised: ... no such type"
    cuda = RuntimeError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable"
    )
    assert in_one_line(cuda) == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert in_one_line(AssertionError()) == "AssertionError: it said nothing"


def test_rows_with_other_columns_start_a_new_table_and_errors_join_their_neighbours():
    rows = [
        {"what": "a", "error": "no\nkernel"},
        {"what": "a|b", "ms": 1.23456},
        {"what": "c", "ms": 1000.0},
        {"kernel": "d", "same": True},
    ]
    assert tables(rows) == [
        "| what | ms | error |",
        "| --- | --- | --- |",
        "| a |  | no kernel |",
        "| a/b | 1.235 |  |",
        "| c | 1000 |  |",
        "",
        "| kernel | same |",
        "| --- | --- |",
        "| d | yes |",
        "",
    ]


# --- where the time of a step goes


def recorded(number, name, device, begin_us, end_us, *, annotation=False):
    """Return an event as torch's profiler makes it from a trace."""
    return FunctionEvent(
        number, name, 1, begin_us, end_us, device_type=device, use_device="cuda", is_user_annotation=annotation
    )


def launching(number, name, *kernels, begin_us=0, end_us=10):
    """Return an operator that has launched kernels, given by name and microseconds."""
    operator = recorded(number, name, DeviceType.CPU, begin_us, end_us)
    for kernel, microseconds in kernels:
        operator.append_kernel(kernel, 0, microseconds)
    return operator


def profile_of(*events):
    events = EventList(events, use_device="cuda")
    events._build_tree()
    return parts.Profile(list(events), 1, "cuda")


def test_a_step_is_busy_while_a_kernel_runs_and_an_annotation_is_no_kernel():
    profile = profile_of(
        launching(1, "aten::mm", ("nvjet_mm", 100.0)),
        recorded(2, "nvjet_mm", DeviceType.CUDA, 5, 105),
        recorded(3, "overlapping", DeviceType.CUDA, 55, 155),
        recorded(4, "Torch-Compiled Region: 0/0", DeviceType.CUDA, 5, 405, annotation=True),
        recorded(5, "last", DeviceType.CUDA, 305, 405),
    )
    assert profile.busy_seconds() == pytest.approx(250e-6)
    assert [row["kernel"] for row in parts.kernel_rows(profile)] == ["nvjet_mm", "overlapping", "last"]
    assert parts.measured_ms(profile, 0.4) == dict.fromkeys(parts.PARTS, 0.0) | {
        parts.PRODUCTS: pytest.approx(0.1),
        "kernels outside any operator": pytest.approx(0.2),
        "no kernel runs": pytest.approx(0.15),
        "a step": 0.4,
    }


KERNELS = {
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": ("CompiledFunction", parts.PRODUCTS),
    "sm90_xmma_gemm_bf16f32": ("_LinearCrossEntropy", parts.PRODUCTS),
    "softmax_of_rows": ("_LinearCrossEntropy", parts.ENDS),
    "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>": ("aten::_flash_attention_forward", parts.ATTENTION),
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": ("aten::_cudnn_attention_forward", parts.ATTENTION),
    "triton_poi_fused__to_copy_3": ("CompiledFunction", parts.CASTS),
    "triton_poi_fused__to_copy_t_view_12": ("CompiledFunction", parts.CASTS),
    "triton_poi_fused__to_copy_mul_silu_4": ("CompiledFunction", parts.POINTWISE),
    "triton_red_fused__fused_rms_norm__to_copy_add_2": ("CompiledFunction", parts.POINTWISE),
    "void at::native::direct_copy_kernel_cuda": ("aten::copy_", parts.CASTS),
    "void at::native::indexSelectLargeIndex": ("aten::embedding", parts.ENDS),
    "multi_tensor_apply_kernel<FusedAdamMathFunctor>": ("aten::_fused_adamw_", parts.ADAMW),
    "multi_tensor_apply_kernel<LpNormFunctor>": ("aten::_foreach_norm", parts.ADAMW),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_belongs_to_a_part_of_the_step(kernel):
    operator, part = KERNELS[kernel]
    profile = profile_of(launching(1, operator, (kernel, 7.0)))
    ((name, event, seconds),) = profile.work()
    assert (parts.part_of(name, event), seconds) == (part, pytest.approx(7e-6))


def a_run(shape, **training):
    settings = {"seq_len": 8192, "batch_size": 1, "precision": "bf16"} | training
    return RunConfig.from_mapping(llama3(shape) | {"training": settings, "launch": {"device": "cuda"}})


@pytest.mark.parametrize("device", ["h100", "a100", "b200"])
@pytest.mark.parametrize("plan", [ParallelPlan(compile=True), ParallelPlan(recompute="selective", num_microbatches=3)])
def test_the_predicted_parts_add_up_to_the_step_that_the_planner_predicts(device, plan):
    config = a_run("1B")
    predicted = parts.predicted_ms(config, plan, gpu_spec(device), documents="varlen")
    whole = step_time(Work.of(config, plan), gpu_spec(device))
    assert predicted["a step"] == pytest.approx(1e3 * whole.total)
    assert sum(predicted[part] for part in parts.PARTS) == pytest.approx(1e3 * whole.total)
    assert all(predicted[part] > 0 for part in parts.PARTS)


def test_each_part_is_compared_with_its_prediction():
    profile = profile_of(
        launching(1, "aten::mm", ("nvjet_mm", 90e3)), recorded(2, "nvjet_mm", DeviceType.CUDA, 0, 90e3)
    )
    config, plan, device = a_run("1B"), ParallelPlan(compile=True), gpu_spec("h100")
    rows = list(parts.part_rows(profile, config, plan, device, step_ms=100.0, documents="varlen", visible_share=0.25))
    predicted = parts.predicted_ms(config, plan, device, documents="varlen")
    by_part = {row["part"]: row for row in rows}
    assert by_part[parts.PRODUCTS]["measured / predicted"] == pytest.approx(90 / predicted[parts.PRODUCTS])
    assert by_part["no kernel runs"]["measured"] == pytest.approx(10)
    assert by_part["tokens/s"]["measured"] == pytest.approx(81920)
    assert "25%" in by_part[parts.ATTENTION]["note"]


# --- every stage, on a CPU


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "out"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out), "--stages", *STAGES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return by_stage(results_in(out))


@pytest.mark.nightly
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_measures_all_it_can_on_a_cpu(results, stage):
    rows = results[stage]["rows"]
    failed = [", ".join(str(value) for value in row.values()) for row in rows if "error" in row]
    assert [name for name in failed if not any(known in name for known in NOT_ON_A_CPU)] == []
    assert any("error" not in row for row in rows)


@pytest.mark.nightly
def test_a_killed_run_goes_on_as_if_undisturbed(results):
    rows = results["run"]["rows"]
    (killed,) = [row for row in rows if row.get("killed after step", "-") != "-"]
    (compared,) = [row for row in rows if "compared" in row]
    assert killed["resumed after step"] < killed["killed after step"] < killed["steps"]
    assert compared["metrics equal to the bit"]
    assert compared["weights and moments equal to the bit"]


@pytest.mark.nightly
def test_one_rank_as_if_it_had_peers_has_the_losses_of_one_alone(results):
    rows = results["one_rank"]["rows"]
    assert len(rows) == 4
    assert max(row["largest relative deviation"] for row in rows) < 1e-4


@pytest.mark.nightly
def test_every_kernel_on_a_cpu_is_close_to_fp64(results):
    rows = [row for row in results["parity"]["rows"] if "dtype" in row and "error" not in row]
    limits = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-5}
    assert len(rows) == 14
    for row in rows:
        distances = [value for name, value in row.items() if name not in {"what", "dtype"}]
        assert max(distances) < limits[row["dtype"]], row


@pytest.mark.nightly
def test_a_step_makes_a_graph_if_and_only_if_it_is_compiled(results):
    rows = [row for stage in ("step", "training", "masks") for row in results[stage]["rows"] if "graphs" in row]
    assert {row["compiled"] for row in rows} == {False, True}
    assert all(row["graphs"] == row["compiled"] for row in rows)


@pytest.mark.nightly
def test_the_measured_parts_say_that_they_are_of_a_cpu(results):
    rows = [row for row in results["step"]["rows"] if "part" in row]
    assert sum(row["measured on the CPU"] for row in rows[: len(parts.PARTS)]) > 0
    assert {row["predicted"] for row in rows} == {"none: a CPU is not modelled"}
