# What people do here; `make` alone lists it. Each target is a few lines, or a script in scripts/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test search test-compose test-ray soak chaos lint format bench protos clean

VENV ?= .venv
BIN := $(VENV)/bin
# Made when the environment has what Outrider runs on, and when it has what working on it takes too.
STAMP := $(VENV)/.set-up
TOOLS := $(VENV)/.set-up-tools
# setuptools writes the path of this folder in the locale's encoding, which may lack its letters.
UTF8 := LC_ALL=C.UTF-8

help: ## List what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(TOOLS) ## Make .venv with everything in it (Python 3.11 to 3.13; PYTHON=... to choose)

# Which Python was asked for; another one makes the environment anew.
ASKED := $(VENV)/.python
ifneq ($(PYTHON),)
ifneq ($(PYTHON),$(file < $(ASKED)))
.PHONY: $(STAMP)
endif
endif

$(STAMP): pyproject.toml constraints.txt scripts/python.sh scripts/venv.sh
	@echo "Setting up $(VENV): some minutes, and about 1.6 GB"
	scripts/venv.sh $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(UTF8) $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	@echo "$(PYTHON)" > $(ASKED)
	touch $@

$(TOOLS): $(STAMP)
	@echo "Adding what tests and checks need: another 1.3 GB"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

demo: $(STAMP) ## Serve the embedded model and stream an answer, with speculation and without (DEMO_ONCE=1: end after it)
	@DEMO_ONCE="$(DEMO_ONCE)" OUTRIDER_LOG_LEVEL="$${OUTRIDER_LOG_LEVEL:-error}" exec $(BIN)/python -P -m outrider.demo

test: setup ## Run the tests (ARGS="-k tree -x" passes words on to pytest)
	$(BIN)/python -m pytest -n auto --maxprocesses=4 --dist loadfile --no-loadscope-reorder $(ARGS)

search: setup ## Run the property tests with examples that no run has tried (ARGS="--hypothesis-seed=1" to repeat one)
	@$(MAKE) --no-print-directory test ARGS='-m hypothesis --hypothesis-profile=search $(ARGS)'

test-compose: setup ## Build the images, run docker-compose.yml and break it (root; docker.io, docker-compose, debootstrap)
	PYTHON=$(BIN)/python scripts/test-compose.sh $(ARGS)

test-ray: setup ## Run deploy/ray on a local cluster of two nodes and kill one
	$(UTF8) $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,ray]'
	$(BIN)/python -m pytest -q -s -W ignore -p no:cacheprovider tests/deploy/ray_cluster.py $(ARGS)

soak: setup ## Mixed load with faults for SECONDS (600): no wrong answer, flat memory and file descriptors
	$(BIN)/python -m tests.deploy.soak --seconds $(or $(SECONDS),600) $(ARGS)

chaos: setup ## Kill, pause and cut everything for SECONDS (300), in the order of SEED: no answer wrong or lost
	NUMBA_CACHE_DIR=.cache/tests/numba OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.chaos --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0) $(ARGS)

lint: setup ## Check style, types and the wire contract
	BIN=$(BIN) scripts/lint.sh

format: setup ## Mend what can be mended of style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure decode speed on MT-bench beside transformers (ARGS="--per-category 1" is quick)
	$(BIN)/outrider bench mt_bench $(ARGS)

protos: setup ## Write outrider/v1 anew from protos/
	PYTHON=$(BIN)/python scripts/protos.sh

clean: ## Remove .venv and what tools left behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
