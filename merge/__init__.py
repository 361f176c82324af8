# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Turn quantised checkpoints into one merged checkpoint, and back. Nothing here needs vLLM.

    from flexquant.merge import merge_checkpoints

    merge_checkpoints({"w8a8": "model-w8a8", "w4a16": "model-w4a16"}, "model-merged")

This folder is imported as `flexquant.merge`. README.md says which module does what.
"""

from flexquant.merge.merging import merge_checkpoints
from flexquant.merge.split_verify import convert_checkpoint, split_checkpoint, verify_checkpoint

__all__ = ["convert_checkpoint", "merge_checkpoints", "split_checkpoint", "verify_checkpoint"]
