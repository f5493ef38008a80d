# `make` lists the targets. People and CI use the same ones. Everything is installed into .venv.

PYTHON ?= python3
# Installed first, so that what specdec needs is met by this build. On a machine without a GPU a CPU build saves
# gigabytes: where your package index has one, name it here (TORCH=torch==2.13.0+cpu, or the path of a wheel).
TORCH ?= torch==2.13.0
HTTP_PORT ?= 8000
GRPC_PORT ?= 9000
MINUTES ?= 5
SEED ?= 1
CASES ?= 5000
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
LOG := $(VENV)/install.log

# $(call install,what it is,arguments of pip install)
define install
	@echo "Installing $(1) into $(VENV) (details: $(LOG))"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off $(2) >>$(LOG) 2>&1 \
		|| { echo "The installation failed; the last lines of $(LOG):"; tail -n 30 $(LOG); exit 1; }
endef

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test fuzz chaos ray-up-test lint types fmt proto bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Each stamp is made once, and again when pyproject.toml changes.
$(VENV)/.runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("specdec needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	$(call install,torch,"$(TORCH)")
	$(call install,specdec,-e .)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(call install,the development tools,-e ".[dev]")
	@touch $@

$(VENV)/.clients: $(VENV)/.dev
	$(call install,the client libraries that tests use,-e ".[clients]")
	@touch $@

$(VENV)/.bench: $(VENV)/.runtime
	$(call install,what the benchmarks need,-e ".[bench]")
	@touch $@

run: $(VENV)/.runtime ## Serve the embedded pair on this machine (HTTP_PORT, GRPC_PORT)
	@$(BIN)/specdec models pull smollm2
	@exec $(BIN)/specdec serve deployments/local.yaml --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT)

test: $(VENV)/.clients ## Run the tests (PYTEST_ARGS='tests/unit -k name' for some)
	@$(BIN)/specdec models pull smollm2
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

fuzz: $(VENV)/.dev ## Send 5,000 odd requests over each protocol, and look for server errors (CASES)
	@SPECDEC_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest tests/fuzz $(PYTEST_ARGS)

chaos: $(VENV)/.dev ## Kill, hang and scale workers and coordinators under load, and compare every text (MINUTES, SEED)
	@$(BIN)/specdec bench chaos --minutes $(MINUTES) --seed $(SEED)

ray-up-test: $(VENV)/.dev ## Start a cluster of three hosts with `ray up`, on this machine (root, openssh-server, rsync)
	@SPECDEC_RAY_UP=1 $(BIN)/python -m pytest tests/ray_up -s $(PYTEST_ARGS)

lint: $(VENV)/.dev ## Check style, formatting and which part imports which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev ## Check types
	@$(BIN)/mypy

fmt: $(VENV)/.dev ## Format, and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(VENV)/.dev ## Regenerate the gRPC stubs from protos/
	@$(BIN)/python protos/generate.py

bench: $(VENV)/.bench ## Run the benchmarks
	@if [ -f benchmarks/run.py ]; then $(BIN)/python -m benchmarks.run; else echo "There are no benchmarks yet."; fi

clean: ## Remove .venv, caches and build output (downloaded models stay)
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
