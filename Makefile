# Every target makes its own virtual environment; pip takes packages from wherever pip is configured to.
PYTHON ?= python3
BIN := .venv/bin
# Small tensors, several processes: more than one thread each only gets in the way.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: demo test lint format bench docs clean

demo: .venv/.ready  ## FedAvg against the forgetting-aware methods on digits: a leaderboard and a report
	rm -rf runs/demo
	$(ONE_THREAD) $(BIN)/holdfast compare fedavg fedntd fedka flashback fedfa fedmlp:head=shared \
	    --experiment examples/experiment.yaml --seeds 3 --out runs/demo --report

test: .venv/.ready
	$(ONE_THREAD) $(BIN)/pytest -n 2

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/partitions.py

docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site runs/demo src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

.venv/.ready-docs: .venv/.ready
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@
