# Each target sets up everything it needs: make demo, make test. Nothing is installed outside .venv.
PYTHON ?= python3
BIN := .venv/bin
# A plain path entry, so that a script beside this folder does not take the folder itself for the package.
EDITABLE := --config-settings editable_mode=compat
# One thread each: on a busy machine two threads of a small model can be eight times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: docs fuzz demo test test-slow test-shaken test-hosts lint audit sbom lock bench bench-peers bench-gpu clean crash soak

demo: .venv/core
	$(BIN)/fedkeep run

# By file, so that what the tests of a file share is made once. The process of a test that hangs is replaced once.
test: .venv/dev lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 1

test-slow: .venv/dev
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=7200

# Ten other seeds of the global generators, in random order, three of them on a busy machine: nothing may depend on these.
SEEDS ?= 10
test-shaken: .venv/dev
	$(BIN)/python tools/shake.py --seeds $(SEEDS)

# Odd recipes, command lines, data files, messages and run folders, an hour of them: make fuzz MINUTES=5 for less.
MINUTES ?= 60
fuzz: .venv/dev
	$(BIN)/python tools/fuzz.py --minutes $(MINUTES)

# What a run survives: damage, kills, failing disks, power failures, failed allocations. Writes docs/reliability.md.
COUNT ?= 200
crash: .venv/dev
	$(BIN)/python tools/crash.py --count $(COUNT) --write

# Many rounds with worker processes: memory, files and handles stay as they were. Writes docs/reliability.md.
ROUNDS ?= 1000
soak: .venv/dev
	$(BIN)/python tools/soak.py --rounds $(ROUNDS) --write

# Four network namespaces, as root; FEDKEEP_DATA names the folder with Fashion-MNIST.
test-hosts: .venv/dev
	$(BIN)/python tests/hosts/run.py
	$(BIN)/python tests/hosts/hostile.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# --strict: without it a package that the advisory service does not know, or does not answer for, counts as harmless.
# What pip-audit says goes through a file, since it ends with a traceback where the service cannot be reached.
audit: .venv/audit/done
	@.venv/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints/tested.txt \
	2> .venv/audit/log || { grep -Ev '^(WARNING|Traceback|During|The above| |$$)' .venv/audit/log | tail -1 | cut -c -300; \
	echo "audit: not passed. A version named above has a known weakness, or the advisory service does not know one of the"; \
	echo "versions or cannot be reached from here, and then nothing is known of any. All of it: .venv/audit/log"; exit 1; }
	@echo "audit: the advisory service knows all versions of constraints/tested.txt, and no weakness of them"

sbom: .venv/dev .venv/audit/done
	mkdir -p build
	.venv/audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(BIN)/python
	@echo "wrote build/sbom.json"

# After a change of constraints/tested.txt. PyTorch is left out: its build, and so its file, depends on the machine.
lock: .venv/dev
	grep -Ev '^(#|torch==)' constraints/tested.txt | $(BIN)/uv pip compile - --no-deps --generate-hashes --no-annotate --no-header \
	--universal --python-version 3.11 --quiet --output-file constraints/hashed.txt

# The documentation site, in build/site. Warnings are errors. It can be opened as files.
docs: .venv/dev
	$(BIN)/python tools/site_source.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file build/mkdocs.yml

bench: .venv/dev
	$(BIN)/python benchmarks/engine_overhead.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/answers.py

bench-peers: .venv/dev
	$(BIN)/python benchmarks/peers

# Install the build of PyTorch for your GPU into .venv first.
bench-gpu: .venv/dev
	$(BIN)/python benchmarks/gpu.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("FedKeep needs Python 3.11 or newer; set PYTHON=python3.x")'
	@echo "setting up .venv (once; a minute or two)"
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python pyproject.toml constraints/tested.txt
	$(BIN)/python -m pip install --quiet --constraint constraints/tested.txt $(EDITABLE) --editable .
	touch $@

.venv/dev: .venv/bin/python pyproject.toml constraints/tested.txt
	$(BIN)/python -m pip install --quiet --constraint constraints/tested.txt $(EDITABLE) --editable '.[dev]'
	touch $@ .venv/core

.venv/audit/done: .venv/bin/python
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@

clean:
	rm -rf .venv build *.egg-info
