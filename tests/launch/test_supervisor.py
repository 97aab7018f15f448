import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_harness import FAKE_WORKER
from submitit import LocalExecutor
from waiting import eventually

from llama_core.launch.attempts import log_path, read_rank_exits
from llama_core.launch.jobs import submission
from llama_core.launch.jobs.local import LocalJobHandle
from llama_core.launch.rank.children import companion
from llama_core.launch.rank.supervisor import (
    KERNEL_CACHES,
    MALLOC_TUNABLES,
    Supervisor,
    cuda_defaults,
    worker_environment,
)
from llama_core.launch.rank.surroundings import BelowSubmitit
from llama_core.launch.verdict import STOPPED_EXIT
from llama_core.machine.detect import available_cores
from llama_core.planning.memory.process import KERNELS_KEPT
from llama_core.records.files import read_json, write_json
from llama_core.records.job import JobRecord

on_glibc = pytest.mark.skipif(not Path("/lib64/ld-linux-x86-64.so.2").exists(), reason="needs glibc on x86-64")

COUNT_FAULTS_OF_FOUR_TENSORS = """
import resource
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2**26)
before = faults()
for _ in range(4):
    bytearray(2**26)
print(faults() - before)
"""


COUNT_BYTES_OF_LARGE_AND_SMALL_TENSORS = """
import ctypes
c = ctypes.CDLL(None)
c.sbrk.restype = ctypes.c_void_p
def tensor(size):
    place = ctypes.c_void_p()
    c.posix_memalign(ctypes.byref(place), 64, ctypes.c_size_t(size))
    return place
def step():
    for large in [tensor(2**23), tensor(2**23)]:
        for _ in range(3):
            tensor(4)
        c.free(large)
step()
before = c.sbrk(0)
for _ in range(40):
    step()
print(c.sbrk(0) - before)
"""


def counted(program, tunables):
    environment = os.environ | {"GLIBC_TUNABLES": tunables}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    return int(ended.stdout)


@on_glibc
def test_the_allocator_settings_avoid_page_faults_for_large_tensors():
    faults = [counted(COUNT_FAULTS_OF_FOUR_TENSORS, tunables) for tunables in (MALLOC_TUNABLES, "")]
    assert faults[0] < faults[1] / 10


@on_glibc
def test_a_tensor_fits_where_one_of_its_size_was_freed_though_small_ones_came_between():
    cached = MALLOC_TUNABLES.replace("tcache_count=0", "tcache_count=7")
    grown = [counted(COUNT_BYTES_OF_LARGE_AND_SMALL_TENSORS, tunables) for tunables in (MALLOC_TUNABLES, cached)]
    assert grown[0] < 2**23 < grown[1]


def environment(base, device="cpu", ranks_on_node=1, cores=None):
    return worker_environment(base, device, ranks_on_node, Path("/runs/run"), cores)


@on_glibc
def test_only_cpu_ranks_get_the_allocator_settings():
    assert environment({})["GLIBC_TUNABLES"] == MALLOC_TUNABLES
    assert "GLIBC_TUNABLES" not in environment({}, "cuda")


def test_ranks_on_a_cpu_keep_no_more_kernels_than_their_memory_is_estimated_with():
    assert [environment({})[name] for name in KERNEL_CACHES] == [str(KERNELS_KEPT)] * 2
    assert not set(KERNEL_CACHES) & set(environment({}, "cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compiled_code_is_kept_where_no_other_user_can_put_some(device, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path in Path(environment({}, device)["TORCHINDUCTOR_CACHE_DIR"]).parents


@pytest.mark.parametrize("variable", ["GLIBC_TUNABLES", "LRU_CACHE_CAPACITY", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"])
def test_a_variable_the_user_has_set_is_kept(variable):
    assert environment({variable: "mine"})[variable] == "mine"


def test_ranks_share_the_cores_of_a_machine():
    threads = [int(environment({}, ranks_on_node=ranks)["OMP_NUM_THREADS"]) for ranks in (1, 2, 1000)]
    assert threads == [available_cores(), max(1, available_cores() // 2), 1]


def test_a_rank_uses_the_cores_that_its_scheduler_has_given_it():
    assert environment({}, ranks_on_node=8, cores=6)["OMP_NUM_THREADS"] == "6"


CUDA_DEFAULTS = cuda_defaults(Path("/runs/run"), available_cores())


def test_only_cuda_ranks_get_the_settings_of_torchs_cuda():
    added = CUDA_DEFAULTS
    assert added.items() <= environment({}, "cuda").items()
    assert added.keys().isdisjoint(environment({}, "cpu"))
    assert added["TORCH_FR_DUMP_TEMP_FILE"] == "/runs/run/logs/flight-recorder/rank-"  # torch appends the rank


@pytest.mark.parametrize("name", CUDA_DEFAULTS)
def test_a_setting_of_torchs_cuda_that_the_user_has_set_is_kept(name):
    assert environment({name: "mine"}, "cuda")[name] == "mine"


@pytest.mark.parametrize(("cores", "workers"), [(2, "2"), (8, "8"), (26, "8")])
def test_a_cuda_rank_compiles_in_as_many_processes_as_it_has_cores_but_at_most_eight(cores, workers):
    made = environment({}, "cuda", ranks_on_node=8, cores=cores)
    assert made["TORCHINDUCTOR_COMPILE_THREADS"] == workers


def test_kernels_and_compiled_blocks_are_kept_apart_for_each_machine():
    """Homes are often shared by machines, and locks over a network are slow."""
    made = environment({}, "cuda")
    caches = [Path(made[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    assert {cache.name for cache in caches} == {socket.gethostname()}
    assert caches[0] != caches[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
    ],
)
def test_no_setting_overrides_the_users_under_its_old_name(old, new):
    """torch reads the new name first."""
    assert new not in environment({old: "mine"}, "cuda")


def ends(run):
    exits = read_rank_exits(run, JobRecord(**read_json(run.job)), 0)
    return [(rank_exit.exit_code, rank_exit.signal) for rank_exit in exits]


def test_every_signal_reaches_the_worker_once(submit, run):
    supervisor = submit("count_signals").worker()["supervisor"]
    received = run.path / "received.json"

    def heard():
        return read_json(received)["signals"] if received.exists() else []

    sent = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCONT):
        os.kill(supervisor, number)
        sent.append(number)
        eventually(lambda: len(heard()) >= len(sent))
    assert heard() == sent


def test_a_signal_in_the_first_moment_of_a_supervisor_stops_the_job_by_request(submit, run, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'submitit.core._submit' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    outcome = submit("serve").handle.wait()
    assert outcome.status == "cancelled"
    assert ends(run) in ([(STOPPED_EXIT, None)], [(None, signal.SIGTERM)])  # the worker may not handle signals yet


def test_the_exit_code_of_a_worker_is_recorded(submit, run):
    submit("refuse").handle.wait()
    assert ends(run) == [(2, None)]


def test_the_signal_that_ended_a_worker_is_recorded(submit, run):
    job = submit("serve")
    os.kill(job.worker()["pid"], signal.SIGSEGV)
    outcome = job.handle.wait()
    assert ends(run) == [(None, signal.SIGSEGV)]
    assert outcome.reason == "rank 0 was killed by signal 11 (SIGSEGV)"


@pytest.mark.wide
def test_a_job_that_stops_stepping_is_a_hang_and_its_log_says_where(run, config):
    worker = (sys.executable, str(FAKE_WORKER), "fall_silent")
    config = config.with_overrides("launch.hang_timeout_s=1")
    outcome = submission.submit(run, config, 1, worker=worker).wait()
    assert outcome.status == "hang"
    assert "no step was completed for" in outcome.reason
    assert "in fall_silent" in log_path(run, 0).read_text()


def test_a_companion_runs_beside_the_first_rank_until_that_has_ended(run):
    folder = run.logs / "submitit" / "submission-00000"
    companion = (sys.executable, "-c", "import sys; print('begins', flush=True); sys.stdin.read(); print('ends')")
    worker = (sys.executable, str(FAKE_WORKER), "finish", str(run.path))
    executor = LocalExecutor(folder)
    executor.update_parameters(tasks_per_node=2)
    job_id = executor.submit(Supervisor(run.path, worker, "cpu", 60, BelowSubmitit(), companion=companion)).job_id
    record = JobRecord("local", job_id, socket.gethostname(), "2000-01-01T00:00:00+00:00", folder=str(folder))
    write_json(run.job, record)
    assert LocalJobHandle(run, record).wait().status == "finished"
    assert (run.logs / "evaluations.log").read_text() == "begins\nends\n"


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "raise SystemExit(3)")])
def test_a_companion_that_fails_harms_no_rank(run, command):
    with companion(command, run):
        pass
    assert (run.logs / "evaluations.log").exists()


def test_a_worker_does_not_start_before_its_job_is_recorded(run):
    folder = run.logs / "submitit" / "submission-00000"
    supervisor = Supervisor(
        run.path, (sys.executable, str(FAKE_WORKER), "finish", str(run.path)), "cpu", 60, BelowSubmitit()
    )
    job_id = LocalExecutor(folder).submit(supervisor).job_id
    record = JobRecord("local", job_id, socket.gethostname(), "2000-01-01T00:00:00+00:00", folder=str(folder))
    time.sleep(1.5)
    assert not log_path(run, 0).exists()
    write_json(run.job, record)
    assert LocalJobHandle(run, record).wait().status == "finished"


@pytest.fixture
def small_memory_group(tmp_path):
    """Yield the file that puts a process into a control group of 100 MB."""
    root = Path("/sys/fs/cgroup/memory")
    group = root / f"fake-worker-{os.getpid()}"
    if os.geteuid() != 0 or not os.access(root, os.W_OK):
        pytest.skip("needs root and a writable version 1 memory control group")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("100M")
    yield group / "tasks"
    eventually(lambda: not (group / "tasks").read_text())
    group.rmdir()


@pytest.mark.root
def test_a_worker_killed_by_the_kernels_oom_killer_is_reported_as_out_of_memory(run, config, small_memory_group):
    enter = f'echo $$ > {small_memory_group}; exec "$@"'
    worker = ("/bin/sh", "-c", enter, "sh", sys.executable, str(FAKE_WORKER), "run_out_of_host_memory")
    outcome = submission.submit(run, config, 1, worker=worker).wait()
    assert (outcome.status, outcome.reason) == ("oom", "the kernel ran out of memory and killed rank 0")
