# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve several quantised variants of an LLM over one KV cache with vLLM, with a precision for every pass."""

import logging
import sys

__version__ = "0.2.0"


def register() -> None:
    """Register merged checkpoints with vLLM; this is the ``vllm.general_plugins`` entry point.

    vLLM calls this in each of its processes, for every model, possibly more than once. It therefore imports
    no model code, does nothing in a process without vLLM, and never raises: a failure is logged and leaves
    vLLM unchanged.
    """
    if "vllm" not in sys.modules:
        return
    try:
        from flexquant.serving.registration import register_with_vllm

        register_with_vllm()
    except Exception:
        logging.getLogger("vllm.flexquant").exception(
            "FlexQuant could not register with this vLLM; merged checkpoints cannot be served"
        )
