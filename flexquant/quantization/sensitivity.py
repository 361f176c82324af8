# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Spare the linears that a scheme hurts most, as measured at the logits, within a budget.

A unit is what vLLM fuses into one linear (q, k and v; o; gate and up; down). Its sensitivity is the mean KL
divergence of the next-token distribution if it alone is rounded to nearest, over a few calibration rows. The
layers before it compute the same each time, so their outputs are reused: measuring a unit takes half a
forward pass on average. Units are then spared greedily, those with the most divergence per parameter first.

This runs as a modifier between smoothing and quantising, so it measures the smoothed model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import TypedDict

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from compressed_tensors.quantization.quant_metadata import QuantizationMetadata
from compressed_tensors.utils import patch_attr
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization.quantization import QuantizationMixin
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization
from pydantic import ConfigDict, PrivateAttr

from flexquant.quantization.architecture import decoder_layers, fused_units
from flexquant.quantization.rounding import round_input, round_weight

MEASURED_TOKENS = 1024
LayerOutput = torch.Tensor | tuple[torch.Tensor, ...]
"""Output of a decoder layer: hidden states [1, tokens, features], in some models the first of a tuple."""


class MeasuredUnit(TypedDict):
    """What was measured of a unit, and whether it is spared."""

    kl: float
    """Divergence in nats a token, with this unit alone rounded to nearest."""
    parameters: int
    spared: bool
    linears: list[str]


class SpareSensitiveLayers(Modifier):
    """Measures all units, and takes the most sensitive ones from the quantising modifier."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    rows: list[torch.Tensor]
    """Calibration rows [tokens]; the first MEASURED_TOKENS tokens of them are used."""
    budget: float
    """Largest share of the quantised parameters that may be spared."""
    scheme: QuantizationScheme | None
    """Scheme of the spared linears; None: they stay in 16 bit."""
    quantizer: QuantizationMixin
    """The modifier that quantises afterwards; it gets the spared linears to ignore."""

    _found: dict[str, MeasuredUnit] = PrivateAttr(default_factory=dict)

    @property
    def found(self) -> dict[str, MeasuredUnit]:
        """All units by name."""
        return self._found

    @property
    def spared(self) -> list[str]:
        """The names of the spared linears."""
        return [name for unit in self._found.values() if unit["spared"] for name in unit["linears"]]

    def on_initialize(self, state: State, **kwargs: object) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: object) -> None:
        model = state.model
        linears = {n: m for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
        units = fused_units(list(linears))
        layers = decoder_layers(list(linears))
        count = max(1, MEASURED_TOKENS // len(self.rows[0]))
        # By now the quantising modifier has attached its schemes, but no scales.
        with torch.no_grad(), DisableQuantization(model):
            divergences = measure_units(model, layers, units, self.rows[:count])
        sizes = {unit: sum(linears[n].weight.numel() for n in names) for unit, names in units.items()}
        spared = spend_budget(divergences, sizes, self.budget)
        self._found = {
            unit: {
                "kl": divergences[unit],
                "parameters": sizes[unit],
                "spared": unit in spared,
                "linears": names,
            }
            for unit, names in units.items()
        }
        self._hand_over({name: linears[name] for name in self.spared})

    def _hand_over(self, linears: dict[str, torch.nn.Module]) -> None:
        for module in linears.values():
            QuantizationMetadata.clear_quantization(module)
            del module.quantization_status
        if self.scheme is None:
            self.quantizer.ignore = [*self.quantizer.ignore, *linears]
        elif linears:
            scheme = deepcopy(self.scheme)
            scheme.targets = list(linears)
            groups = {**self.quantizer.config_groups, "sensitive": scheme}
            self.quantizer.config_groups = groups
            self.quantizer._resolved_config = None
            resolved = self.quantizer.resolved_config.config_groups["sensitive"]
            for module in linears.values():
                initialize_module_for_quantization(module, resolved)


def measure_units(
    model: torch.nn.Module,
    layers: Sequence[str],
    units: dict[str, list[str]],
    rows: Sequence[torch.Tensor],
) -> dict[str, float]:
    """Return each unit's mean KL divergence (nats per token) if it alone is rounded to nearest."""
    modules = [model.get_submodule(name) for name in layers]
    first = {unit: next(i for i, name in enumerate(layers) if unit.startswith(f"{name}.")) for unit in units}
    totals = dict.fromkeys(units, 0.0)
    for row in rows:
        ids = row.unsqueeze(0).to(get_main_device())
        outputs: list[LayerOutput] = []
        with ExitStack() as hooks:
            for module in modules:
                handle = module.register_forward_hook(_append_to(outputs))
                hooks.callback(handle.remove)
            expected = _log_probabilities(model, ids)
        for unit, names in units.items():
            with ExitStack() as stack:
                for module, output in zip(modules[: first[unit]], outputs, strict=False):
                    stack.enter_context(patch_attr(module, "forward", _always(output)))
                for name in names:
                    stack.enter_context(_rounded(model.get_submodule(name)))
                found = _log_probabilities(model, ids)
            divergence = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True)
            totals[unit] += float(divergence.sum(dim=-1).mean())
    return {unit: total / len(rows) for unit, total in totals.items()}


def spend_budget(divergences: dict[str, float], sizes: dict[str, int], budget: float) -> set[str]:
    """Return the units with the most divergence per parameter that fit into ``budget``, a share of all."""
    left = budget * sum(sizes.values())
    spared = set()
    for unit in sorted(divergences, key=lambda u: divergences[u] / sizes[u], reverse=True):
        if sizes[unit] <= left and divergences[unit] > 0:
            spared.add(unit)
            left -= sizes[unit]
    return spared


def _log_probabilities(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, float32 [tokens, vocabulary]."""
    return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)


def _append_to(outputs: list[LayerOutput]) -> Callable[..., None]:
    return lambda module, args, output: outputs.append(output)


def _always(output: LayerOutput) -> Callable[..., LayerOutput]:
    return lambda *args, **kwargs: output


@contextmanager
def _rounded(module: torch.nn.Module) -> Iterator[None]:
    scheme: QuantizationScheme = module.quantization_scheme
    weight: torch.Tensor = module.get_parameter("weight").detach().clone()
    handle = module.register_forward_pre_hook(
        lambda m, args: (round_input(args[0], scheme.input_activations), *args[1:])
    )
    try:
        update_offload_parameter(module, "weight", round_weight(weight, scheme.weights))
        yield
    finally:
        update_offload_parameter(module, "weight", weight)
        handle.remove()
