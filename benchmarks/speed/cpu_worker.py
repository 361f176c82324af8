# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""vLLM's CPU worker with the kernels that FlexQuant brings along where vLLM's own are missing or wrong.

Static checkpoints are served with it on a CPU, so that they and FlexQuant are compared on equal kernels, and
can be served at all where vLLM has no W4A16 kernel (CPUs without AVX512).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from flexquant.serving.cpu.kernels import provide_cpu_kernels


class CPUWorkerWithKernels(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        provide_cpu_kernels()
        super().load_model(*args, **kwargs)
