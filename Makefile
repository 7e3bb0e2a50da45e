# One gate for people and CI: make check && make test. `make help` lists everything.
PYTHON ?= python3
CONFIG ?= config.yaml
VENV := .venv
BIN := $(VENV)/bin
# Everything under the virtual environment is made by the stamps below; delete .venv to start over.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Processes do not compile what others have imported: each of the tests' servers imports some 300 modules of ours.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help serve test test-fast test-all test-slow test-wheel wheels test-clients test-speculation fuzz check check-cuda format hooks kernels model bench-cpu faults soak gpu-bench gpu-bench-e2e gpu-test
.PHONY: dashboards dashboards-check page-vendor page-screenshots deploy-check serve-ray test-ray test-routers clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# Where there is an NVIDIA GPU: FlashInfer, and nvcc from NVIDIA's wheels if the machine has none of CUDA 13. Its device is asked for,
# which containers see that were given it; /proc shows the host's driver to all. nvidia-smi: WSL has no such device.
GPU := $(or $(wildcard /dev/nvidiactl),$(shell nvidia-smi -L 2>/dev/null))
comma := ,
CUDA_EXTRAS = cuda$(if $(shell $(PYTHON) deploy/machine.py nvcc),,$(comma)build-cuda)

# venv without ensurepip, so that Debian's python3 without python3-venv is enough; pip installs itself into it.
$(VENV)/pyvenv.cfg:
	@$(PYTHON) deploy/machine.py check
	@$(if $(GPU),$(PYTHON) deploy/machine.py gpu)
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet pip

# Both distributions of this tree at once: the server takes the kernels from here, not from an index.
TREE := --editable ./nf4_kernels --editable

# Without a GPU torch comes from its own CPU index, or from TORCH_INDEX, if that answers.
$(VENV)/.serve: pyproject.toml nf4_kernels/pyproject.toml | $(VENV)/pyvenv.cfg
	@echo "== installing what the server needs (once; torch is the large one)"
	$(BIN)/python -m pip install $(if $(GPU),,$$($(PYTHON) deploy/machine.py torch-index $(TORCH_INDEX))) $(TREE) .
	@touch $@

$(VENV)/.cuda: pyproject.toml $(VENV)/.serve
	@echo "== installing what a GPU needs: $(CUDA_EXTRAS) (once)"
	@! $(BIN)/python -m pip show torch | grep -q '^Version: .*+cpu' || $(BIN)/python -m pip uninstall --yes torch
	$(BIN)/python -m pip install $(TREE) '.[$(CUDA_EXTRAS)]'
	@touch $@

$(VENV)/.ray: pyproject.toml $(VENV)/.serve
	@echo "== installing Ray Serve (once)"
	$(BIN)/python -m pip install --quiet $(TREE) '.[ray]'
	@touch $@

# Run as a file: the package would import torch.
BUILD := $(BIN)/python nf4_kernels/build.py

READY := $(VENV)/.serve $(if $(GPU),$(VENV)/.cuda)

$(VENV)/.dev: pyproject.toml $(VENV)/.serve
	@echo "== installing what tests and checks need"
	$(BIN)/python -m pip install --quiet $(TREE) '.[dev]'
	@touch $@

# helm renders the chart that tests look at; elsewhere than on Linux x86_64 a helm that is installed will do.
HELM := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),$(BIN)/helm)
$(BIN)/helm: tests/deploy/helm.txt $(VENV)/.dev
	@echo "== fetching helm"
	@$(BIN)/python -m tests.deploy.helm $@

serve: $(READY) ## set everything up and serve the model of config.yaml on 127.0.0.1:8000 (PORT=, CONFIG=)
	@$(BUILD) --native
	@exec $(BIN)/python -m server --config $(CONFIG) $(if $(PORT),--port $(PORT))

# Replicas that do not yield to everything else, and a proxy that asks the ingress by gRPC (docs/scaling.md).
RAY_ENV := RAY_worker_niceness=0 RAY_SERVE_USE_GRPC_BY_DEFAULT=1 RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0

serve-ray: $(READY) $(VENV)/.ray ## two replicas of the embedded model on Ray Serve, on 127.0.0.1:8000 (RAY_CONFIG=)
	@$(BUILD) --native
	@$(RAY_ENV) $(BIN)/serve run $(or $(RAY_CONFIG),deploy/ray/app.yaml)

kernels: $(READY) ## compile the kernel libraries, CUDA's for this machine's GPUs (NF4_CUDA_ARCHS)
	@$(BUILD) --native

model: $(VENV)/.serve ## fetch and convert the embedded model
	@$(BIN)/python -m server.checkpoint

# Two files of tests side by side; one after another where there is a GPU, which kernels of two processes would share.
TEST_WORKERS := $(if $(GPU),0,2)

PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

test-fast: $(VENV)/.dev kernels ## the tests without a server, a model or a compiler, in about a minute (PYTEST_ARGS=)
	$(PYTEST) -m 'not process and not rest and not slow and not gpu' $(PYTEST_ARGS)

test: $(VENV)/.dev kernels model ## run the tests, with all the set-up they need (PYTEST_ARGS=)
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(VENV)/.dev $(HELM) kernels model ## the rest of the tests, which cost much for what those of test show (PYTEST_ARGS=)
	$(PYTEST) -m 'rest and not slow' $(PYTEST_ARGS)

test-slow: $(VENV)/.dev $(HELM) kernels model ## the tests that take minutes each, before a release (PYTEST_ARGS=)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-wheel: $(VENV)/.dev model ## build both wheels, install them in a new environment and serve; twine check
	$(BIN)/python -m pip install --quiet twine
	$(BIN)/python -m pytest -m 'slow or not slow' tests/test_wheel.py tests/nf4_kernels/test_package.py

wheels: $(VENV)/.dev ## a wheel of the kernels with the compiled CPU library, into dist/; with the CUDA library, too: CUDA=1
	$(BIN)/python -m deploy.wheels $(if $(CUDA),--cuda) dist

test-clients: $(VENV)/.dev kernels model ## coding agents, SDKs and others on their defaults against the server (CLIENTS=)
	$(BIN)/python -m tests.clients.run $(CLIENTS)

test-ray: $(VENV)/.dev $(VENV)/.ray kernels model ## two replicas on a real Ray: streams, a replica that is killed, one that cannot start
	$(RAY_ENV) $(BIN)/python -m pytest -m 'not slow' tests/ray_serve/replicas.py
	RAY_worker_niceness=0 RAY_health_check_period_ms=1000 $(BIN)/python -m pytest -m 'not slow' tests/ray_serve/cluster.py

test-routers: $(VENV)/.dev kernels model ## SGLang's router over two servers
	$(BIN)/python -m pip install --quiet 'sglang-router>=0.3.2'
	$(BIN)/python -m pytest -m 'not slow' tests/deploy/sglang_router.py

test-speculation: $(VENV)/.dev kernels model ## 500 random requests for each proposer have the same answers with speculation and without (REQUESTS=)
	SPECULATION_REQUESTS=$(or $(REQUESTS),500) $(BIN)/python -m pytest -m slow tests/engine/speculation/test_speculation.py --timeout 3000

fuzz: $(VENV)/.dev kernels model ## schemathesis with 2000 cases over the server's own OpenAPI document (FUZZ_CASES=)
	FUZZ_CASES=$(or $(FUZZ_CASES),2000) $(BIN)/python -m pytest -m 'not slow' tests/api/hostile/test_schemathesis.py

check: $(VENV)/.dev ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check-cuda: $(VENV)/.serve ## compile every CUDA source for one GPU target, hardly optimized, to find errors (needs nvcc)
	@$(BUILD) --check-cuda

format: $(VENV)/.dev ## format the Python sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: $(VENV)/.dev ## run the checks before every commit (pre-commit)
	$(BIN)/pre-commit install

bench-cpu: $(VENV)/.dev kernels model ## CPU speed beside transformers + bitsandbytes, into bench/results/
	$(BIN)/python -m bench.cpu

faults: $(VENV)/.dev kernels model ## overload, killed engines and SIGTERM under load, minutes each, into bench/results/
	$(BIN)/python -m bench.faults

soak: $(VENV)/.dev kernels model ## 20 minutes of mixed load: nothing may leak (SOAK_ARGS=)
	$(BIN)/python -m bench.soak $(SOAK_ARGS)

gpu-test: kernels ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu tests

gpu-bench: kernels ## kernel speed beside bitsandbytes and bf16 on this GPU, into bench/results/
	$(BIN)/python -m bench.kernels

gpu-bench-e2e: kernels ## whole models beside transformers on this GPU, into bench/results/ (BENCH_ARGS=)
	$(BIN)/python -m bench.e2e --peers 1,8,32 --http 1,4,16 $(BENCH_ARGS)

dashboards: $(VENV)/.dev ## write the Grafana dashboards' JSON anew from dashboards/*.py
	$(BIN)/python -m dashboards

dashboards-check: $(VENV)/.dev kernels model ## ask every panel's query of a Prometheus that scrapes a loaded server (PROMETHEUS=)
	$(BIN)/python -m dashboards.check $(PROMETHEUS)

page-vendor: ## fetch the chat page's libraries from npm, as server/api/static/vendor/pins.json names them
	$(PYTHON) -m tests.api.pages.vendored

page-screenshots: $(VENV)/.dev kernels model ## take the chat page's picture in docs/ anew (needs Chromium)
	$(BIN)/python -m tests.api.pages.screenshots

deploy-check: $(VENV)/.dev $(HELM) ## helm lint, and every object of the Helm chart against Kubernetes' schemas
	$(BIN)/python -m pytest -m 'not slow' tests/deploy

clean: ## remove what was built (not the virtual environment, not the model)
	rm -rf nf4_kernels/lib nf4_kernels/build build *.egg-info nf4_kernels/*.egg-info .mypy_cache .ruff_cache .pytest_cache
