import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from llama_core.chain.environment import validate_environment
from llama_core.config.hardware import gpu_spec
from llama_core.config.run import RunConfig
from llama_core.errors import EnvironmentMismatchError
from llama_core.imports import how_to_install
from llama_core.launch.jobs.slurm_check import unused_allocation
from llama_core.machine import detect, validate
from llama_core.machine.defaults import ResolvedConfig, reading_threads, resolve_machine_defaults
from llama_core.machine.detect import (
    Machine,
    available_cores,
    cgroup_memory,
    detect_machine,
    device_label,
    gpu_links,
    installed_gpus,
    visible_gpus,
)
from llama_core.machine.hazards import look_at_machine
from llama_core.trackers.wandb import has_key

CPU_MACHINE = Machine((), None, cpu_native_bf16=False, memory_bytes=2**35, available_memory_bytes=2**34, cores=8)
GPU_MACHINE = replace(CPU_MACHINE, gpus=("NVIDIA H200", "NVIDIA H200"), gpu_type=gpu_spec("h200"))


def config(**sections):
    return RunConfig.from_mapping({"training": {"batch_size": 16}} | sections)


def resolved(request, machine):
    return resolve_machine_defaults(request, machine).config


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A function that runs git in a new repository, where this software's file is imported from."""
    monkeypatch.setattr(detect, "__file__", str(tmp_path / "detect.py"))
    (tmp_path / "detect.py").write_text("")

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init")
    return git


def test_the_commit_of_the_code_is_known_in_its_checkout(checkout, tmp_path):
    checkout("add", "detect.py")
    checkout("commit", "-m", "first")
    commit = checkout("rev-parse", "HEAD")[:12]
    assert detect.code_commit() == commit
    (tmp_path / "detect.py").write_text("changed")
    assert detect.code_commit() == f"{commit}-dirty"


def test_a_checkout_that_the_code_is_only_installed_in_is_not_its_own(checkout):
    checkout("commit", "--allow-empty", "-m", "somebody else's")
    assert detect.code_commit() is None


def test_a_machine_with_gpus_trains_on_them_in_bf16():
    chosen = resolved(config(), GPU_MACHINE)
    assert (chosen.launch.device, chosen.launch.gpu_type, chosen.training.precision) == ("cuda", "h200", "bf16")


def test_a_machine_without_gpus_trains_one_device_on_its_cpu_in_full_precision():
    chosen = resolved(config(), CPU_MACHINE)
    assert (chosen.launch.device, chosen.launch.gpu_type, chosen.training.precision) == ("cpu", None, "fp32")


def test_a_cpu_that_computes_bf16_natively_does():
    assert resolved(config(), replace(CPU_MACHINE, cpu_native_bf16=True)).training.precision == "bf16"


def test_an_unknown_gpu_is_planned_as_an_h100_with_a_notice():
    chosen = resolve_machine_defaults(config(), replace(GPU_MACHINE, gpus=("Tesla V100",), gpu_type=None))
    assert chosen.config.launch.gpu_type == "h100"
    assert any("'Tesla V100' is not in the table of devices" in choice for choice in chosen.choices)


def test_fp8_is_not_left_to_a_cpu():
    with pytest.raises(EnvironmentMismatchError, match=r"^training\.precision=fp8 needs a GPU, .* use bf16 or fp32"):
        resolved(config(training={"precision": "fp8"}), CPU_MACHINE)
    assert resolved(config(training={"precision": "fp8"}), GPU_MACHINE).training.precision == "fp8"


def test_a_slurm_job_uses_gpus_that_its_login_node_lacks():
    chosen = resolved(config(launch={"launcher": "slurm"}, parallel={"gpus": 8}), CPU_MACHINE)
    assert (chosen.launch.device, chosen.launch.gpu_type) == ("cuda", "h100")


@pytest.mark.parametrize("machine", [CPU_MACHINE, GPU_MACHINE])
def test_explicit_settings_are_kept_and_not_announced(machine):
    request = config(launch={"device": "cpu"}, training={"precision": "fp32"}, data={"num_workers": 3})
    assert resolve_machine_defaults(request, machine) == ResolvedConfig(request, ())


@pytest.mark.parametrize("machine", [CPU_MACHINE, GPU_MACHINE])
def test_resolving_twice_changes_nothing_more(machine):
    once = resolved(config(), machine)
    assert resolve_machine_defaults(once, machine).choices == ()


def test_every_choice_is_announced_with_its_reason():
    assert resolve_machine_defaults(config(), GPU_MACHINE).choices == (
        "launch.device=cuda (this machine has NVIDIA H200)",
        "training.precision=bf16 (native on cuda)",
        "launch.gpu_type=h200 (the device here)",
        "data.num_workers=4 (8 cores per rank)",
    )


@pytest.mark.parametrize(("num_gpus", "launcher", "num_nodes"), [(16, "local", 1), (10, "local", 1), (16, "slurm", 2)])
def test_the_gpus_of_one_machine_are_one_node_however_many(num_gpus, launcher, num_nodes):
    machine = replace(GPU_MACHINE, gpus=("NVIDIA H200",) * num_gpus)
    request = config(launch={"launcher": launcher}, parallel={"gpus": num_gpus}, training={"batch_size": num_gpus})
    found = resolve_machine_defaults(request, machine)
    assert found.config.num_nodes == num_nodes
    assert (f"launch.nodes=1 (this machine has {num_gpus} GPUs)" in found.choices) == (launcher == "local")


@pytest.mark.parametrize(("cores", "threads"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_half_of_a_ranks_cores_read_data_ahead_and_four_at_most(cores, threads):
    assert reading_threads(cores) == threads


@pytest.mark.parametrize(
    ("launch", "num_workers"), [({}, 2), ({"launcher": "slurm", "slurm": {"cpus_per_rank": 2}}, 1)]
)
def test_the_cores_of_a_rank_are_its_share_of_the_machine_or_those_that_slurm_gives_it(launch, num_workers):
    request = config(launch=launch, parallel={"gpus": 2})
    assert resolved(request, GPU_MACHINE).data.num_workers == num_workers


@pytest.mark.parametrize(
    ("machine", "sections", "message"),
    [
        (
            CPU_MACHINE,
            {"parallel": {"gpus": 4}},
            "gpus=4: this machine has no CUDA device; add --device cpu for 4 CPU processes, or --launcher slurm",
        ),
        (
            CPU_MACHINE,
            {"launch": {"device": "cuda"}},
            "device=cuda: this machine has no CUDA device that torch can use",
        ),
        (GPU_MACHINE, {"parallel": {"gpus": 4}}, "gpus=4: this machine has 2; use --gpus 2, or --launcher slurm"),
        (
            GPU_MACHINE,
            {"launch": {"nodes": 2}, "parallel": {"gpus": 2}},
            "launch.nodes=2: the local launcher uses only this",
        ),
    ],
)
def test_a_request_beyond_the_machine_is_refused_with_both_numbers_and_the_remedy(machine, sections, message):
    with pytest.raises(EnvironmentMismatchError) as refusal:
        resolve_machine_defaults(config(**sections), machine)
    assert str(refusal.value).startswith(message)


def test_more_cpu_processes_than_cores_are_allowed():
    assert resolved(config(launch={"device": "cpu"}, parallel={"gpus": 16}), CPU_MACHINE).launch.device == "cpu"


def test_this_machine_has_memory_and_cores():
    machine = detect_machine()
    assert 0 < machine.available_memory_bytes <= machine.memory_bytes
    assert 1 <= machine.cores <= os.cpu_count()


def test_a_process_has_only_the_cores_it_is_bound_to():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tNODE\tSYS\t0-15\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a driver with three devices on the path."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$1" = topo ] && exec cat "$0.topology"\n'
        "echo '0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559, 570.86'\n"
        "echo '1, GPU-bb22, NVIDIA H100 80GB HBM3, 81559, 570.86'\n"
        "echo '2, GPU-cc33, Tesla T4, 15360, 570.86'\n"
    )
    program.chmod(0o755)
    (tmp_path / "nvidia-smi.topology").write_text(TOPOLOGY)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    installed_gpus.cache_clear()
    yield
    installed_gpus.cache_clear()


@pytest.mark.parametrize(
    ("chosen", "indexes"),
    [("0", "0"), ("2,0", "20"), ("GPU-bb", "1"), ("", ""), ("-1", ""), ("0,7,1", "0"), ("NoDevFiles", "")],
)
def test_only_devices_visible_to_the_process_count(nvidia_smi, monkeypatch, chosen, indexes):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert "".join(gpu.index for gpu in visible_gpus()) == indexes


def test_devices_are_listed_with_memory_driver_and_table_name(nvidia_smi):
    devices = validate_environment().facts["devices"]
    assert "NVIDIA H100 80GB HBM3 (81559 MiB, driver 570.86, known as h100)" in devices
    assert "Tesla T4 (15360 MiB, driver 570.86, not in the table of devices)" in devices


def test_device_links_are_listed_and_a_link_through_the_cpu_is_a_warning(nvidia_smi, monkeypatch):
    assert gpu_links() == {("0", "1"): "NV18", ("0", "2"): "SYS", ("1", "2"): "NODE"}
    (links,) = (finding for finding in look_at_machine(3, 1) if finding.name == "gpu links")
    assert links.fact == "NV18 between 1 of 3 pairs, SYS between 1 of 3 pairs, NODE between 1 of 3 pairs"
    assert links.warning.startswith("GPU 0 and GPU 2 (2 of 3 pairs) are connected through the CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    (links,) = (finding for finding in look_at_machine(2, 1) if finding.name == "gpu links")
    assert (links.fact, links.warning) == ("NV18 between 1 of 1 pairs", "")


FAKE_TORCH = """
from types import SimpleNamespace

GPU = SimpleNamespace(uuid="11-22", name="NVIDIA H100 80GB HBM3 MIG 1g.10gb", total_memory=10 << 30, major=9, minor=0)
cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda index: GPU)
"""


@pytest.fixture
def torch_with_a_slice(tmp_path, monkeypatch):
    """A driver and a torch that sees a slice of a device."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_TORCH)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(detect, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(detect, "torch_has_cuda", lambda: True)
    detect._gpus_of_torch.cache_clear()
    yield
    detect._gpus_of_torch.cache_clear()


def assert_the_slice_is_found():
    (gpu,) = visible_gpus()
    assert (gpu.name, gpu.memory_mib, gpu.driver) == ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "10240", "580.65.06")
    assert detect.compute_capability() == (9, 0)
    assert detect_machine().gpus == (gpu.name,)


def test_without_nvidia_smi_torch_lists_the_devices(torch_with_a_slice, monkeypatch):
    """As in a container that was given the driver's libraries alone."""
    monkeypatch.setattr(detect, "installed_gpus", tuple)
    assert_the_slice_is_found()


def test_torch_lists_slices_of_devices(nvidia_smi, torch_with_a_slice, monkeypatch):
    assert len(visible_gpus()) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f")
    assert_the_slice_is_found()


def test_a_device_has_its_drivers_name(nvidia_smi):
    assert device_label("cuda") == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (
            "0::/a/b\n",
            {
                "a/memory.max": "4000",
                "a/memory.current": "3000",
                "a/memory.stat": "file 900\ninactive_file 500\n",
                "a/b/memory.max": "max",
                "a/b/memory.current": "100",
            },
            [(4000, 2500)],
        ),
        (
            "4:memory:/host/path\n2:cpu,cpuacct:/\n",
            {
                "memory/memory.limit_in_bytes": "8000",
                "memory/memory.usage_in_bytes": "1000",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 300\n",
            },
            [(8000, 700)],
        ),
        ("4:cpu:/\n", {}, []),
    ],
)
def test_control_groups_of_either_version_limit_memory(tmp_path, membership, files, expected):
    (tmp_path / "self").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_memory(tmp_path / "cgroup", tmp_path / "self") == expected


def test_a_sound_installation_has_no_errors(tmp_path):
    report = validate_environment(config(), tmp_path / "runs" / "new")
    assert report.errors == ()
    assert {"python", "torch", "devices", "cpu", "memory", "disk", "attention"} <= set(report.facts)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"data": {"source": "/nowhere.jsonl"}}, "data source '/nowhere.jsonl' does not exist"),
        ({"data": {"tokenizer": "/nowhere.json"}}, "no tokenizer '/nowhere.json': '/nowhere.json' does not exist"),
        ({"parallel": {"gpus": 8}}, "gpus=8: this machine has no CUDA device; add --device cpu"),
    ],
)
def test_each_obstacle_is_one_line_with_its_remedy(monkeypatch, sections, error):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (only,) = validate_environment(config(**sections)).errors
    assert only.startswith(error)
    assert "\n" not in only


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """Be a user without any W&B account or setting; return their home."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


ONLINE = {"tracking": {"wandb": "online"}}
KEYLESS = "tracking.wandb=online needs an API key; run wandb login, set WANDB_API_KEY, or use --wandb offline"


def test_wandb_online_without_a_key_is_an_error_before_any_job(nobody):
    assert validate_environment(config(**ONLINE)).errors == (KEYLESS,)
    assert validate_environment(config(tracking={"wandb": "offline"})).errors == ()


@pytest.mark.parametrize("host", ["api.wandb.ai", "wandb.example.org:8080"])
def test_a_key_is_looked_for_where_wandb_login_puts_it(nobody, monkeypatch, host):
    (nobody / ".netrc").write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
    assert not has_key() or host == "api.wandb.ai"
    monkeypatch.setenv("WANDB_BASE_URL", f"https://{host}")
    assert has_key()


def test_a_key_in_the_environment_is_enough(nobody, monkeypatch):
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_key()


def test_what_is_missing_is_installed_by_a_command_that_works_anywhere():
    assert how_to_install("tokenizers") == "pip install 'tokenizers<1,>=0.20'"
    assert how_to_install("unheard-of") == "pip install 'unheard-of'"


def test_a_machine_without_slurm_cannot_submit_to_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    (only,) = validate_environment(config(launch={"launcher": "slurm"}, parallel={"gpus": 8})).errors
    assert only.startswith("launch.launcher=slurm: this machine has no sbatch")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sinfo: fatal: Could not establish a configuration source",
            "launch.launcher=slurm: Slurm's commands are installed here, but no cluster is configured (no slurm.conf); "
            "log in to a node of one, or use --launcher local",
        ),
        (
            "slurm_load_partitions: Unable to contact slurm controller (connect failure)",
            "launch.launcher=slurm: Slurm's controller does not answer (slurm_load_partitions: Unable to contact slurm "
            "controller (connect failure)); wait until `scontrol ping` finds it up, or use --launcher local",
        ),
    ],
)
def test_a_slurm_without_a_cluster_or_a_controller_is_refused_with_what_works(tmp_path, monkeypatch, said, told):
    for command in ("sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue"):
        (tmp_path / command).write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (only,) = validate_environment(config(launch={"launcher": "slurm"}, parallel={"gpus": 8})).errors
    assert only == told


def on_a_disk_with_room_for(checkpoints, monkeypatch, path, training=None, **launch):
    request = config(launch={"device": "cpu"} | launch, training={"batch_size": 16} | (training or {}))
    checkpoint = 12 * request.spec.num_parameters
    usage = shutil.disk_usage(path)._replace(free=int(checkpoints * checkpoint))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return validate_environment(request, path)


def test_a_disk_with_room_for_some_checkpoints_is_a_warning(tmp_path, monkeypatch):
    report = on_a_disk_with_room_for(2.5, monkeypatch, tmp_path)
    assert any("3 checkpoints of tiny_llama3_50m take" in warning for warning in report.warnings)
    assert not report.errors


def test_the_room_for_checkpoints_counts_the_best_and_those_kept_by_their_tokens(tmp_path, monkeypatch):
    """Of 20 steps of 16,000 tokens, those of 96,000, 192,000 and 288,000 are kept for good."""
    training = {"seq_len": 1000, "steps": 20, "checkpoint_every": 2, "keep_best": 4, "keep_every_tokens": 96_000}
    report = on_a_disk_with_room_for(9.5, monkeypatch, tmp_path, training)
    (warning,) = (one for one in report.warnings if "checkpoints" in one)
    assert warning.startswith("10 checkpoints of tiny_llama3_50m take")
    assert "lower training.keep_checkpoints or lower training.keep_best or raise training.keep_every_tokens" in warning


def test_a_disk_without_room_for_one_checkpoint_is_refused_unless_forced_or_none_is_saved(tmp_path, monkeypatch):
    (only,) = on_a_disk_with_room_for(0.5, monkeypatch, tmp_path).errors
    assert only.startswith("a checkpoint of tiny_llama3_50m takes 573.85 MiB but")
    forced = on_a_disk_with_room_for(0.5, monkeypatch, tmp_path, force=True)
    assert not forced.errors
    assert any("3 checkpoints of" in warning for warning in forced.warnings)
    timed = validate_environment(config(launch={"device": "cpu"}), tmp_path, saves=False)
    assert not any("checkpoint" in problem for problem in (*timed.errors, *timed.warnings))


@pytest.mark.parametrize(
    ("around", "launcher", "told"),
    [
        ({}, "slurm", None),
        ({}, "local", None),
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "1"}, "local", None),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "16", "SLURM_JOB_NUM_NODES": "2"}, "local", None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, "local", "not on a node of the job; put srun"),
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "3"}, "local", "has 3 nodes"),
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, "slurm", "inside Slurm job 7, and the run gets a job of its"),
    ],
)
def test_a_run_that_leaves_the_slurm_job_around_it_unused_is_a_warning(monkeypatch, around, launcher, told):
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    warning = unused_allocation(config(launch={"launcher": launcher}))
    assert warning == "" if told is None else told in warning


def test_a_run_directory_below_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    (only,) = validate_environment(run_dir=tmp_path / "file" / "run").errors
    assert only.startswith(f"cannot write to {tmp_path / 'file'}, where the run goes")


def test_several_gpu_nodes_need_a_torch_that_splits_communicators_without_gloo(monkeypatch):
    monkeypatch.setattr(validate, "package_version", lambda package: "2.11.0+cu130")
    config = RunConfig.from_mapping({"launch": {"nodes": 2, "device": "cuda"}, "parallel": {"gpus": 16}})
    needs_newer = "a run on several nodes needs torch 2.13 or newer, but 2.11.0+cu130 is installed"
    assert any(error.startswith(needs_newer) for error in validate_environment(config).errors)
    one_node = config.with_overrides("launch.nodes=1")
    assert not any("several nodes" in error for error in validate_environment(one_node).errors)
