"""A finished run to report on."""

import pytest
from synthetic_run import write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "tiny_llama3_50m-20261121-3f9c")
