"""A machine is slow, or cannot write, before the first step."""

import re

import pytest
from faulty_run import Fault, FaultyRun

from llama_core.launch.attempts import log_path
from llama_core.preflight.checks import PRODUCT
from llama_core.records.preflight import read_preflights


def warnings(run):
    return [line for line in log_path(run.run, 0).read_text().splitlines() if line.startswith("WARNING preflight: ")]


@pytest.mark.fault("a rank whose processor multiplies three times as slowly", phase="preflight")
def test_a_rank_that_multiplies_more_slowly_is_named_before_the_first_step(undisturbed, tmp_path, texts, promise):
    run = FaultyRun(tmp_path, texts)
    # MKL then leaves out all newer instructions
    fault = Fault("start of the rank", {"environment": {"MKL_CBWR": "COMPATIBLE"}}, rank=1)
    assert run.train(fault).status == "finished"
    (record,) = read_preflights(run.run)
    assert [one.rank for one in record.named] == [1], record
    times = [one.seconds[PRODUCT] for one in record.ranks]
    assert times[1] > 2.5 * times[0]
    (line,) = warnings(run)
    assert re.fullmatch(r"WARNING preflight: rank 1 on \S+ \(.+\): .+ took [\d.]+ ms, and [\d.]+ ms on its peers", line)
    assert undisturbed.outcome.status == run.outcome.status
    promise("named with both times; finished")


@pytest.mark.fault("the run's folder cannot be written", phase="preflight")
def test_a_folder_that_cannot_be_written_is_named_before_the_first_step(
    undisturbed, tmp_path, texts, token_cache, promise
):
    run = FaultyRun(tmp_path, texts, token_cache=token_cache)
    # a folder in the place of the file, as root may write everywhere else
    (run.run.logs / ".preflight-0.tmp").mkdir()
    assert run.train().status == "finished"
    (line,) = warnings(run)
    assert "rank 0 on " in line and f"could not measure a write to {run.run.logs}: Is a directory" in line
    run.equals(undisturbed)
    promise("named; finished; equal")


@pytest.mark.fault("no fault", phase="preflight")
def test_a_healthy_start_names_nobody(undisturbed, promise):
    (record,) = read_preflights(undisturbed.run)
    assert (record.named, record.unmeasured) == ((), ())
    assert warnings(undisturbed) == []
    promise("no line")
