# One command per intent; CI runs the same ones. Everything lives in .venv; `make clean` takes it away.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODE   ?= async
# Tests run so many at a time.
JOBS   ?= 6
SEEDS   ?= 1000
SEED    ?= 1
SHARDS  ?= 4
WORKERS ?= 6
READY  := $(VENV)/.ready
PROTO_VENV := .venv-proto
DOCS_VENV := .venv-docs
PROTO_TOOLS := grpcio-tools==1.72.2
PROTO_FILES := $(wildcard protos/ps_protocol/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup train test test-long test-late check fix docs metrics-page manifests proto proto-check bench chaos damage fuzz sim cluster clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1|/' | column -t -s '|'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "torch-ps needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	touch $@

setup: $(READY)  ## make .venv with pinned dependencies and this package

train: setup  ## train a small network on handwritten digits: 1 coordinator, 2 shards, 2 workers (MODE=async|ssp|sync)
	$(BIN)/ps-run --shards 2 --workers 2 --mode $(MODE) examples/digits.py

# Hundreds of processes import this package: byte code is kept also where the environment says not to.
test test-long test-late: export PYTHONDONTWRITEBYTECODE =

test: setup  ## run the tests, JOBS=6 at a time
	$(BIN)/python -m tests.support.compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

$(VENV)/.ray: $(READY)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]' && touch $@

test-long: export TEST_LENGTH = full
test-long: setup $(VENV)/.ray  ## the tests in full length, then the wheel in empty environments and the tests on every Python there is; says what it skipped
	$(BIN)/python -m tests.support.compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal
	tests/installed.sh --suite

test-late: export PYTHONPATH = $(CURDIR)/tests/late
test-late: export LATE_SEED = $(SEED)
test-late: setup  ## the tests with threads held up at random (SEED=1): finds those, and code, that count on being quick
	$(BIN)/python -m tests.support.compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check: setup proto-check  ## formatting, lint, types, import rules, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: setup  ## format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(PROTO_VENV)/.ready: Makefile
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(PROTO_TOOLS)' setuptools
	touch $@

$(DOCS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(DOCS_VENV)/.ready  ## build the site of the documentation in site/; fails where a link or a docstring is missing
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

metrics-page: setup  ## write docs/metrics.md from the definitions of metrics
	$(BIN)/python -m tests.support.metrics_page

manifests:  ## write deploy/k8s/rendered/ from the overlays (needs kubectl)
	deploy/k8s/render.sh

proto: $(PROTO_VENV)/.ready  ## generate the stubs from the .proto files
	$(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTO_FILES)

proto-check: $(PROTO_VENV)/.ready
	@rm -rf build/proto && mkdir -p build/proto
	@$(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iprotos --python_out=build/proto --pyi_out=build/proto --grpc_python_out=build/proto $(PROTO_FILES)
	@for f in build/proto/ps_protocol/v1/*; do cmp "$$f" "protos/ps_protocol/v1/$$(basename $$f)" || { echo "stubs differ from the .proto files: run 'make proto' and commit"; exit 1; }; done

bench: setup  ## measure on this machine; writes benchmarks/results/
	$(BIN)/python -m benchmarks

chaos: setup  ## train under random faults and check what is left: SEED=, MINUTES=30, EVERY=60 (seconds between kills), TRANSPORT=grpc
	$(BIN)/python -m chaos

damage: setup  ## flip bits in files of data directories, cut and delete them: each is noticed, or harmless (DAMAGES=2000, SEED=)
	$(BIN)/python -m tests.damage --damages $(or $(DAMAGES),2000) $(if $(SEED),--seed $(SEED))

fuzz: setup  ## send mutated messages to every role while a job trains beside them: MESSAGES=300000 (each), SEED=
	$(BIN)/python -m fuzz --messages $(or $(MESSAGES),300000) $(if $(SEED),--seed $(SEED))

sim: setup  ## simulate a cluster through faults, once per seed (SEEDS=1000 FROM=0 SHARDS=4 WORKERS=6 STEPS=6)
	$(BIN)/python -m simulation --seeds $(SEEDS) --from $(or $(FROM),0) --shards $(SHARDS) --workers $(WORKERS) --steps $(or $(STEPS),6)

cluster:  ## the same training in containers (needs docker compose; TLS=1, MODE=async|ssp|sync, DURABILITY=durable|snapshot|memory)
	deploy/up.sh

clean:  ## remove everything that was made
	rm -rf $(VENV) $(PROTO_VENV) $(DOCS_VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
