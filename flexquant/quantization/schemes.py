# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make compressed-tensors' schemes from a recipe's arguments, with the group sizes that a recipe chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

GROUP_SIZES = (128, 64, 32)


def choose_group_size(input_features: Mapping[str, int], sizes: Sequence[int] = GROUP_SIZES) -> int:
    """Return the first of ``sizes`` that divides the input features of every linear.

    Raises FlexQuantError, naming a linear, if none does.
    """
    for size in sizes:
        if all(k % size == 0 for k in input_features.values()):
            return size
    name, k = next(
        (name, k) for name, k in input_features.items() if k % sizes[-1] or all(k % size for size in sizes)
    )
    raise FlexQuantError(
        f"{name} has {k} input features, which none of the group sizes {', '.join(map(str, sizes))} divides; "
        "add a smaller one to group_size, or choose a scheme without groups, such as W8A8"
    )


def quantization_groups(arguments: JsonObject) -> dict[str, QuantizationScheme]:
    """Return group -> scheme from the arguments of a quantising modifier."""
    from compressed_tensors.quantization import QuantizationScheme

    size = arguments.get("group_size")
    size = size if isinstance(size, int) else None
    if "config_groups" not in arguments:
        schemes = schemes_by_name(arguments).items()
        return {f"group_{i}": preset_scheme(name, list(ts), size) for i, (name, ts) in enumerate(schemes)}
    try:
        groups = {
            name: QuantizationScheme.model_validate(group)
            for name, group in arguments["config_groups"].items()
        }
    except ValueError as e:
        raise FlexQuantError(f"config_groups is not what compressed-tensors reads ({e}); correct it") from e
    for group in groups.values():
        _set_group_size(group, size)
    return groups


def schemes_by_name(arguments: JsonObject) -> dict[str, list[str]]:
    """Return preset -> targets from the arguments of a quantising modifier."""
    scheme = arguments["scheme"]
    return scheme if isinstance(scheme, dict) else {scheme: arguments.get("targets", ["Linear"])}


def preset_scheme(name: str, targets: list[str], group_size: int | None = None) -> QuantizationScheme:
    """Return a preset of compressed-tensors with this group size; raise FlexQuantError for unknown names."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    try:
        scheme = preset_name_to_scheme(name, targets)
    except KeyError as e:
        raise FlexQuantError(
            f"'{name}' is no scheme of compressed-tensors; choose among {', '.join(PRESET_SCHEMES)}"
        ) from e
    _set_group_size(scheme, group_size)
    return scheme


def is_grouped(scheme: QuantizationScheme) -> bool:
    """Whether a scheme has a weight scale for each group of input features."""
    return scheme.weights is not None and scheme.weights.strategy == "group"


def is_scaled_by_row(scheme: QuantizationScheme) -> bool:
    """Whether every output channel has weight scales of its own."""
    return scheme.weights is not None and scheme.weights.strategy in ("group", "channel")


def _set_group_size(scheme: QuantizationScheme, size: int | None) -> None:
    if size is not None and is_grouped(scheme):
        scheme.weights.group_size = size
