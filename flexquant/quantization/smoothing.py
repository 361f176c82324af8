# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run SmoothQuant with a strength for every mapping of every layer, chosen by the error that it leaves.

SmoothQuant divides the activations in front of a group of linears by s and multiplies the linears' weights
by it, s = max|x|^alpha / max|W|^(1 - alpha) for each channel (https://arxiv.org/abs/2211.10438). One alpha
for all layers is a compromise, as outliers differ from layer to layer. Here every mapping tries each alpha of
a grid, and no smoothing, and keeps the one whose quantised output, Q(x / s) Q(W s)^T, is nearest to x W^T on
a sample of calibration tokens. Q is the scheme of the variant's quantising modifier, with rounding to nearest
instead of GPTQ.

llmcompressor runs a modifier over the data one decoder layer at a time, so only one layer's sample is held.
The inputs are observed at the linears, not at the smoothed module's output: down_proj's input is not
up_proj's output, but its product with the activated gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantModifier, SmoothQuantScale
from llmcompressor.observers import Observer
from pydantic import PrivateAttr

from flexquant.checkpoint.model_config import JsonObject

REFERENCE = 0.5
"""Usual alpha, which is always measured for comparison."""
SAMPLE_TOKENS = 2048
FLOOR = 1e-5


class SearchedSmoothQuant(SmoothQuantModifier):
    """llmcompressor's SmoothQuant with a strength per mapping; ``chosen`` and ``errors`` hold the results."""

    candidates: list[float] = []
    """Strengths to try for each mapping, beside no smoothing."""
    fixed: dict[str, float | None] = {}
    """Name of a smoothed module -> strength, if nothing is searched; None: not smoothed."""
    tokens: int = 0
    """Number of all calibration tokens."""

    chosen: dict[str, float | None] = {}
    """Name of the smoothed module -> strength of its mapping; found by the modifier, like the next two."""
    errors: dict[str, dict[float | None, float]] = {}
    """Searched mapping -> strength -> output MSE, summed over its linears."""
    power: dict[str, float] = {}
    """Searched mapping -> mean square of its outputs, summed over its linears."""

    _samples: dict[str, list[torch.Tensor]] = PrivateAttr(default_factory=dict)
    _seen: dict[str, int] = PrivateAttr(default_factory=dict)

    def _setup_scale_hooks(self) -> None:
        for mapping in self.resolved_mappings_:
            self.register_hook(mapping.balance_layers[0], self._observer(mapping.smooth_name), "forward")

    def _observer(self, name: str) -> Callable[..., None]:
        def observe(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
            x = inputs[0].detach().flatten(0, -2)  # [tokens, in]
            largest = x.abs().amax(dim=0).float()
            if name in self.scales_:
                largest = torch.maximum(self.scales_[name].max_channel_vals, largest)
            self.scales_[name] = SmoothQuantScale(-largest, largest)
            if name not in self.fixed:
                self._keep_sample(name, x)

        return observe

    def _keep_sample(self, name: str, x: torch.Tensor) -> None:
        """Keep every n-th token; n is coprime to the rows' length, so that no position is preferred."""
        stride = max(1, math.ceil(self.tokens / SAMPLE_TOKENS))
        while math.gcd(stride, x.shape[0]) != 1:
            stride += 1
        seen = self._seen.get(name, 0)
        self._samples.setdefault(name, []).append(x[-seen % stride :: stride].clone())
        self._seen[name] = seen + x.shape[0]

    def _calculate_smoothing_scales(
        self, balance_layers: list[torch.nn.Linear], activation_scales: torch.Tensor
    ) -> torch.Tensor:
        """Return s [in] for one mapping, by which its linears' weights are multiplied."""
        name = next(m.smooth_name for m in self.resolved_mappings_ if m.balance_layers is balance_layers)
        largest_input = activation_scales / 2
        largest_weight = torch.stack([layer.weight.abs().amax(dim=0) for layer in balance_layers]).amax(dim=0)
        if name in self.fixed:
            self.chosen[name] = self.fixed[name]
        else:
            self.chosen[name] = self._search(name, balance_layers, largest_input, largest_weight.float())
        return smoothing_scales(self.chosen[name], largest_input, largest_weight.float())

    def _search(
        self, name: str, layers: list[torch.nn.Linear], largest_input: torch.Tensor, weights: torch.Tensor
    ) -> float | None:
        x = torch.cat(self._samples.pop(name)).float()
        del self._seen[name]
        quantised = [layer for layer in layers if hasattr(layer, "quantization_scheme")]
        if not quantised:
            return None
        targets = [torch.nn.functional.linear(x, layer.weight.float()) for layer in quantised]
        self.power[name] = sum(float(y.square().mean()) for y in targets)
        tried: list[float | None] = [None, *sorted({*self.candidates, REFERENCE})]
        self.errors[name] = {
            alpha: sum(
                _output_error(x, layer, y, smoothing_scales(alpha, largest_input, weights))
                for layer, y in zip(quantised, targets, strict=True)
            )
            for alpha in tried
        }
        return min([None, *self.candidates], key=self.errors[name].__getitem__)


def smoothing_report(smoothing: SearchedSmoothQuant) -> JsonObject | None:
    """Return every strength's output MSE for each mapping, and totals compared with one strength for all.

    ``summed_mse`` is dominated by the layers with the largest outputs; ``relative_mse`` is therefore the mean
    over mappings of MSE divided by the outputs' mean square. None if nothing was smoothed.
    """
    chosen, errors, power = smoothing.chosen, smoothing.errors, smoothing.power
    if not chosen:
        return None
    if not errors:
        return {"mappings": {name: {"chosen": alpha} for name, alpha in chosen.items()}}
    alphas = [a for a in next(iter(errors.values())) if a is not None]
    best = min(alphas, key=lambda a: math.fsum(found[a] for found in errors.values()))
    ways: dict[str, Mapping[str, float | None]] = {
        "per_mapping": chosen,
        "best_single": dict.fromkeys(errors, best),
        f"all_{REFERENCE}": dict.fromkeys(errors, REFERENCE),
        "none": dict.fromkeys(errors, None),
    }
    sums = {way: math.fsum(errors[n][by[n]] for n in errors) for way, by in ways.items()}
    shares = {
        way: math.fsum(errors[n][by[n]] / power[n] for n in errors if power[n]) / len(errors)
        for way, by in ways.items()
    }
    return {
        "best_single_alpha": best,
        "summed_mse": sums,
        "relative_mse": shares,
        "ratios_to_per_mapping": {
            measure: {way: _ratio(found[way], found["per_mapping"]) for way in ways if way != "per_mapping"}
            for measure, found in (("summed_mse", sums), ("relative_mse", shares))
        },
        "mappings": {
            name: {
                "chosen": chosen[name],
                "mse": found[chosen[name]],
                f"mse_at_{REFERENCE}": found[REFERENCE],
                f"ratio_{REFERENCE}_to_chosen": _ratio(found[REFERENCE], found[chosen[name]]),
                "output_mean_square": power[name],
                "mse_by_alpha": {("none" if a is None else str(a)): e for a, e in found.items()},
            }
            for name, found in errors.items()
        },
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def smoothing_scales(
    alpha: float | None, largest_input: torch.Tensor, largest_weight: torch.Tensor
) -> torch.Tensor:
    """Return SmoothQuant's s [in] from the largest magnitude of each input channel and weight column.

    Channels that are zero in all inputs or all weights get 1; with ``alpha`` None, all channels do.
    """
    if alpha is None:
        return torch.ones_like(largest_input)
    scales = largest_input.clamp(min=FLOOR).pow(alpha) / largest_weight.clamp(min=FLOOR).pow(1 - alpha)
    return torch.where((largest_input > 0) & (largest_weight > 0), scales, 1.0).clamp(min=FLOOR)


def _output_error(x: torch.Tensor, layer: torch.nn.Linear, y: torch.Tensor, s: torch.Tensor) -> float:
    """Return the mean squared error of a linear's output [tokens, out], smoothed by s and quantised."""
    scheme: QuantizationScheme = layer.quantization_scheme
    quantised = torch.nn.functional.linear(
        _round_input((x / s).unsqueeze(0), scheme.input_activations)[0],
        _round_weight(layer.weight.float() * s, scheme.weights),
    )
    return float((quantised - y).square().mean())


def _round_weight(weight: torch.Tensor, args: QuantizationArgs | None) -> torch.Tensor:
    """Round a weight [out, in] to nearest, and dequantise it; ``args`` None leaves it unchanged."""
    if args is None:
        return weight
    observer = Observer.load_from_registry(
        "memoryless_minmax", base_name="weight", args=args.model_copy(update={"observer_kwargs": {}})
    )
    found = observer(weight).get_qparams()
    return fake_quantize(weight, found["scale"], found["zero_point"], args, found["global_scale"])


def _round_input(x: torch.Tensor, args: QuantizationArgs | None) -> torch.Tensor:
    """Quantise and dequantise activations [batch, tokens, in]; ``args`` None leaves them unchanged.

    Static schemes, too, use the scale of the given activations.
    """
    if args is None:
        return x
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    return fake_quantize(x, scale, zero_point, args)
