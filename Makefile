# Two commands: `make chat` talks to the bundled model, `make test` runs the tests, thinned (`make test-all`: every case).
# See README.md.
#   make chat TORCH=cpu           torch without CUDA: 1.2 GB on disk instead of 5.6; the default where there is no GPU
#   make chat PYTHON=python3.13   another interpreter than the first suitable one
VENV ?= .venv
# See tools/install.sh, which reads them. CONSTRAINTS pins versions: tests have those of .ci/constraints.txt, as CI has;
# `make test CONSTRAINTS=` in a fresh clone has the newest that pyproject.toml allows, as `make chat` has. Whether anybody
# has set it is asked before `export`, which defines it as empty.
TEST_CONSTRAINTS := $(if $(filter undefined,$(origin CONSTRAINTS)),.ci/constraints.txt,$(CONSTRAINTS))
export PYTHON TORCH TORCH_INDEX CONSTRAINTS
# Test processes side by side; each may start threads and servers of its own.
JOBS ?= 2
BIN := $(VENV)/bin
CSRC := $(shell find csrc -type f 2>/dev/null)
SOURCES := pyproject.toml CMakeLists.txt cmake/tiers.cmake $(CONSTRAINTS) $(CSRC)

.PHONY: chat serve test test-all coverage lint bench format sanitize families flags readme web clean help

help:
	@echo "make chat    chat with the bundled model (installs everything into $(VENV) first:"
	@echo "             5.6 GB with CUDA where there is an NVIDIA GPU, 1.2 GB without; TORCH=cpu or TORCH=cuda says which)"
	@echo "make serve   serve the bundled model over HTTP"
	@echo "make test    run the tests"
	@echo "make test-all  and all that is thinned there: whole products, long counts of random cases"
	@echo "make coverage  run the tests and print how much of each package they ran; lines are in build/coverage/html"
	@echo "make lint    ruff, clang-format, mypy --strict, import layers"
	@echo "make sanitize  the tests of the kernels with AddressSanitizer, UBSan and ThreadSanitizer"
	@echo "make bench   measure the native kernels on this machine"
	@echo "make families  write the list of families in docs/models.md from ktransformers/models/families.py"
	@echo "make flags   write the tables of flags in docs/server.md and docs/chat.md, and README.md's list of block types"
	@echo "make readme  write the figures in README.md and docs/benchmarks.md from benchmarks/results"
	@echo "make web     build the chat page of the server (needs node 20 and npm)"

chat: $(VENV)/.installed
	@$(BIN)/ktransformers chat $(ARGS)

serve: $(VENV)/.installed
	@exec $(BIN)/ktransformers serve $(ARGS)

# A test that hangs fails, and says where; the others go on.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20 \
	--timeout=600 --timeout-method=signal

test: $(VENV)/.installed-dev
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.installed-dev
	$(PYTEST) --exhaustive $(ARGS)

# What the tests ran, however they ended: the status is theirs.
coverage: $(VENV)/.installed-dev
	@mkdir -p build/coverage
	$(PYTEST) --cov --cov-report=json --cov-report=html $(ARGS); status=$$?; \
	$(BIN)/python tools/coverage_by_package.py build/coverage/coverage.json; exit $$status

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC) $(wildcard tests/kernels/cpu/tiers/*.cpp)
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	@$(BIN)/ktransformers bench operations $(ARGS)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC) $(wildcard tests/kernels/cpu/tiers/*.cpp)

sanitize: $(VENV)/.installed-dev
	tools/sanitize/run.sh $(BIN)/python address $(ARGS)
	tools/sanitize/run.sh $(BIN)/python thread $(ARGS)

families: $(VENV)/.installed
	$(BIN)/python -m docs.families

flags: $(VENV)/.installed
	$(BIN)/python -m docs.flag_tables

readme: $(VENV)/.installed
	$(BIN)/python -m benchmarks.readme

# The built page is committed: users need no node.
web:
	cd web && npm ci && npm run build

# Everything an install prints goes to stderr, so that `make -s chat` leaves stdout to the answers.
$(VENV)/.installed: $(SOURCES)
	@tools/install.sh $(VENV)
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) .ci/constraints.txt
	@CONSTRAINTS="$(TEST_CONSTRAINTS)" tools/install.sh $(VENV) dev
	@touch $(VENV)/.installed $@

clean:
	rm -rf build $(VENV)
