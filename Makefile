# make demo       the whole pipeline on real text, on the CPU; needs nothing but Python 3.11 or newer
# make serve      a Prefect server, every deployment and a worker, until Ctrl-C
# make test       every law in its cheapest form: some five minutes on two cores
# make test-wide  one run of each real part: Slurm, Prefect, PostgreSQL, a browser, kills, four ranks (Debian, as root)
# make test-nightly  the rest, for hours: whole matrices of a law, new draws, a soak, and the next two
# make faults     breaks real runs in every phase, one fault at a time (FAULTS_PAGE=docs/reliability.md writes its table)
# make oldest     checkpoints, rehearsals and the measurement of a GPU, with the oldest torch that pyproject.toml admits
# make fuzz       tries malformed files and command lines: no traceback, no writes elsewhere, no hang (FUZZ_CASES=3000)
# make gate       all that CI does, on a clean clone of the last commit
# make constraints  looks for newer versions of all packages and writes them to constraints.txt
# make docs       writes the documentation as a website, with all commands, keys and the Python API, to build/docs
# make check      format, lint, types and layers, as in CI and pre-commit
.DEFAULT_GOAL := help
.PHONY: help demo serve test test-wide test-nightly matrices gate faults oldest fuzz constraints docs check clean

PYTHON ?= python3
VENV := .venv
BIN = $(VENV)/bin
CORES := $(shell getconf _NPROCESSORS_ONLN)
JOBS ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) : 8)))
# Each test process and its children use one thread. The tests of an xdist_group run in one process, so that their module
# starts its servers once. Children read the bytecode of the engine, whatever the caller has PYTHONDONTWRITEBYTECODE set
# to. A set of strings has the same order in each run.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=0 $(BIN)/python -m pytest -n $(PROCESSES) \
	--dist loadgroup --durations=10 --ask-again
PROCESSES = $(JOBS)
OLDEST := .venv-oldest
OLDEST_TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
OLDEST_TESTS := tests/training/test_checkpoint.py tests/training/test_trainer.py tests/rehearsal/test_dry_run.py \
	tests/benchmarks/test_gpu.py tests/optimizers/test_bf16_moments_kernel.py tests/parallel/test_zero.py
# It has no fp8 on a CPU, and under the schedule chimera with ZeRO 2 it holds up to 18 % more than is estimated.
BEYOND_OLDEST := fp8 or chimera
# Every package has one version, also where pip builds one, which options of pip do not reach. `CONSTRAINTS=` lets pip
# choose. A torch of another CUDA is the same version: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126
CONSTRAINTS ?= constraints.txt
PIP := PIP_CONSTRAINT="$$PIP_CONSTRAINT $(CONSTRAINTS)" PIP_BUILD_CONSTRAINT="$$PIP_BUILD_CONSTRAINT $(CONSTRAINTS)" \
	$(BIN)/python -m pip --disable-pip-version-check

help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(VENV)/installed
	@$(BIN)/training-infra train --flow --resume --config configs/demo.yaml

serve: $(VENV)/installed
	@$(BIN)/python -m flows.serve

test: $(VENV)/installed-dev
	$(PYTEST) -m "not wide and not nightly" $(PYTEST_ARGS)

# one process runs all tests with Slurm, and mostly waits
test-wide matrices: PROCESSES = $(shell echo $$(($(JOBS) + 1)))
test-wide: $(VENV)/installed-dev
	$(PYTEST) -m "wide and not nightly" $(PYTEST_ARGS)

test-nightly: matrices faults oldest fuzz  # make --keep-going runs the others after a failure

# Properties draw anew, and more. A failure names the command that draws the same again.
matrices: SEED = $(shell shuf -i 1-999999999 -n 1)
matrices: $(VENV)/installed-dev
	$(PYTEST) -m "(nightly or hypothesis) and not fault" --hypothesis-seed=$(SEED) $(PYTEST_ARGS)

gate:
	@scripts/gate

faults: $(VENV)/installed-dev
	FAULTS_PAGE=$(FAULTS_PAGE) $(PYTEST) tests/faults -m fault $(PYTEST_ARGS)

oldest: BIN = $(OLDEST)/bin
oldest: $(OLDEST)/installed
	$(PYTEST) $(OLDEST_TESTS) -k "not ($(BEYOND_OLDEST))" $(PYTEST_ARGS)

fuzz: $(VENV)/installed-dev
	FUZZ_CASES=$(or $(FUZZ_CASES),3000) $(PYTEST) tests/fuzz --timeout 7200 $(PYTEST_ARGS)

# For every supported Python, whichever runs it. CUDA builds of torch name the versions of NVIDIA's packages themselves.
constraints: $(VENV)/installed-dev
	@$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.11 --extra dev pyproject.toml \
		--no-header --no-annotate --output-file $(VENV)/constraints.new
	@{ echo '# The tested versions, for pip install -c. Made by `make constraints`.'; \
		grep -v '^nvidia-\|^cuda-' $(VENV)/constraints.new; } > constraints.txt

docs: $(VENV)/installed-dev
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/docs/index.html; to search, too: python3 -m http.server --directory build/docs 8000"

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers $(JOBS)
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or newer, or set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old; install Python 3.11 or newer, or set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# Each torch names its own Triton, and an older one an older setuptools.
$(OLDEST)/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -m venv $(OLDEST)
	@sed '/^torch==/d; /^triton==/d; /^setuptools==/d' $(CONSTRAINTS) </dev/null >$(OLDEST)/constraints.txt
	@echo 'torch==$(OLDEST_TORCH).*' >>$(OLDEST)/constraints.txt
	@echo "installing into $(OLDEST) with torch $(OLDEST_TORCH): some minutes"
	@PIP_CONSTRAINT=$(OLDEST)/constraints.txt $(OLDEST)/bin/python -m pip --disable-pip-version-check install -qq --editable '.[dev]'
	@touch $@

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing into $(VENV): some minutes the first time"
	@$(PIP) install -qq --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	@echo "installing into $(VENV) with the development tools: some minutes the first time"
	@$(PIP) install -qq --editable '.[dev]'
	@touch $@ $(VENV)/installed
