# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""vLLM's V2 runner on a CPU: its Triton kernels run in Triton's interpreter.

It has to be chosen for a whole process, before vLLM is imported, with ``TRITON_INTERPRET=1`` in the
environment: vLLM then also takes Triton's kernels where a CPU's V1 runner has its own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

IS_CHOSEN = os.environ.get("TRITON_INTERPRET") == "1"


class Driver:
    """Says what Triton's own driver for CPUs says: it is never active unless chosen."""

    @staticmethod
    def is_active() -> bool:
        return False


def offer() -> None:
    """Let vLLM find a Triton for CPUs; call before vLLM is imported."""
    import triton.backends

    triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=Driver, compiler=None))
