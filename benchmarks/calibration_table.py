# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The table of calibration.py: every variant beside its 16-bit model and the first of its kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.table import markdown


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over rows and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def calibration_table(result: dict[str, Any], of: str = "calibrated on") -> str:
    """Return a line for each variant: for each text the change of perplexity, and KL beside the first's.

    The first is the first variant of the same scheme and group size. All errors are standard errors over
    rows; that of a difference is taken over the differences between equal rows. ``of`` is the heading of the
    variants' names.
    """
    firsts: dict[tuple[str, int | None], dict[str, Any]] = {}
    lines = []
    for variant in result["variants"]:
        first = firsts.setdefault((variant["scheme"], variant["group_size"]), variant)
        line = [variant["name"]]
        for kind, rows in variant["rows"].items():
            pairs = zip(rows["nats"], result["reference_nats"][kind], strict=True)
            nats, nats_error = mean_and_error([a - b for a, b in pairs])
            kl, kl_error = mean_and_error(rows["kl"])
            pairs = zip(rows["kl"], first["rows"][kind]["kl"], strict=True)
            more, more_error = mean_and_error([a - b for a, b in pairs])
            against = "" if variant is first else f" ({more:+.4f} ± {more_error:.4f})"
            line += [
                f"{math.expm1(nats):+.1%} ± {math.exp(nats) * nats_error:.1%}",
                f"{kl:.4f} ± {kl_error:.4f}{against}",
            ]
        lines.append(line)
    header = [f"{kind}: {what}" for kind in result["reference_nats"] for what in ("perplexity", "KL, nats")]
    return markdown([of, *header], lines)
