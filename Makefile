# Everything runs from .venv/ in this folder, made on first use and brought up to date whenever
# pyproject.toml changes.
#
#   make serve        a server with the default model, in the foreground (PORT=8001, ARGS="--debug")
#   make test         what CI runs (ARGS="-k draw" for less)
#   make check        lint, format, types
#   make sim          simulated clusters from seeds, with every fault (SEEDS=1000)
#   make soak         64 streams with random aborts for two minutes (ARGS="--seconds 600")
#   make bench        figures over HTTP, beside transformers (ARGS="--dtype int4")
#   make explore      every state of the charts, with large budgets (minutes; docs/exploration.md)
#   make charts       docs/statecharts from the charts in fsm/, docs/pictures from the scenarios there
#                     (needs Graphviz: the program `dot`)
#   make clean        remove .venv/ and caches
#
# PYTHON=python3.12 chooses the interpreter for .venv/ (3.11 or newer).

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet

# Torch goes first and alone, at exactly the version that pyproject.toml demands: nothing that is
# installed after it can then choose another build of it, such as one with gigabytes of CUDA.
TORCH  := $(shell sed -n 's/^ *"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)

# Servers under test listen on loopback, where no proxy belongs.
comma := ,
export NO_PROXY := localhost,127.0.0.1,::1$(if $(NO_PROXY),$(comma)$(NO_PROXY))
export no_proxy := $(NO_PROXY)
# Packages of the user or of another checkout must not hide a missing dependency.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH PYTHONHOME

.PHONY: help serve test check bench explore sim soak charts clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

serve: .venv/serve.stamp
	@exec $(BIN)/interlock serve --first-answer $(if $(PORT),--port $(PORT)) $(ARGS)

test: .venv/dev.stamp
	@$(BIN)/python -m pytest -q $(ARGS)

check: .venv/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "format: run $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/mypy

soak: .venv/dev.stamp
	@$(BIN)/python -m tests.support.soak $(ARGS)

bench: .venv/dev.stamp
	@$(BIN)/python -m benchmarks.serving --peer $(ARGS)

sim: .venv/dev.stamp
	@$(BIN)/fsm-replay simulate --seeds $(or $(SEEDS),1000) $(ARGS)

explore: .venv/dev.stamp
	@$(BIN)/fsm-replay explore $(or $(ARGS),--long)

charts: .venv/dev.stamp
	@$(BIN)/python -m fsm.draw docs/statecharts
	@set -e; pictures=docs/pictures; traces=$$(mktemp -d); trap 'rm -rf "$$traces"' EXIT; \
	  $(BIN)/fsm-replay run --quiet --traces "$$traces" $$pictures; \
	  $(BIN)/fsm-replay timeline "$$traces"/timeline.*.jsonl -o $$pictures/timeline.svg; \
	  $(BIN)/fsm-replay chart "$$traces"/timeline.*.jsonl -o $$pictures/chart.svg; \
	  $(BIN)/fsm-replay timeline "$$traces"/pair.prefill-0.jsonl "$$traces"/pair.decode-0.jsonl \
	    -o $$pictures/pair.svg

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis interlock.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Interlock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Choose one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv --clear .venv || { rm -rf .venv; \
	  echo "$(PYTHON) cannot make virtual environments (Debian, Ubuntu:" \
	       "apt-get install python3-venv)"; exit 1; }

.venv/serve.stamp: pyproject.toml | .venv/bin/python
	@echo "installing Interlock into .venv/ ..."
	@$(PIP) install $(TORCH)
	@$(PIP) install --editable .
	@touch $@

.venv/dev.stamp: pyproject.toml | .venv/bin/python
	@echo "installing Interlock and its test tools into .venv/ ..."
	@$(PIP) install $(TORCH)
	@$(PIP) install --editable '.[dev]'
	@touch .venv/serve.stamp $@
