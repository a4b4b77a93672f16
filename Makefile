# make demo   a real training job is killed and resumes from memory
# make test   lint, types and every test
# make test-core  the same without the tests of the adapters
# make bench  every benchmark, as ratios
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, each of the hundreds of processes that the tests start compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

FRAMEWORKS := --ignore=tests/adapter

.PHONY: help demo test test-core lint bench env envs clean

help:
	@sed -n 's/^# make/make/p' Makefile

env:
	@tools/envs/main.sh

# The first takes as long as the others together.
envs: env
	@tools/envs/bridge.sh & pid=$$!; \
	tools/envs/lightning.sh && tools/envs/megatron.sh && tools/envs/nemo.sh && tools/envs/mooncake.sh; others=$$?; \
	wait $$pid && exit $$others

demo:
	@tools/envs/bridge.sh 0.6.2
	@.envs/bridge/bin/python -m demo

lint: env
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test:
	@$(MAKE) --no-print-directory -j2 envs lint
	REQUIRE_FRAMEWORKS=1 $(PYTHON) -m pytest

test-core: lint
	$(PYTHON) -m pytest $(FRAMEWORKS)

bench: envs
	$(PYTHON) -m benchmarks

clean:
	rm -rf .venv .envs .demo build dist *.egg-info
