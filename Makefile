# Two commands from a fresh clone: `make demo`, `make test`. Everything is installed below .local/.
VENV := .local/venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-bench demo up down test lint bench soak clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything the project needs (a second time: nothing to do)
	@deploy/setup/setup.sh

setup-vllm: setup ## install real vLLM for CPUs beside it (3.5 GB), for the contract tests
	@deploy/setup/setup.sh vllm

setup-bench: setup ## install what the benchmarks compare with (tmux, SWE-ReX, Kernel Gateway)
	@deploy/setup/setup.sh bench

demo: setup ## run 64 real rollouts, show them, leave nothing running (SANDBOX=local-unsafe: without isolation)
	@$(BIN)/rollout demo $(if $(SANDBOX),--sandbox-runtime $(SANDBOX))

up: setup ## start the whole service on this machine
	@$(BIN)/rollout up

down: ## end what `make up` started
	@if [ -x $(BIN)/rollout ]; then $(BIN)/rollout down; else echo "nothing is installed, so nothing runs"; fi

test: setup-vllm setup-bench lint ## set up, check style and run all tests (PYTEST_ARGS="-k name" for some)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## check style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: setup-bench ## run every benchmark; each ends with one JSON object
	@for file in benchmarks/[a-z]*.py; do name=$${file#benchmarks/}; \
	  $(BIN)/python -m benchmarks.$${name%.py} || exit 1; done

soak: setup ## put 500 sandboxes through while workers and their host are killed (minutes)
	@ROLLOUT_SANDBOX_WARM=4 $(BIN)/python -m tests.soak.sandboxes

clean: down ## delete caches, logs and the stopped stack's data (`rm -rf .local` deletes the installation too)
	@rm -rf .local/run .local/log .pytest_cache .ruff_cache .hypothesis build dist
	@find . -name __pycache__ -not -path './.local/*' -prune -exec rm -rf {} +
