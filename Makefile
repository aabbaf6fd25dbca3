# Two commands from a fresh clone: `make demo`, `make test`. Everything is installed below .local/.
HOME_DIR := $(or $(ROLLOUT_HOME),.local)
ifneq ($(words x$(HOME_DIR)x),1)
$(error ROLLOUT_HOME=$(HOME_DIR) has a blank in it: choose another directory)
endif
VENV := $(HOME_DIR)/venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
TRAINERS_TEST := TRAINERS_LONG=1 $(BIN)/python -m pytest tests/integration/test_trainer_releases.py -s
# Most tests wait for something, so more processes than the two processors of CI make them faster.
PYTEST_PROCESSES ?= 4
# Images of containers often set it; each of a hundred short-lived processes would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-bench setup-tasks setup-trainer setup-slurm setup-tests demo train-demo up down test check long lint bench screenshots idle soak million chaos compose-test slurm-dev slurm-test trainers-test clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install everything the project needs (a second time: nothing to do)
	@deploy/setup/setup.sh

setup-vllm: setup ## install real vLLM for CPUs beside it (3.5 GB), for the contract tests
	@deploy/setup/setup.sh vllm

setup-bench: setup ## install what the benchmarks compare with (tmux, SWE-ReX, Kernel Gateway)
	@deploy/setup/setup.sh bench

setup-tasks: setup ## install what the handlers math, stem, reasoning_gym and swe score with, and readers of datasets
	@deploy/setup/setup.sh tasks

setup-trainer: setup ## install what the example trainers need: matplotlib, TRL
	@deploy/setup/setup.sh trainer

setup-slurm: setup ## unpack Slurm without root, for the virtual cluster of the tests
	@deploy/setup/setup.sh slurm

demo: setup ## run 64 real rollouts, show them, leave nothing running (SANDBOX=local-unsafe: without isolation)
	@$(BIN)/rollout demo $(if $(SANDBOX),--sandbox-runtime $(SANDBOX))

train-demo: setup-trainer ## train the demo model with GRPO for 150 steps (AGENT=examples/agents/calculator_agent.py: driven by that program); ends with a picture and two numbers (docs/training.md)
	@$(BIN)/python examples/train.py --algorithm $(or $(ALGORITHM),grpo) --steps $(or $(STEPS),150) $(if $(AGENT),--agent $(AGENT)) $(TRAIN_ARGS)

up: setup ## start the whole service on this machine
	@$(BIN)/rollout up

down: ## end what `make up` started
	@program="$${ROLLOUT_HOME:-.local}/venv/bin/rollout"; if [ -x "$$program" ]; then "$$program" down; \
	  else echo "nothing is installed, so nothing runs"; fi

setup-tests: ## all of these: what the tests need
	@deploy/setup/setup.sh tests

test: setup-tests lint ## set up, check style and run all tests (PYTEST_ARGS="-k name" for some)
	@$(BIN)/python -m pytest -n $(PYTEST_PROCESSES) $(PYTEST_ARGS)
ifdef CI # a release of somebody else's is told, and ends no run of ours
	-@$(TRAINERS_TEST)
endif

# One rollout through the whole service, beside what needs no service: in a minute.
check: setup-tests lint ## check style, run the unit tests and one real rollout
	@$(BIN)/python -m pytest -n 3 $(PYTEST_ARGS) tests/unit tests/client \
	  "tests/integration/test_rollouts.py::test_a_trajectory_is_exactly_what_the_engine_saw_and_sampled[embedded]"

long: setup-tests ## list what only the long forms of tests cover, and the commands that run them
	@$(BIN)/python -m tests.helpers.long_forms

lint: setup ## check style
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

bench: setup-bench ## run every benchmark; each ends with one JSON object
	@for file in benchmarks/[a-z]*.py; do name=$${file#benchmarks/}; [ $$name = harness.py ] || \
	  $(BIN)/python -m benchmarks.$${name%.py} || exit 1; done

screenshots: setup ## take the pictures of docs/img anew: terminals; the page and Flower need chromium
	@$(BIN)/python -m docs.screenshots

idle: setup-tests ## hold what is promised in seconds to the letter, on a machine that does nothing else
	@TEST_IDLE=1 $(BIN)/python -m pytest \
	  -k "cancel or long_poll or many_that_wait or who_waits_is or demo_shows or told_of_soon or three_seconds or setup_tells" \
	  tests/integration/test_cancel.py tests/integration/test_api.py tests/integration/test_waiting.py \
	  tests/integration/test_cli.py tests/client/test_cli.py tests/local/test_stack.py tests/local/test_setup.py

soak: setup ## put 500 sandboxes through while workers and their host are killed (minutes)
	@ROLLOUT_SANDBOX_WARM=4 $(BIN)/python -m tests.soak.sandboxes

million: setup ## put 1,000,000 rollouts through a head whose parts are killed (hours; the same command goes on where it was: MILLION_ARGS="--for 3600")
	@$(BIN)/python -m tests.soak.million --directory $(HOME_DIR)/million $(MILLION_ARGS)

chaos: setup ## break a running service in every way we know, then soak it with 5,000 rollouts (40 minutes)
	@CHAOS_LONG=1 $(BIN)/python -m pytest tests/chaos tests/integration/test_lifecycle_model.py \
	  tests/integration/test_openapi_fuzz.py tests/integration/test_contract_values.py \
	  tests/integration/test_failover.py \
	  tests/integration/test_rollouts.py::test_many_rollouts_at_once_all_end_and_leave_nothing --timeout 1800
	@$(BIN)/python -m tests.chaos.soak --rollouts 5000
	@$(BIN)/python -m tests.chaos.soak --rollouts 500 --real
	@$(BIN)/python -m tests.chaos.durable --rollouts 1000

compose-test: setup ## docker-compose.dev.yml in containers of Podman: build, start, break, end (minutes, as root)
	@COMPOSE_LONG=1 $(BIN)/python -m pytest tests/local/test_compose_containers.py -sv --timeout 1800

slurm-dev: setup-slurm ## a virtual Slurm cluster on this machine; prints what to export, ends with Ctrl-C
	@$(BIN)/python -m tests.slurm.cluster --nodes $(or $(NODES),4)

slurm-test: setup-slurm ## the service on a virtual Slurm cluster, the long form
	@SLURM_LONG=1 $(BIN)/python -m pytest tests/slurm --timeout 1800 -s

trainers-test: setup-tests ## compare the trainers that the adapters were checked with to their newest releases
	@$(TRAINERS_TEST)

clean: down ## delete caches, logs and the stopped stack's data (`rm -rf .local` deletes the installation too)
	@rm -rf .pytest_cache .ruff_cache .hypothesis build dist
	@CDPATH= cd -- "$${ROLLOUT_HOME:-.local}" 2>/dev/null || exit 0; rm -rf run log; \
	  if [ ! -e slurm-run ] || [ "$$(cat slurm-run/jobs.json 2>/dev/null)" = "[]" ]; \
	  then rm -rf slurm-run; else echo "kept $$PWD/slurm-run, which holds an API key:" \
	  "its service has not ended; rollout slurm down, then make clean"; fi
	@find . -name __pycache__ -not -path './.local/*' -prune -exec rm -rf {} +
