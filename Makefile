# Everything runs in .venv, which is built on first use and brought up to date when
# pyproject.toml changes. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

BIN := .venv/bin
READY := .venv/.ready
STEP := @scripts/step
# Half a minute once the cache is filled; the limit ends a benchmark that hangs.
BENCH_ARGS := --quick --payloads yolov8 --concurrency 1 --rounds 5
BENCH_LIMIT := 300
# Several processes share the tests, and take some from each other in the end. Each has
# servers of its own: more than a few would mostly start those.
PARALLEL := --numprocesses=auto --maxprocesses=4 --dist=worksteal

.PHONY: demo test test-apps lint types imports unit suite chaos bench clean help

demo: $(READY) ## Start a real Triton server and show what shared memory does
	@$(BIN)/shmlane demo --output out $(ARGS)

test: override ARGS :=
test: lint types imports suite bench ## All checks, all tests, then a short benchmark

lint: $(READY) ## Style, formatting and spelling
	$(STEP) "ruff check" $(BIN)/ruff check .
	$(STEP) "ruff format --check" $(BIN)/ruff format --check .
	$(STEP) "codespell" $(BIN)/codespell

types: $(READY) ## mypy --strict on the package and its tests
	$(STEP) "mypy --strict" $(BIN)/mypy

imports: $(READY) ## Who may import whom
	$(STEP) "import-linter" $(BIN)/lint-imports --no-cache

unit: $(READY) ## Tests that need no server: seconds
	@$(BIN)/python -m pytest $(PARALLEL) tests/unit $(ARGS)

suite: $(READY) ## All tests: units, a real server, faults, the docs' code blocks
	@$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-apps: $(READY) ## Whole applications: OCR, video, web services under load, Ray
	$(STEP) "Installing what only applications need" \
		$(BIN)/python -m pip install --editable '.[all]' --group dev --group apps
	@$(BIN)/python -m pytest tests/apps -m "heavy or not heavy" $(ARGS)

chaos: $(READY) ## Ten minutes of faults on a real server (SECONDS=, SEED=)
	@$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) \
		$(if $(SEED),--seed $(SEED))

bench: $(READY) ## A short benchmark; it informs and never fails the build
	@echo; timeout --foreground --signal=INT --kill-after=10 $(BENCH_LIMIT) \
		$(BIN)/shmlane bench $(or $(ARGS),$(BENCH_ARGS)) \
		|| echo "The benchmark did not finish (exit status $$?); nothing depends on it."

clean: ## Remove .venv, caches and build products
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf build dist out
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

help: ## This list
	@echo "make TARGET [ARGS=...]"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1 \2/p' $(MAKEFILE_LIST) \
		| while read -r name what; do printf '  %-10s %s\n' "$$name" "$$what"; done

$(READY): pyproject.toml scripts/setup-venv
	@scripts/setup-venv
	@touch $@
