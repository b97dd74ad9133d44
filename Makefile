# `make` alone lists the targets.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slurm test-gpu check fix golden bench clean distclean

# Images often set it; here each of a hundred processes would compile PyTorch's source again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
# Most of a test's time is one process that starts up. Files stay whole: their tests share runs.
PYTEST_WORKERS ?= 2
DEMO_ARGS ?=

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## build .venv with the package set for this machine (quick when nothing changed)
	@$(PYTHON) tools/setup_env.py

demo: setup ## set up and run the main job: GRPO on a tiny model, no GPU needed
	@$(BIN)/rollplex train --profile tiny $(DEMO_ARGS)

test: setup ## set up and run all tests that need no GPU
	@$(BIN)/python -m pytest -m "not gpu and not slurm" -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-slurm: setup ## start a Slurm on this machine and run the tests that need one
	@tools/slurm_up run $(BIN)/python -m pytest -m slurm $(PYTEST_ARGS)

test-gpu: setup ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: setup ## lint, formatting, types and import layers; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

fix: setup ## apply what the linter and the formatter can repair
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

golden: setup ## rewrite the golden files from what the code gives now; read the diff afterwards
	@ROLLPLEX_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -m "not gpu" -k golden $(PYTEST_ARGS)

bench: setup ## time the schedules against each other on the tiny model
	@$(BIN)/rollplex bench --profile tiny --baseline colocate

clean: ## remove caches and build outputs; runs and .venv stay
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	@find src tests tools jobs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	@rm -rf .venv
