# Every target sets up what it needs: `make demo` is enough on a fresh machine with
# python3 (3.11 or later), a C++ compiler and make.

PYTHON ?= python3
# The class that `make conformance` puts in the place of torch's.
DDP ?= gradsync:DistributedDataParallel
# How many conformance tests run side by side.
JOBS ?= 2
# How many files of our own tests run side by side.
WORKERS ?= 2
# How long `make soak` takes.
SECONDS ?= 60
# More arguments for pytest, as in: make unit ARGS='-k bucket -x'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread a rank: ranks share the cores, and torchrun has nothing to warn about.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint format types imports unit native-test native-asan native-tsan model soak \
	slow hosts conformance \
	conformance-backend conformance-update bench bench-step bench-collectives clean distclean

help: ## Show this list
	@echo "Usage: make TARGET"
	@echo
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup: $(READY) ## Create .venv and install gradsync into it, once

$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.* csrc/python/*.*)
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing gradsync and its tools into $(VENV) (torch is large: this can take minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,demo,testing,bench]'
	@touch $@

demo: $(READY) ## Train on handwritten digits with two processes and check the result
	@$(BIN)/torchrun --standalone --nproc-per-node 2 examples/digits.py

test: lint types imports native-test unit conformance conformance-backend ## Everything that has to pass before a change lands
	@echo "make test: all passed"

lint: $(READY) ## Style: ruff check and ruff format --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY) ## Let ruff fix what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY) ## Types: mypy --strict on src
	$(BIN)/mypy --strict src

imports: $(READY) ## Direction of imports: import-linter
	$(BIN)/lint-imports --no-logo

unit: $(READY) ## Our tests, without the slow ones (ARGS='-k name' narrows)
	$(BIN)/python -m pytest -m 'not slow and not hosts' -n $(WORKERS) --dist loadfile $(ARGS)

native-test: ## Tests of csrc without Python (ARGS='part of a name' narrows)
	@$(MAKE) --no-print-directory -C csrc/tests VARIANT=plain ARGS='$(ARGS)'

native-asan: ## The same under AddressSanitizer and UBSan
	@$(MAKE) --no-print-directory -C csrc/tests VARIANT=asan ARGS='$(ARGS)'

native-tsan: ## The same under ThreadSanitizer
	@$(MAKE) --no-print-directory -C csrc/tests VARIANT=tsan ARGS='$(ARGS)'

model: ## Every interleaving of the shared-memory protocol, in Python and with spin (apt-get install spin)
	$(PYTHON) csrc/model/protocol.py
	$(PYTHON) csrc/model/spin.py

soak: $(READY) ## Random programs on the gradsync backend, checked (SECONDS=3600, ARGS='--seed 7')
	$(BIN)/python tests/backend/soak.py --seconds $(SECONDS) $(ARGS)

slow: $(READY) ## Our slow tests
	$(BIN)/python -m pytest -m slow $(ARGS) || { code=$$?; \
		test $$code -eq 5 && echo "make slow: there are no slow tests" || exit $$code; }

hosts: $(READY) ## Several hosts, as network namespaces (needs root and iproute2)
	$(BIN)/python -m pytest -m hosts $(ARGS)

conformance: $(READY) ## PyTorch's own DDP tests on our class (DDP=module:Class for another)
	@rm -rf .work/conformance
	$(BIN)/python tests/conformance/check.py --ddp $(DDP) --jobs $(JOBS) --logs .work/conformance $(ARGS)

conformance-backend: $(READY) ## PyTorch's own tests of collectives, on our backend in gloo's place
	@rm -rf .work/conformance-backend
	$(BIN)/python tests/conformance/check_backend.py --jobs $(JOBS) --logs .work/conformance-backend $(ARGS)

conformance-update: $(READY) ## The same, then write what passes to expected.json
	$(BIN)/python tests/conformance/check.py --ddp $(DDP) --jobs $(JOBS) --update

bench: $(READY) ## Sweep models, ranks and implementations (see docs/bench.md)
	$(BIN)/gradsync bench $(ARGS)

bench-step: $(READY) ## Race one training step: torch's DDP, ours, no DDP
	$(BIN)/python benchmarks/step_race.py $(ARGS)

bench-collectives: $(READY) ## Race the collectives: gloo, ours, OpenMPI if it is there
	$(BIN)/python benchmarks/collectives.py $(ARGS)

clean: ## Remove caches and build output
	rm -rf build dist src/*.egg-info .work .pytest_cache .ruff_cache .mypy_cache \
		.hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## The same, and .venv too
	rm -rf $(VENV)
