# Two commands: `make chat` talks to the bundled model, `make test` checks everything. See README.md.
#   make chat TORCH=cpu           torch without CUDA: 1.2 GB on disk instead of 5.6; the default where there is no GPU
#   make chat PYTHON=python3.13   another interpreter than the first suitable one
VENV ?= .venv
# See tools/install.sh, which reads them. CONSTRAINTS pins versions: CI gives .ci/constraints.txt.
export PYTHON TORCH TORCH_INDEX CONSTRAINTS
# Test processes side by side; each may start threads and servers of its own.
JOBS ?= 2
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(CONSTRAINTS) $(shell find csrc -type f 2>/dev/null)

.PHONY: chat serve test lint bench format web clean help

help:
	@echo "make chat    chat with the bundled model (installs everything into $(VENV) first:"
	@echo "             5.6 GB with CUDA where there is an NVIDIA GPU, 1.2 GB without; TORCH=cpu or TORCH=cuda says which)"
	@echo "make serve   serve the bundled model over HTTP"
	@echo "make test    run the tests"
	@echo "make lint    ruff, mypy --strict, import layers"
	@echo "make bench   measure the native kernels on this machine"
	@echo "make web     build the chat page of the server (needs node 20 and npm)"

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

# The built page is committed: users need no node.
web:
	cd web && npm ci && npm run build

# Everything an install prints goes to stderr, so that `make -s chat` leaves stdout to the answers.
$(VENV)/.installed: $(SOURCES)
	@tools/install.sh $(VENV)
	@touch $@

$(VENV)/.installed-dev: $(SOURCES)
	@tools/install.sh $(VENV) dev
	@touch $(VENV)/.installed $@

clean:
	rm -rf build $(VENV)
