# make demo, make test: each sets everything up on a fresh machine, then does its job.
PYTHON ?= python3
BENCH ?=
recipe ?=
PYTEST_ARGS ?=
RUN ?= runs/demo
SECONDS ?= 600

GPU ?=
FLASHINFER ?=
TORCH_CUDA ?= 13
TORCH_INDEX ?=

BIN := .venv/bin
WITH_GPU := $(filter 1 yes true,$(GPU))
WITH_FLASHINFER := $(filter 1 yes true,$(FLASHINFER))
# A CPU set-up does not count as one for a GPU; the other way round it does.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.setup-done
SGLANG := .sglang
DEMO_ENGINE := $(if $(wildcard $(VLLM_STAMP)),engine=vllm engine.python=$(VLLM)/bin/python)
STAMP := .venv/.setup-done$(if $(WITH_GPU),-gpu$(TORCH_CUDA))$(if $(WITH_FLASHINFER),-flashinfer)
comma := ,
EXTRAS := dev$(if $(WITH_FLASHINFER),$(comma)gpu)

.PHONY: help setup demo test interop browser picture lint format types bench load clean

help:
	@echo "make demo     a head for a small real model, measured and exported (15 minutes, two cores)"
	@echo "make demo recipe=long   the serious head (two hours); goes on where it was interrupted"
	@echo "make test     all tests that need no GPU"
	@echo "make interop  .venv-vllm with vLLM for CPUs, .sglang; the tests that serve an exported head in it"
	@echo "make browser  the report's tests in a headless Chromium, which has to be there"
	@echo "make picture  docs/report.png, from the report of RUN (runs/demo)"
	@echo "make lint     ruff: rules and format; spelling"
	@echo "make types    mypy"
	@echo "make format   rewrite the files as 'make lint' wants them"
	@echo "make bench    benchmarks; BENCH=name for one"
	@echo "make load     random traffic through every schedule, SECONDS=600 long: aborts, too few pages, memory"
	@echo "make setup    .venv with the pinned versions; the others do this by themselves"
	@echo "make setup GPU=1   the same for NVIDIA devices (driver 580.65.06 or newer); FLASHINFER=1 adds FlashInfer;"
	@echo "              TORCH_CUDA=12 TORCH_INDEX=URL take another CUDA's build of torch from another index"
	@echo "make clean    remove .venv, .venv-vllm, .sglang and caches; runs/ stays"
	@echo "PYTHON=python3.12 make ...   another interpreter (3.11 or newer)"

setup: $(STAMP)

# torch first: DeepSpeed looks for it while it is built. The demo's packages bring data only, and of
# FlashInfer the tests read the signatures; most would drag in heavy dependencies, hence --no-deps.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: PYTHON=python3.11 make setup" >&2; exit 1; }
	$(if $(WITH_GPU),$(PYTHON) -m mtp_train.doctor.driver $(TORCH_CUDA))
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(if $(WITH_GPU),$(BIN)/python -m mtp_train.doctor.driver --torch)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -c 'import tomllib; e = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*e["demo"], *e["signatures"], sep="\n")' \
		| $(BIN)/pip install --quiet --no-deps -r /dev/stdin
	@if [ -f tests/fixtures/fetch_tokenizers.py ]; then \
		$(BIN)/python tests/fixtures/fetch_tokenizers.py || \
		echo "template tests of other model families will be skipped" >&2; fi
	@touch .venv/.setup-done $@

demo: setup
	$(BIN)/mtp demo $(if $(recipe),recipe=$(recipe)) $(DEMO_ENGINE)

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# An environment of its own: vLLM pins other versions than ours. See constraints-vllm.txt.
$(VLLM_STAMP): constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --quiet -c constraints-vllm.txt torch
	$(VLLM)/bin/pip install --quiet --no-deps -r constraints-vllm.txt
	@touch $@

# Of SGLang the tests read heads with its own loader; nothing of it is computed. Its sources, and the one package
# that they import and vLLM's environment lacks.
$(SGLANG)/.setup-done: Makefile
	rm -rf $(SGLANG)
	@$(BIN)/pip install --quiet --no-deps --target $(SGLANG) sglang==0.5.23 orjson==3.13.0 || \
		{ mkdir -p $(SGLANG); echo "tests of SGLang's loader will be skipped" >&2; }
	@touch $@

interop: setup $(VLLM_STAMP) $(SGLANG)/.setup-done
	$(BIN)/python -m pytest -m interop tests/interop $(PYTEST_ARGS)

browser: setup
	$(BIN)/python -m pytest -m browser tests/browser

picture: setup
	$(BIN)/mtp report run.root=$(dir $(RUN)) run.name=$(notdir $(RUN))
	$(BIN)/python -m tests.browser.picture $(RUN)/report.html docs/report.png

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files -z | xargs -0 $(BIN)/codespell

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m tests.bench $(BENCH)

load: setup
	$(BIN)/python -m tests.load --seconds $(SECONDS)

clean:
	rm -rf .venv .venv-vllm .sglang .mypy_cache .ruff_cache .pytest_cache .hypothesis
