# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Turn quantised checkpoints into a merged one, and back, without vLLM. Imported as `flexquant.merge`."""

from flexquant.merge.merging import merge_checkpoints
from flexquant.merge.split_verify import convert_checkpoint, split_checkpoint, verify_checkpoint

__all__ = ["convert_checkpoint", "merge_checkpoints", "split_checkpoint", "verify_checkpoint"]
