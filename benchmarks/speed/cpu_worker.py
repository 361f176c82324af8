# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""vLLM's CPU worker, for static checkpoints, with kernels that FlexQuant brings along.

Where vLLM's own are missing or wrong, a static checkpoint can be served at all only with FlexQuant's (W4A16
on CPUs without AVX512, rotated inputs). Where there are several, the second class takes those that FlexQuant
would choose.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.model_loader import base_loader
from vllm.v1.worker.cpu_worker import CPUWorker

from flexquant.serving.kernels.choice import DECODE_SIZES, choose_kernels
from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels
from flexquant.serving.worker.rotations import provide_rotations


class CPUWorkerWithKernels(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        provide_cpu_kernels()
        provide_rotations()
        super().load_model(*args, **kwargs)


class CPUWorkerWithChosenKernels(CPUWorkerWithKernels):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        initialize = base_loader.initialize_model

        def initialize_and_choose(*args: Any, **kwargs: Any) -> nn.Module:
            model = initialize(*args, **kwargs)
            choose_kernels({"static": model}, {"static": DECODE_SIZES})
            return model

        base_loader.initialize_model = initialize_and_choose
        try:
            super().load_model(*args, **kwargs)
        finally:
            base_loader.initialize_model = initialize
