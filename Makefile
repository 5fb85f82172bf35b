# Two commands do everything on a fresh machine: `make run` and `make test`.
# COUNTERD_BUILD=release|debug|quick|trace picks the build; each has its own environment. One at a time: they share the C.

PYTHON ?= python3
COUNTERD_BUILD ?= release
export COUNTERD_BUILD
ENGINE_BUILD := $(if $(filter release,$(COUNTERD_BUILD)),debug,$(COUNTERD_BUILD))
unexport PYTHONDONTWRITEBYTECODE  # pytest prepares each test once, then, and not in each process and run
VENV ?= $(if $(filter release,$(COUNTERD_BUILD)),.venv,.venv-$(COUNTERD_BUILD))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find src -name '*.py' -o -name '*.py[xi]' -o -name '*.pxd' -o -name '*.conf' -o -name '*.html')
CONFIG ?= conf/counterd.conf
TOOLS ?= dev
JOBS ?= 4
RUNS ?= 10
UPTIME ?= 5

CHAOS_SECONDS ?= 60
CHAOS_SEED ?= 1
FUZZ_SECONDS ?= 60
SIMULATE_STEPS ?= 2000000
SIMULATE_SEED ?= 1
SOAK_SECONDS ?= 600
MUTANTS ?= 200
MUTANTS_SEED ?= 1

XDIST := -n $(JOBS) --dist worksteal

CLANG ?= $(shell command -v clang || command -v clang-14)
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined

.PHONY: help setup run test test-part prove test-deps test-uptime test-hostile test-load lint docs clean
.PHONY: bench bench-peers bench-regress bench-baseline bench-smoke
.PHONY: chaos chaos-shared fuzz simulate soak model mutants asan cluster

help:
	@echo 'make setup   build counterd into $(VENV)'
	@echo 'make run     setup, then the daemon in the foreground with $(CONFIG) and its dashboard'
	@echo 'make test    the tests: those of the engine in .venv-debug, with assertions compiled in, then all others in $(VENV)'
	@echo '             JOBS=4 of them at a time, ARGS="tests/unit -x" some of them; JOBS=0 ARGS="FILE --pdb" to look inside'
	@echo 'make prove   before a release: all that is below and the tests that are too long for every change'
	@echo 'make test-deps   install what some of the tests need (Debian, Ubuntu; as root)'
	@echo 'make test-uptime   tests as if the machine had started UPTIME=5 seconds ago'
	@echo 'make test-hostile  tests with an odd environment, as root and as an ordinary user'
	@echo 'make test-load     the tests RUNS=10 times, while a busy loop takes each core'
	@echo 'make cluster a demonstration: three daemons share limits through a Redis Cluster, with a failover'
	@echo 'make lint    ruff, mypy, cython-lint'
	@echo 'make docs    write docs/api/ from the docstrings, man/ from --help and the configuration'
	@echo 'make clean   remove what the above made'
	@echo ''
	@echo 'make bench            the engine, ns a frame, and a round trip'
	@echo 'make bench-peers      counterd beside its peers: writes benchmarks/RESULTS.md, in most of an hour'
	@echo 'make bench-regress    fail if the engine got more than 10 % worse than benchmarks/baseline.json'
	@echo 'make bench-baseline   measure, and make that the baseline'
	@echo 'make bench-smoke      bench and bench-peers with tiny counts: do they still run?'
	@echo ''
	@echo 'docs/reliability.md tells what these prove:'
	@echo 'make chaos      a daemon, its clients, and everything that can happen to them; CHAOS_SECONDS=60 CHAOS_SEED=1'
	@echo 'make chaos-shared   daemons that share limits, while they, their Redis Cluster and the network fail; CHAOS_SECONDS CHAOS_SEED'
	@echo 'make simulate   the engine in simulated worlds, audited at every step; SIMULATE_STEPS=2000000 SIMULATE_SEED=1'
	@echo 'make fuzz       the protocols, what they are configured with, the clients, with sanitizers; FUZZ_SECONDS=60 of CPU each'
	@echo 'make asan       the tests, with sanitizers'
	@echo 'make soak       a steady load, and whether anything grows; SOAK_SECONDS=600'
	@echo 'make model      the formal model, every state of it'
	@echo 'make mutants    whether the tests notice small mistakes in the engine; MUTANTS=200 MUTANTS_SEED=1'

setup: $(VENV)/.tools-$(TOOLS)

$(VENV)/.ready:
	@PYTHON="$(PYTHON)" sh tools/preflight.sh
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'setuptools>=77' 'Cython>=3.1,<4'
	@find $(VENV)/lib -path '*/Cython/Includes/*' -exec touch -d 2000-01-01 {} +  # else the C of other environments looks old
	@touch $@

$(VENV)/.built: $(VENV)/.ready $(SOURCES)
	@echo 'building counterd into $(VENV): this takes a minute'
	@sh tools/stale.sh
	@$(PIP) --no-build-isolation '.[admin,bench,cli]'
	@touch $@

# In place of the last, not after it: each makes a wheel of its own.
$(VENV)/.tools-$(TOOLS): $(VENV)/.ready $(SOURCES)
	@sh tools/stale.sh
	$(PIP) --no-build-isolation '.[$(TOOLS)]'
	@touch $(VENV)/.built $@

run: $(VENV)/.built
	@echo 'dashboard: http://127.0.0.1:11216/   (unless admin.bind says otherwise)'
	@echo 'try: $(BIN)/counterctl top'
	@exec $(BIN)/counterd -c $(CONFIG) --set admin.enable=true $(ARGS)

# Both parts, each with its build; but tests that ARGS names are run with the build that was asked for.
test:
ifeq ($(filter tests% benchmarks%,$(ARGS)),)
	@$(MAKE) test-part PART=engine COUNTERD_BUILD=$(ENGINE_BUILD) TOOLS=test
	@$(MAKE) test-part PART=daemon
else
	@$(MAKE) test-part
endif

test-part: setup
	$(BIN)/python -m pytest $(XDIST) $(if $(PART),--part $(PART)) $(ARGS)

test-deps:
	@$(PYTHON) tests/kit/needs.py --install

test-uptime: setup
	sh tools/uptime.sh $(UPTIME) $(BIN)/python -m pytest $(XDIST) $(or $(ARGS),tests/unit tests/property tests/conformance)

test-hostile: setup
	bash tools/hostile.sh $(BIN)/python $(ARGS)

test-load: setup
	sh tools/repeat.sh $(RUNS) $(BIN)/python -m pytest $(XDIST) -q $(ARGS)

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	PATH=$(BIN):$$PATH $(BIN)/cython-lint src benchmarks

docs: setup
	$(BIN)/python tools/api.py
	$(BIN)/python tools/man.py

bench: setup
	$(BIN)/python -m pytest benchmarks $(ARGS)
	$(BIN)/python benchmarks/micro/ratios.py
	$(BIN)/python benchmarks/micro/expiry.py
	$(BIN)/python benchmarks/micro/waiters.py

bench-peers: setup
	$(BIN)/python benchmarks/peers/compare.py $(ARGS)

bench-smoke: setup
	$(BIN)/python -m pytest benchmarks -q --benchmark-disable
	$(BIN)/python benchmarks/micro/ratios.py --rounds 1
	$(BIN)/python benchmarks/micro/expiry.py --tokens 20000
	$(BIN)/python benchmarks/micro/waiters.py --waiters 20000
	$(BIN)/python benchmarks/peers/compare.py --smoke --out build/smoke/results
	$(BIN)/python benchmarks/load/tls.py --rounds 1 --seconds 0.01 --connections 10
	$(BIN)/python benchmarks/load/operations.py --smoke
	$(BIN)/python benchmarks/load/stops.py --smoke

bench-regress: setup
	$(BIN)/python benchmarks/regress.py

bench-baseline: setup
	$(BIN)/python benchmarks/regress.py --write

chaos: setup
	$(BIN)/python tests/chaos --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) $(ARGS)

chaos-shared: setup
	$(BIN)/python tests/drills/shared --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) $(ARGS)

simulate: setup
	$(BIN)/python tests/simulation --steps $(SIMULATE_STEPS) --seed $(SIMULATE_SEED) $(ARGS)

cluster: setup
	$(BIN)/python tests/drills/cluster.py $(ARGS)

soak: setup
	$(BIN)/python tests/drills/soak.py --seconds $(SOAK_SECONDS) $(ARGS)

prove: setup
	$(BIN)/python tools/prove.py $(ARGS)

model:
	$(PYTHON) tools/model.py $(ARGS)

asan:
	CFLAGS='$(SANITIZE)' $(MAKE) setup COUNTERD_BUILD=debug VENV=.venv-asan
	sh tools/asan.sh .venv-asan/bin/python build/asan $(ARGS)

.venv-fuzz/.built: $(SOURCES)
	@test -n "$(CLANG)" || { echo 'make fuzz needs clang; on Debian or Ubuntu: apt-get install clang' >&2; exit 1; }
	@PYTHON="$(PYTHON)" CC="$(CLANG)" sh tools/preflight.sh
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check \
		'setuptools>=77' 'Cython>=3.1,<4' 'atheris>=3,<4'
	COUNTERD_BUILD=debug CC='$(CLANG)' CFLAGS='$(SANITIZE) -fsanitize=fuzzer-no-link' \
		.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation .
	@touch $@

fuzz: .venv-fuzz/.built
	@.venv-fuzz/bin/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(ARGS)

mutants: setup
	$(BIN)/python tools/mutants.py --sample $(MUTANTS) --seed $(MUTANTS_SEED) $(ARGS)

clean:
	rm -rf .venv .venv-* build dist src/*.egg-info .coverage .hypothesis .benchmarks .*_cache
	find src -name '*.c' -delete
