# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The offline side: from quantised checkpoints to one merged checkpoint and back, without vLLM.

    from flexquant.merge import merge_checkpoints

    merge_checkpoints({"w8a8": "model-w8a8", "w4a16": "model-w4a16"}, "model-merged")

`merging` is the way through: `source` (open the inputs), `plan` (compare them, find what they share),
`kv_compat` (may they share a KV cache?), `writer` (stream the shards), `staging` (all or nothing), `card`
(with `origins`: how each variant was made).
`verify`, `split` and `report` start from the result, opened by `merged`.
"""

from flexquant.merge.merging import merge_checkpoints
from flexquant.merge.split import split_checkpoint
from flexquant.merge.verify import verify_checkpoint

__all__ = ["merge_checkpoints", "split_checkpoint", "verify_checkpoint"]
