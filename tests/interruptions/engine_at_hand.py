# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Imports what commands with an engine import, for the process that they are forked from."""

import importlib

from flexquant.measuring.engine import prepare_environment

prepare_environment()
for name in (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.llama",
    "flexquant.serving.worker.model",
    "matplotlib.pyplot",
):
    importlib.import_module(name)
