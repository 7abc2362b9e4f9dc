# Every target makes its own virtual environment; pip takes packages from wherever pip is configured to.
PYTHON ?= python3
BIN := .venv/bin
# Small tensors, several processes: more than one thread each only gets in the way.
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: demo test test-flower test-ray test-kernels test-chaos lint format bench docs dist test-release clean

demo: .venv/.ready  ## FedAvg, the forgetting-aware methods and the recipe on digits: a comparison and a report
	rm -rf runs/demo
	$(ONE_THREAD) $(BIN)/holdfast compare fedavg fedntd fedka flashback fedfa fedmlp steady \
	    --experiment examples/experiment.yaml --seeds 5 --out runs/demo --report

test: .venv/.ready  ## everything; Flower, Ray and the GPU's kernels too where their environments exist
	[ ! -e .venv-flower/.ready ] || $(MAKE) test-flower
	[ ! -e .venv-ray/.ready ] || $(MAKE) test-ray
	[ ! -e .venv-kernels/.ready ] || $(MAKE) test-kernels
	$(ONE_THREAD) $(BIN)/pytest -n 2

test-flower: .venv-flower/.ready  ## Flower, with real processes: a SuperLink and two SuperNodes, TLS and keys
	$(ONE_THREAD) .venv-flower/bin/python -m pytest tests/flower

test-ray: .venv-ray/.ready  ## Ray, on a real cluster of two nodes
	$(ONE_THREAD) .venv-ray/bin/python -m pytest tests/ray_cluster

test-kernels: .venv-kernels/.ready  ## the GPU's kernels without a GPU: carried out by Triton's interpreter, and compiled for one
	$(ONE_THREAD) TRITON_INTERPRET=1 .venv-kernels/bin/python -m pytest -n 2 -W ignore::DeprecationWarning tests/gpu/test_kernels.py tests/gpu/test_padding_taps_on_gpu.py tests/gpu/test_fp16_weights.py tests/gpu/test_recurrent_kernels.py
	$(ONE_THREAD) .venv-kernels/bin/python -m pytest -n 2 tests/gpu/test_compiled.py

test-chaos: .venv/.ready .venv-flower/.ready  ## everything that can go wrong, at random, and a million damaged messages
	$(ONE_THREAD) HOLDFAST_FUZZ=1000000 $(BIN)/pytest tests/flower/test_wire.py tests/runs/test_run_fuzz.py tests/runs/test_run_shapes.py tests/runs/test_stored_files_fuzz.py tests/training/test_odd_inputs.py
	$(ONE_THREAD) HOLDFAST_FUZZ=1000000 HOLDFAST_CHAOS=1 HOLDFAST_NODES=4 .venv-flower/bin/python -m pytest -s tests/flower

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready  ## the CPU's part; nothing else should run meanwhile
	$(BIN)/python benchmarks/overhead.py --json results/overhead.json
	$(BIN)/python benchmarks/cpu.py --json results/cpu.json
	$(BIN)/python benchmarks/scale.py --json results/scale.json --plot docs/images/scale.svg
	$(BIN)/python benchmarks/partitions.py
	$(BIN)/python benchmarks/methods.py

docs: .venv/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: .venv-release/.ready  ## the sdist and the wheel, checked, in dist/
	rm -rf build dist
	.venv-release/bin/python -m build
	.venv-release/bin/twine check --strict dist/*

test-release: dist  ## the files of dist/ in empty environments, also with the oldest dependencies; downloads these
	$(ONE_THREAD) HOLDFAST_DIST=dist .venv-release/bin/pytest tests/release

clean:
	rm -rf .venv .venv-flower .venv-ray .venv-kernels .venv-release build dist site runs/demo src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# Flower pins tightly, so it has an environment of its own; why flwr comes without dependencies: tests/flower.
.venv-flower/.ready: pyproject.toml tests/flower/requirements.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/pip install -q -r tests/flower/requirements.txt
	.venv-flower/bin/pip install -q --no-deps 'flwr==1.42.*' -e .
	touch $@

.venv-ray/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/pip install -q -c constraints.txt -e '.[ray,privacy]' 'pytest>=8'
	touch $@

# Triton as torch 2.11 brings it, the newest that was tried on a GPU; its interpreter takes no newer NumPy.
.venv-kernels/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-kernels
	grep -v '^numpy' constraints.txt > .venv-kernels/constraints.txt
	.venv-kernels/bin/pip install -q -c .venv-kernels/constraints.txt 'numpy==2.2.*' -e . 'pytest>=8' 'pytest-xdist>=3'
	.venv-kernels/bin/pip install -q --no-deps 'triton==3.6.0'
	touch $@

.venv-release/.ready:
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/pip install -q 'build>=1.2' 'twine>=6.1' 'pytest>=8'
	touch $@

.venv/.ready-docs: .venv/.ready
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	touch $@
