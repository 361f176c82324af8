# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How the Linears of a checkpoint are quantised, as its ``quantization_config`` says (compressed-tensors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme


class LinearSchemes:
    """The schemes of a checkpoint's Linears, by the names of the modules."""

    def __init__(self, section: Mapping[str, Any], owner: str) -> None:
        """Read the ``quantization_config``, given as ``section``.

        Raises FlexQuantError, which begins with ``owner``, for one that compressed-tensors does not take.
        """
        import torch

        self._config = _parse(section, owner)
        self._groups = [g for g in self._config.config_groups.values() if not isinstance(g, list)]
        self._linear = torch.nn.Linear(1, 1, device="meta")  # stands for any module of the class

    @property
    def format(self) -> str:
        """How weights are stored whose scheme does not say it."""
        return self._config.format

    def of(self, module: str) -> QuantizationScheme | None:
        """Return how a Linear is quantised; None for one that is left in 16 bits."""
        from compressed_tensors.utils.match import is_match, match_name

        if is_match(module, self._linear, self._config.ignore or ()):
            return None
        for group in self._groups:  # a name is more specific than a class
            if any(match_name(module, target) for target in group.targets):
                return group
        return next((g for g in self._groups if is_match(module, self._linear, g.targets)), None)


def _parse(section: Mapping[str, Any], owner: str) -> QuantizationConfig:
    from compressed_tensors.quantization import QuantizationConfig

    section = dict(section)
    groups = section.get("config_groups")
    if isinstance(groups, dict):
        # Where activation ordering matters it shows in weight_g_idx; newer releases refuse the word.
        section["config_groups"] = {name: _without_actorder(group) for name, group in groups.items()}
    try:
        return QuantizationConfig.model_validate(section)
    except (ValueError, TypeError, NotImplementedError) as e:
        problem = " ".join(str(e).split())
        raise FlexQuantError(
            f"{owner} has a quantization_config that is not understood ({problem}); quantise the model again "
            "with a supported release of llmcompressor"
        ) from e


def _without_actorder(group: Any) -> Any:
    if isinstance(group, dict) and isinstance(group.get("weights"), dict):
        return {**group, "weights": {k: v for k, v in group["weights"].items() if k != "actorder"}}
    return group
