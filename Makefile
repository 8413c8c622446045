# make train and make test are each complete on a fresh clone: Python 3.11+, a C++ compiler and make
# are all they need. What they install goes into .venv; compiled Horovod and MNIST are kept in the
# user's cache and data folders for the next clone.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup setup-train train test test-slurm faults soak lint clean

NP ?= 4
ARGS ?=
SECONDS ?= 600
export PATH := $(CURDIR)/.venv/bin:$(PATH)

help: ## say what there is
	@echo "make train [ARGS='--model cnn --epochs 3'] [NP=4]"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup-train:
	@scripts/setup.sh train

setup: ## install everything: all frameworks, Horovod for them, MNIST, test tools
	@scripts/setup.sh test

train: setup-train ## train a model on MNIST with four workers (installs what is missing)
	horovodrun -np $(NP) python -m hvdsync.train $(ARGS)

test: setup ## run the tests; SLOW=1: the slow ones too, MATRIX=1: all (installs what is missing)
	scripts/test.sh

test-slurm: setup ## run jobs on a Slurm of one node, installed here for it (Debian, as root)
	apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge libpmix-dev
	scripts/test.sh slurm

faults: setup ## each fault in each framework, over Gloo and MPI, at two and four ranks (half an hour)
	scripts/test.sh faults

soak: setup ## kill training runs at random moments for SECONDS=600, and verify what they end with
	nice -n 10 python tests/integration/soak.py --seconds $(SECONDS)

lint: setup ## check style and types
	ruff check .
	ruff format --check .
	mypy

clean: ## remove the environment and what was generated; keeps the wheel cache and the data
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
