# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What fits INT8 weights to INT4: factors, wider steps, differences of four bits, and exceptions."""

import numpy as np
import pytest
import torch

from flexquant.checkpoint.nested import predict, unpack_nibbles
from flexquant.merge import nested_fit
from flexquant.merge.nested_fit import WIDTHS, encode, fit_block, fit_column, fit_rows, is_widened
from tests.unit.nested import exceptions_by_the_page


def differences(stored: torch.Tensor) -> torch.Tensor:
    return unpack_nibbles(stored).long() - 8


def test_factors_of_rows_and_columns_are_found_again():
    torch.manual_seed(0)
    weight4 = torch.randint(-8, 8, (40, 64)).double()
    row, column = torch.rand(40, 1).double() + 0.5, torch.rand(64).double() * 9 + 0.1
    weight8 = row * column * weight4
    found = fit_column(lambda: [(weight8[:25], weight4[:25]), (weight8[25:], weight4[25:])], 64)
    assert torch.allclose(found.double(), column / column.max(), rtol=1e-3)
    assert torch.allclose(fit_rows(weight8, weight4, found.double()), row[:, 0] * column.max(), rtol=1e-3)


def test_rows_and_columns_of_zeros_have_finite_factors():
    weight8, weight4 = (torch.randint(-8, 8, (6, 8)).double() for _ in range(2))
    weight4[1], weight4[:, 3], weight8[2], weight8[:, 5] = 0, 0, 0, 0
    column = fit_column(lambda: [(weight8, weight4)], 8)
    rows = fit_rows(weight8, weight4, column.double())
    assert column.isfinite().all() and (column > 0).all() and rows.isfinite().all() and rows[1] == 1
    nothing = torch.zeros(6, 8).double()
    assert fit_column(lambda: [(weight8, nothing)], 8).equal(torch.ones(8))


def test_a_row_that_predicts_too_much_is_shrunk_and_no_other():
    values = torch.tensor([[[-8.0, 7.0]], [[-8.0, 7.0]], [[0.0, 1.0]]])
    scale, column = torch.ones(3, 1, 1), torch.tensor([1.0, 2.0])
    shrunk = nested_fit.shrink_rows(torch.tensor([[9.0], [10.0], [torch.inf]]), values, scale, column)
    assert shrunk[0] == 9 and shrunk.isfinite().all()
    assert predict(values, scale, shrunk, column).abs().amax(1)[:2].tolist() == [126, 134]


@pytest.mark.parametrize(
    ("weight", "predicted", "difference"),
    [
        *((0, 7, -7), (0, 8, -8), (0, 9, -8), (7, 0, 7), (8, 0, 7), (-128, -125, -3)),
        *((-128, -134, 6), (-128, 134, -8), (127, 134, -7), (127, 120, 7)),
    ],
)
def test_a_difference_ends_at_four_bits(weight, predicted, difference):
    weight8 = torch.tensor([[-128, weight]], dtype=torch.int8)  # the first is the exception
    found, served = encode(weight8, torch.tensor([[134.0, predicted]]))
    assert differences(found["weight_difference"]).tolist() == [[-8, difference]]
    assert (found["weight_exception_input"].item(), found["weight_exception"].item()) == (0, -128)
    assert served.tolist() == [[-128, predicted + difference]]


@pytest.mark.parametrize("inputs", [2, 126, 128, 130, 256, 640])
@pytest.mark.parametrize("farthest", [8, 12, 300], ids=["filled up", "ties", "any"])
def test_exceptions_are_what_is_missed_by_most(inputs, farthest):
    random = np.random.default_rng(inputs)
    weight8 = random.integers(-128, 128, (40, inputs))
    predicted = np.clip(weight8 + random.integers(-farthest, farthest + 1, weight8.shape), -134, 134)
    wanted = weight8 - predicted
    missed = wanted - wanted.clip(-8, 7)
    expected = np.array([exceptions_by_the_page(row) for row in missed])
    int8, near = torch.from_numpy(weight8).to(torch.int8), torch.from_numpy(predicted.astype(np.float32))
    found, served = encode(int8, near)
    assert np.array_equal(found["weight_exception_input"].numpy(), expected)
    assert np.array_equal(found["weight_exception"].numpy(), np.take_along_axis(weight8, expected, 1))
    assert np.array_equal(differences(found["weight_difference"]).numpy(), wanted.clip(-8, 7))
    np.put_along_axis(missed, expected, 0, 1)
    assert np.array_equal(served.numpy(), weight8 - missed)


def test_a_row_out_of_reach_gets_the_steps_that_miss_least():
    """Weights are off the prediction by more and more from row to row."""
    random = np.random.default_rng(0)
    values = random.integers(-8, 8, (24, 256))
    off = random.normal(0, np.arange(24)[:, None], values.shape)
    weight8 = torch.from_numpy(np.clip(np.rint(7 * values + off), -128, 127)).to(torch.int8)
    scale8 = torch.rand(24, 1) + 0.1
    column, groups = torch.ones(256), torch.ones(24, 1, 1)
    given = weight8, scale8, torch.from_numpy(values).float()[:, None], groups, column
    found = fit_block(*given)
    alone = {width: fit_block(*given, widths=[width]) for width in WIDTHS}
    squared = []
    for width, fitted in alone.items():
        wanted = (weight8.double() / width).round()
        near = predict(given[2], groups, fitted.row, column)
        missed = (wanted - near).numpy() - (wanted - near).numpy().clip(-8, 7)
        np.put_along_axis(missed, np.array([exceptions_by_the_page(row) for row in missed]), 0, 1)
        squared.append((((wanted.numpy() - missed) * width - weight8.numpy()) ** 2).sum(1))
        assert fitted.missed.squared == pytest.approx(squared[-1].sum(), rel=1e-6)
    best = np.array(WIDTHS)[np.argmin(squared, axis=0)]
    assert best[0] == 1 and set(best) == set(WIDTHS)
    assert torch.allclose(found.scale, scale8 * torch.from_numpy(best).float()[:, None])
    assert found.missed.squared == pytest.approx(np.min(squared, axis=0).sum(), rel=1e-6)
    assert is_widened(scale8, found.scale) and not is_widened(scale8, found.scale * 1.01)


def test_every_difference_is_read_as_it_was_packed():
    every = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8))
    stored = nested_fit.pack_differences(every)
    assert stored.dtype == torch.uint8 and stored[0] == 0
    assert nested_fit.pack_differences(torch.tensor([[-7, -8]])) == 1
    assert torch.equal(differences(stored), every)
