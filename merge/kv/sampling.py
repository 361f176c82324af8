# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which rows are compared of what does not write the KV cache: blocks of rows, evenly spaced.

K and V decide whether a cache can be shared, and every row of them is compared. The other matrices and the
token embeddings are most of a model, and what is looked for in them (another basis, scales moved between
two matrices, other weights) changes every row. So their rows are counted in blocks of 16, and of k blocks one
is compared: those whose number leaves ``turn`` modulo k.

    k     1 up to 255 rows, so that all are compared, and at most 16: never fewer than about 128 rows nor than
          a sixteenth. From 128 rows the gain of a column is known to 2 % for INT4, and the median of all
          columns, which is compared, much better.
    turn  follows the layer's number, so that of k layers in a row each compares other rows, together all.

What differs by more than the bounds in `agreement` is found

    always      where it changes every row or every column; more than 16 (k - 1) rows that follow one another,
                so 241 rows for k = 16; or the same rows in k layers that follow one another
    by chance   where it changes m rows anywhere: one of them is compared with a probability of
                1 - (1 - 1/k)^m, for k = 16 a sixteenth for one row, 72 % for 20 rows and 95 % for 48

What can be missed is that a few output channels of one matrix compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK_ROWS = 16
LEAST_ROWS = 128
LEAST_SHARE = 16
"""Of so many rows at least one is compared."""


def sample_rows(count: int, turn: int, least: int = LEAST_ROWS) -> list[range]:
    """Return the rows to compare of ``count``, in blocks; ``turn`` chooses which.

    They are at least ``least`` rows and at least a sixteenth of all, give or take a block, or all of them.
    """
    every = max(1, min(LEAST_SHARE, count // least))
    starts = range(turn % every * BLOCK_ROWS, count, every * BLOCK_ROWS)
    return [range(start, min(start + BLOCK_ROWS, count)) for start in starts]


def row_numbers(blocks: Sequence[range]) -> torch.Tensor:
    """Return the numbers of the rows in blocks, int64 [rows]."""
    return torch.cat([torch.arange(block.start, block.stop) for block in blocks])
