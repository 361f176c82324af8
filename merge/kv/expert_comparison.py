# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare a layer's routed experts in two variants, by tensor name: transformers fuses their matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor, same_bytes
from flexquant.merge.kv.agreement import OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN, MatrixDistance, judge_matrices
from flexquant.merge.kv.all_else import ARITHMETIC, ROUNDING, excess
from flexquant.merge.kv.dequantize import FLOAT_DTYPES
from flexquant.merge.kv.sampling import row_numbers, sample_rows
from flexquant.merge.kv.scaled_rows import MatrixSums, sum_products
from flexquant.merge.kv.variant_weights import Experts, VariantWeights

DOWN_AND_UP = {"down_proj": "up_proj", "w2": "w3"}
"""Down projection -> up projection; the columns of the first may undo a factor of the second's rows."""
LEAST_ROWS = 96
"""Least rows compared of an expert's gate or up projection; fewer than elsewhere, as experts are many."""

Weights = tuple[VariantWeights, VariantWeights]
Columns = tuple[torch.Tensor, torch.Tensor]
"""Factors of a matrix's columns in the variant and in the reference, [in] each."""


def compare_experts(
    weights: Weights, experts: tuple[Experts, Experts], turn: int, given: Columns
) -> Iterator[tuple[str, tuple[str, str], MatrixDistance]]:
    """Yield for each matrix its name below the experts, its two modules, and how they agree.

    ``given`` are factors of the experts' inputs; ``turn`` chooses the sample of rows.
    """
    for number, matrices in sorted(experts[1].items()):
        pairs = {name: (experts[0][number][name], module) for name, module in matrices.items()}
        for name, modules in pairs.items():
            up = pairs.get(DOWN_AND_UP.get(name, ""))
            if name in DOWN_AND_UP:
                agreement = _compare_down(weights, modules, up, turn, given)
            else:
                agreement = _judge(weights, modules, turn, given, LEAST_ROWS)
            yield f"{number}.{name}", modules, agreement
        turn += 1


def equal_but_for_columns(a: TensorRef, b: TensorRef, factors: torch.Tensor | None) -> bool:
    """Whether two tensors [experts, out, in] or [experts, in, out] are equal but for ``factors`` [in].

    Without factors, or if all factors are 1, the bytes have to be equal.
    """
    if factors is None or bool(((factors - 1).abs() < ARITHMETIC).all()):
        return same_bytes(a, b)
    if a.shape != b.shape or a.dtype not in FLOAT_DTYPES or b.dtype not in FLOAT_DTYPES:
        return False
    if len(factors) not in a.shape[1:]:
        return False
    last = a.shape[-1] == len(factors)
    rounding = 2.0 ** -min(FLOAT_DTYPES[a.dtype], FLOAT_DTYPES[b.dtype])
    for expert in range(a.shape[0]):
        x, y = (load_tensor(ref, [range(expert, expert + 1)]).float() for ref in (a, b))
        x *= factors if last else factors[:, None]
        if excess(x, y, rounding * y.abs() / ROUNDING) > 1:
            return False
    return True


def _compare_down(
    weights: Weights, modules: tuple[str, str], up: tuple[str, str] | None, turn: int, given: Columns
) -> MatrixDistance:
    """Compare down projections; if they disagree, again with the gains of the rows of ``up`` undone."""
    ones = torch.ones(weights[1].reader.shape(modules[1])[1], dtype=torch.float32)
    agreement = _judge(weights, modules, turn, (ones, ones))
    if agreement.agrees or up is None:
        return agreement
    gains = _sums(weights, up, [range(len(ones))], given).rows.gains().float()
    return _judge(weights, modules, turn, (gains, ones))


def _judge(
    weights: Weights, modules: tuple[str, str], turn: int, columns: Columns, least: int | None = None
) -> MatrixDistance:
    count = weights[1].reader.shape(modules[1])[0]
    rows = sample_rows(count, turn) if least is None else sample_rows(count, turn, least)
    sums = _sums(weights, modules, rows, columns)
    return judge_matrices(sums, None, OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN, row_numbers(rows))


def _sums(weights: Weights, modules: tuple[str, str], rows: list[range], columns: Columns) -> MatrixSums:
    a, b = (of.matrix(module, rows, c) for of, module, c in zip(weights, modules, columns, strict=True))
    return sum_products(a, b)
