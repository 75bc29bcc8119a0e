# Two commands for a fresh machine:
#   make run    set everything up, then let a small model answer (PROMPT="..." and CONFIG=file.toml are yours to set)
#   make test   set everything up, then run every test and check
# The first of either builds llama.cpp, see docs/install.md; after that both work offline.

CONFIG ?= examples/laptop.toml
PROMPT ?= Write one sentence about rivers.
export PROMPT

ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$python"; break; fi; done)
endif

BIN := .venv/bin

.PHONY: run test setup setup-torch lint format types tests clean
.NOTPARALLEL:

run: setup
	@$(BIN)/headrace run $(CONFIG) "$$PROMPT"

# The quick checks first; `make --keep-going test` shows the result of all of them.
test: lint format types tests

define set_up
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found" >&2; \
		echo "help: install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py
endef

setup:
	$(set_up)

# what the tests need besides: PyTorch for CPUs and what its users are compared with
setup-torch:
	$(set_up) --torch

lint: setup-torch
	@echo "== ruff check"
	@$(BIN)/ruff check .

format: setup-torch
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .

types: setup-torch
	@echo "== mypy"
	@$(BIN)/mypy
	@$(BIN)/mypy scripts

tests: setup-torch
	@echo "== pytest"
	@$(BIN)/pytest

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find core plugins backends tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
