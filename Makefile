# The two commands: `make train` runs the main job on this machine, `make test` passes the tests.
# Both set everything up first; `make setup` alone is idempotent and cached in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files side by side, for most of these tests wait or use one core; whole runs and the test cluster have two to themselves.
TWO_AT_ONCE := $(BIN)/python -m pytest -n 2 --dist loadfile
LISTS := containers/pins.txt containers/torchrec.txt tests/requirements.txt

.PHONY: help setup train test test-fast test-cluster cluster-build lint cluster-up cluster-down clean

help:
	@echo "make train      set up, then train on the synthetic click log with 2 ranks"
	@echo "make test       set up, then lint and run all tests; those on a real Slurm with a real Apptainer need root"
	@echo "make test-fast  lint, and the tests that train no whole run or epoch"
	@echo "make test-cluster  only the tests on the real Slurm with the real Apptainer"
	@echo "make lint       ruff, mypy, import-linter"
	@echo "make cluster-up, make cluster-down  the test cluster: a real Slurm and Apptainer; see tests/cluster/cluster.py"
	@echo "make setup      only set up: $(VENV), with the versions in containers/ and tests/requirements.txt"
	@echo "make clean      remove $(VENV)"

setup: $(READY)

$(READY): pyproject.toml $(LISTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$$($(PYTHON) --version): expected Python 3.11 or newer; run make PYTHON=/path/to/python3.11 ..."; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "this Python cannot make a virtual environment; install it, on Debian with: apt install python3-venv"; exit 2; }
	@echo "setting up $(VENV): this downloads about 300 MB once and takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r containers/pins.txt -r tests/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r containers/torchrec.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: setup
	$(BIN)/python -m rechpc.submit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-fast: lint
	$(TWO_AT_ONCE) tests/unit tests/distributed --ignore tests/distributed/test_attempt.py \
	  --ignore tests/distributed/test_kill.py --ignore tests/distributed/test_reference.py

test: lint cluster-build
	$(TWO_AT_ONCE) tests/unit tests/distributed
	$(BIN)/python -m pytest tests/local tests/packaging tests/container tests/slurm

test-cluster: lint cluster-build
	$(BIN)/python -m pytest tests/container tests/slurm

# Minutes, once. Status 3: it cannot run here, and its tests are skipped, or fail where CI=true.
cluster-build: setup
	$(BIN)/python -m tests.cluster.cluster build || [ $$? = 3 ]

cluster-up: setup
	$(BIN)/python -m tests.cluster.cluster up

cluster-down: setup
	$(BIN)/python -m tests.cluster.cluster down

clean:
	rm -rf $(VENV)
