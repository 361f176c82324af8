# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Values of options: what they come to, and that no text ends in anything but a sentence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import pytest

from flexquant.cli._arguments import (
    parse_count,
    parse_counts,
    parse_number,
    parse_percent,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500mb", 500 * 10**6),
        ("2 GiB", 2 * 1024**3),
        ("1.5K", 1500),
        ("3TiB", 3 * 1024**4),
        ("1.5MiB", 3 * 1024**2 // 2),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


MANY = "1" * 400
BAD = ["", "nan", "inf", "-inf", "1e999", "-1", "0x5", MANY, "1" * 5000, f"0.{'0' * 400}1", "five"]


@pytest.mark.parametrize("text", [*BAD, f"{MANY}GB", f"{MANY}.5TiB", f"{MANY}%", f"3,{MANY}", "nan%", "1GB1"])
@pytest.mark.parametrize("parse", [parse_count, parse_counts, parse_size, parse_number, parse_percent])
def test_no_text_is_a_number_that_is_none(parse: Callable[[str], object], text: str) -> None:
    """Whatever is taken is finite."""
    try:
        found = parse(text)
    except argparse.ArgumentTypeError as e:
        assert "is not a" in str(e) or "the list is empty" in str(e)
        return
    for number in found if isinstance(found, tuple) else [found]:
        assert isinstance(number, int | float) and math.isfinite(number) and abs(number) < 1e30


def test_shares_and_numbers() -> None:
    assert (parse_share("1"), parse_share("0.25"), parse_number("-2.5")) == (1, 0.25, -2.5)
    for text in ("0", "1.1", "nan", "-0.5", "half"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a share above 0"):
            parse_share(text)
    with pytest.raises(argparse.ArgumentTypeError, match="'nan' is not a number such as 0.1"):
        parse_number("nan")
