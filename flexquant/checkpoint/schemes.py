# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find how a checkpoint's Linears are quantised, from its ``quantization_config`` (compressed-tensors)."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme


class LinearSchemes:
    """The schemes of a checkpoint's Linears, by module name."""

    def __init__(self, section: JsonObject, owner: str) -> None:
        """Read ``section``, a ``quantization_config``.

        Raises FlexQuantError, which begins with ``owner``, for a section that compressed-tensors refuses.
        """
        import torch

        self._config = _parse(section, owner)
        self._groups = [g for g in self._config.config_groups.values() if not isinstance(g, list)]
        self._linear = torch.nn.Linear(1, 1, device="meta")  # stands for any module of the class

    @property
    def format(self) -> str:
        """Storage format of weights whose scheme does not state one."""
        return self._config.format

    def of(self, module: str) -> QuantizationScheme | None:
        """Return the scheme of a Linear; None if it is left in 16 bits."""
        from compressed_tensors.utils.match import is_match, match_name

        if is_match(module, self._linear, self._config.ignore or ()):
            return None
        for group in self._groups:  # a name is more specific than a class
            if any(match_name(module, target) for target in group.targets):
                return group
        return next((g for g in self._groups if is_match(module, self._linear, g.targets)), None)


def _parse(section: JsonObject, owner: str) -> QuantizationConfig:
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.transform import TransformConfig
    from compressed_tensors.utils.match import match_name

    try:
        config = QuantizationConfig.model_validate(section)
        groups = [group.targets for group in config.config_groups.values() if not isinstance(group, list)]
        for name in chain(config.ignore or (), *groups):
            match_name("", name)  # compiles it, if it is a regular expression
        if transforms := section.get("transform_config"):
            TransformConfig.model_validate(transforms)
        return config
    except (ValueError, TypeError, KeyError, NotImplementedError, OverflowError, re.error) as e:
        problem = " ".join(str(e).split())
        raise FlexQuantError(
            f"{owner} has a quantization_config that is not understood ({problem}); quantise the model again "
            "with a supported release of llmcompressor"
        ) from e
