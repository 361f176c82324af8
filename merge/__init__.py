# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Turn quantised checkpoints into one merged checkpoint, and back. Nothing here needs vLLM.

    from flexquant.merge import merge_checkpoints

    merge_checkpoints({"w8a8": "model-w8a8", "w4a16": "model-w4a16"}, "model-merged")

This folder is imported as `flexquant.merge`. `merging` runs the steps of a merge: `merge_plan` compares the
sources and finds the tensors that they share, `kv` decides whether they can share one KV cache, and `card`
writes the model card. `flexquant.checkpoint` reads and writes the folders. `verify` and `split` read a merged
checkpoint. `conversion` prepares AWQ and GPTQ checkpoints for merging.
"""

from flexquant.merge.conversion import convert_checkpoint
from flexquant.merge.merging import merge_checkpoints
from flexquant.merge.split import split_checkpoint
from flexquant.merge.verify import verify_checkpoint

__all__ = ["convert_checkpoint", "merge_checkpoints", "split_checkpoint", "verify_checkpoint"]
