# Two commands: `make chat` talks to the bundled model, `make test` checks everything. See README.md.
PYTHON ?= python3
VENV ?= .venv
# Test processes side by side; each may start threads and servers of its own.
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)

.PHONY: chat serve test lint bench format clean help

help:
	@echo "make chat    chat with the bundled model (installs everything into $(VENV) first)"
	@echo "make serve   serve the bundled model over HTTP"
	@echo "make test    run the tests"
	@echo "make lint    ruff, mypy --strict, import layers"
	@echo "make bench   measure the native kernels on this machine"

chat: $(VENV)/.installed
	@$(BIN)/ktransformers chat $(ARGS)

serve: $(VENV)/.installed
	@exec $(BIN)/ktransformers serve $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/kernels_smoke.py $(ARGS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Everything an install prints goes to stderr, so that `make -s chat` leaves stdout to the answers.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v in ((3, 11), (3, 12)) or sys.exit("error: Python 3.11 or 3.12 is needed, this is %d.%d; run: make PYTHON=/path/to/python3.12 chat" % v)' </dev/null 1>&2
	@$(PYTHON) -m venv $(VENV) </dev/null 1>&2

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing into $(VENV) (once; a few minutes)" 1>&2
	@$(PIP) install -q -c constraints.txt -e . </dev/null 1>&2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(PIP) install -q -c constraints.txt -e ".[dev]" </dev/null 1>&2
	@touch $@

clean:
	rm -rf build $(VENV)
