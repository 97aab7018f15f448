"""Asks a failed test once more, alone: what ``pytest --ask-again`` does.

A test that fails by the machine and not by the code costs everybody a run. So when all others have ended, each failed
test runs again in a fresh process. If it passes there it is unstable: the run passes, and its last lines name the test
and what it said first, for whoever mends it next. A second failure fails the run, as do two unstable tests in one run.

Tests that fail in the same way while their shared fixture is set up count as one.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

MAX_ASKED = 4
"""More failures than these are no accident, and none of them is asked again."""
RECORD_VARIABLE = "UNSTABLE_TESTS"
"""Names a file that collects the unstable tests of several pytest runs, such as the two of ``.ci/run``."""


def pytest_addoption(parser):
    parser.addoption("--ask-again", action="store_true", help="run each failed test once more, alone, after the others")


def pytest_configure(config):
    is_worker_of_xdist = hasattr(config, "workerinput")
    if config.getoption("--ask-again") and not is_worker_of_xdist:
        config.pluginmanager.register(AskAgain(config))


class AskAgain:
    """Keeps the failures of a run, and asks again at its end."""

    def __init__(self, config):
        self.config = config
        self.first = {}
        """The first failed report of each test."""
        self.is_collected = True
        self.record = Path(os.environ[RECORD_VARIABLE]) if RECORD_VARIABLE in os.environ else None

    def pytest_collectreport(self, report):
        self.is_collected &= not report.failed

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.first.setdefault(_without_group(report.nodeid), report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # ends after pytest's summary, so that these lines are the last
    def pytest_sessionfinish(self, session):
        result = yield
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self.first and self.is_collected:
            session.exitstatus = self._verdict()
        return result

    def _verdict(self):
        causes = self._tests_by_cause()
        if len(causes) > MAX_ASKED:
            self._say(f"{len(causes)} failures are no accident: none is asked again")
            return pytest.ExitCode.TESTS_FAILED
        self._say("once more, alone:")
        seed = self.config.getoption("--hypothesis-seed")
        draws = [] if seed is None else [f"--hypothesis-seed={seed}"]
        unstable = self._recorded()
        failed_twice = []
        for tests in causes:
            if self._passes_alone(draws + tests):
                first = _what_it_said(self.first[tests[0]])
                unstable.append(f"unstable: {shlex.quote(tests[0])} passed alone. First it said: {first}")
            else:
                failed_twice.append(f"failed twice; to repeat: python -m pytest {shlex.join(draws + tests)}")
        self._write(unstable)
        for line in failed_twice + unstable:
            self._say(line)
        if len(unstable) > 1:
            self._say("two unstable tests in one run fail it")
        return pytest.ExitCode.TESTS_FAILED if failed_twice or len(unstable) > 1 else pytest.ExitCode.OK

    def _tests_by_cause(self):
        """Return the failed tests in lists, one for what made them fail: mostly the test itself."""
        causes = {}
        for test, report in self.first.items():
            cause = _what_it_said(report) if report.when == "setup" else test
            causes.setdefault(cause, []).append(test)
        return list(causes.values())

    def _passes_alone(self, arguments):
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--tb", "short", *arguments]
        again = subprocess.run(command, cwd=self.config.rootpath, capture_output=True, text=True, check=False)
        if again.returncode:
            self._say(again.stdout + again.stderr)
        return again.returncode == 0

    def _recorded(self):
        """Return the lines of earlier pytest runs."""
        return self.record.read_text().splitlines() if self.record and self.record.exists() else []

    def _write(self, lines):
        if self.record and lines:
            self.record.write_text("".join(f"{line}\n" for line in lines))

    def _say(self, text):
        self.config.get_terminal_writer().line(text)


def _without_group(nodeid):
    """Return the name of a test as pytest takes it, without the ``@group`` that xdist adds."""
    name, at, group = nodeid.rpartition("@")
    return name if at and "]" not in group else nodeid


def _what_it_said(report):
    """Return a failure in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.partition("\n")[0] if crash else report.longreprtext.splitlines()[-1]
