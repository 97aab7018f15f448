"""Settings that every test shares."""

import subprocess

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # no test asserts a wall-clock time, not even Hypothesis' own
settings.load_profile("untimed")

WIDE_FOLDERS = {"slurm"}


def pytest_collection_modifyitems(items):
    for item in items:
        if WIDE_FOLDERS & set(item.path.parts) or item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.wide)


@pytest.fixture
def disk_of(tmp_path):
    """Mount file systems of a given size, such as ``disk_of("1m")``."""
    mounted = []

    def mount(size):
        path = tmp_path / f"disk-of-{size}"
        path.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
        )
        if made.returncode:
            pytest.skip(f"cannot mount a file system: {made.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)
