# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose which rows to compare of matrices that do not write the KV cache: evenly spaced blocks of rows.

Every row of K and V is compared, since they decide whether a cache can be shared. The other matrices and the
token embeddings are most of a model, and the differences to be found in them (another basis, scales moved
between two matrices, other weights) change every row. So their rows form blocks of 16, and one block of every
k is compared: block number i if i mod k == ``turn`` mod k.

    k     1 for up to 255 rows, so that all are compared, and at most 16; so at least about 128 rows and a
          sixteenth of all are compared. With 128 rows the gain of a column is known to 2 % for INT4, and the
          median over all columns, which is compared, much better.
    turn  depends on the layer's number, so that k consecutive layers together compare all rows.

A difference beyond the bounds in `agreement` is found

    always      if it changes every row or every column; more than 16 (k - 1) consecutive rows, so 241 rows
                for k = 16; or the same rows in k consecutive layers
    by chance   if it changes m rows anywhere: one of them is compared with a probability of
                1 - (1 - 1/k)^m, for k = 16 a sixteenth for one row, 72 % for 20 rows and 95 % for 48

So the sample can miss that a few output channels of one matrix compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK_ROWS = 16
LEAST_ROWS = 128
LEAST_SHARE = 16
"""Least share of the rows that is compared, as its inverse."""


def sample_rows(count: int, turn: int, least: int = LEAST_ROWS) -> list[range]:
    """Return blocks of rows to compare among ``count`` rows; ``turn`` chooses which blocks.

    The blocks hold at least ``least`` rows and a sixteenth of all, give or take a block, or all rows.
    """
    every = max(1, min(LEAST_SHARE, count // least))
    starts = range(turn % every * BLOCK_ROWS, count, every * BLOCK_ROWS)
    return [range(start, min(start + BLOCK_ROWS, count)) for start in starts]


def row_numbers(blocks: Sequence[range]) -> torch.Tensor:
    """Return the row numbers in the blocks, int64 [rows]."""
    return torch.cat([torch.arange(block.start, block.stop) for block in blocks])
