# Each target sets up everything it needs: make demo, make test. Nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
# A plain path entry, so that a script beside this folder does not take the folder itself for the package.
EDITABLE := --config-settings editable_mode=compat
# One thread each: on a busy machine two threads of a small model can be eight times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow test-hosts lint bench bench-peers bench-gpu clean

demo: .venv/core
	$(BIN)/fedkeep run

# By file, so that what the tests of a file share is made once.
test: .venv/dev lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/dev
	$(BIN)/python -m pytest -m slow

# Four network namespaces, as root; FEDKEEP_DATA names the folder with Fashion-MNIST.
test-hosts: .venv/dev
	$(BIN)/python tests/hosts/run.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/answers.py
	$(BIN)/python benchmarks/stacks.py
	$(BIN)/python benchmarks/transport.py
	$(BIN)/python benchmarks/class_incremental.py

bench-peers: .venv/dev
	$(BIN)/python benchmarks/peers

# Constraints pin PyTorch for a CPU: install the build for your GPU into .venv first.
bench-gpu: .venv/dev
	$(BIN)/python benchmarks/gpu.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("FedKeep needs Python 3.11 or newer; set PYTHON=python3.x")'
	@echo "setting up .venv (once; a minute or two)"
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE) --editable .
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE) --editable '.[dev]'
	touch $@ .venv/core

clean:
	rm -rf .venv build *.egg-info
