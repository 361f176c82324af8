# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The offline side: from quantised checkpoints to one merged checkpoint and back, without vLLM.

    from flexquant.merge import merge_checkpoints

    merge_checkpoints({"w8a8": "model-w8a8", "w4a16": "model-w4a16"}, "model-merged")

This folder is imported as `flexquant.merge`. `merging` is the way through: `merge_plan` (compare the sources,
find what they share), `kv` (may they share one KV cache?), `card` (with `origins`: how each was made).
Folders are opened and written by `flexquant.checkpoint`. `verify` and `split` start from the result.
`conversion` comes before: it makes sources of what others quantised.
"""

from flexquant.merge.conversion import convert_checkpoint
from flexquant.merge.merging import merge_checkpoints
from flexquant.merge.split import split_checkpoint
from flexquant.merge.verify import verify_checkpoint

__all__ = ["convert_checkpoint", "merge_checkpoints", "split_checkpoint", "verify_checkpoint"]
