# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check that the sources' tensors have the shapes that their configs ask for."""

from __future__ import annotations

from collections.abc import Sequence

from flexquant.checkpoint.known_models import Shapes, decoder_shapes
from flexquant.checkpoint.module_names import decoder_roots
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError


def check_shapes(sources: Sequence[Source], shapes: Shapes) -> None:
    """Raise FlexQuantError, naming the tensor, if a shape does not fit the model or the quantisation scheme.

    ``shapes`` are the unquantised parameters' shapes, which all sources share. Only headers are read.
    """
    from flexquant.merge.kv.dequantize import WeightReader  # torch, which verifying does without

    for source in sources:
        WeightReader(source).check_linears()
    first = sources[0]
    expected = decoder_shapes(first.config, str(first.folder / "config.json"))
    for root in decoder_roots(shapes):
        for name, shape in expected.items():
            if shapes.get(root + name, shape) != shape:
                raise FlexQuantError(
                    f"'{root}{name}' has shape {list(shapes[root + name])} in {first.folder}, but the model "
                    f"that its config.json describes has {list(shape)} there; fetch or quantise it again"
                )
