# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What vLLM's workers can be asked by name (``collective_rpc``), beside what vLLM lets them be asked."""

from __future__ import annotations

from typing import Any


class FlexQuantWorker:
    """vLLM makes it a base class of its worker (``--worker-extension-cls``)."""

    def flexquant_status(self: Any) -> dict[str, Any]:
        """Return what this rank serves and has counted, as :meth:`FlexQuantForCausalLM.status` does."""
        return self.get_model().status()
