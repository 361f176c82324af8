# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make figures that are drawn into files, without a display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


class MatplotlibMissing(FlexQuantError):
    """There is no matplotlib to draw a figure with."""


def new_figure(width: float, height: float) -> tuple[Figure, FigureCanvasAgg]:
    """Return an empty figure, sizes in inches, and its canvas; raise MatplotlibMissing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MatplotlibMissing(
            'plots need matplotlib; install it with: pip install "flexquant[eval]"'
        ) from e
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, FigureCanvasAgg(figure)
