# One line per target; the work is in scripts/ and in the `kernelpool` command.
.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow check bench image clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: ## install everything and run a conversation on real data (no Docker needed)
	@scripts/bootstrap.sh && .venv/bin/kernelpool demo

test: ## the test suite, Docker tests included
	@scripts/with-engine.sh .venv/bin/pytest -m "not slow"

test-fast: ## what needs neither Docker nor the network
	@scripts/bootstrap.sh && .venv/bin/pytest -m "not docker and not slow"

test-slow: ## the long tests
	@scripts/with-engine.sh .venv/bin/pytest -m slow --timeout 1800

check: ## format, lint, types
	@scripts/bootstrap.sh && .venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy

bench: ## measure against plain jupyter_client, print a table
	@scripts/with-engine.sh .venv/bin/python -m benchmarks

image: ## build the kernel image without an image registry
	@scripts/bootstrap.sh && .venv/bin/kernelpool image build --from debian

clean: ## remove what the targets above made in this directory
	@rm -rf .venv .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage demo-output dist
