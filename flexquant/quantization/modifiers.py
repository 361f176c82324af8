# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Make llmcompressor's modifiers, and three of our own, from a resolved recipe.

`SearchedSmoothQuant` divides the activations in front of a group of linears by s and multiplies the linears'
weights by it, s = max|x|^alpha / max|W|^(1 - alpha) for each channel (https://arxiv.org/abs/2211.10438). For
each group it tries every alpha of a grid, and no smoothing, and keeps the one whose quantised output, Q(x /
s) Q(W s)^T, is nearest to x W^T on a sample of calibration tokens. Q is the variant's scheme with rounding to
nearest. Inputs are observed at the linears: down_proj's is not up_proj's output, but that times the activated
gate.
"""

import math
from collections.abc import Callable, Mapping

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.quantization.quantization import QuantizationMixin
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.quip import QuIPModifier
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantModifier, SmoothQuantScale
from llmcompressor.observers import Observer
from pydantic import PrivateAttr

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.nested import Int4Weight
from flexquant.errors import FlexQuantError, said_by
from flexquant.quantization.resolve import LM_HEAD, ResolvedVariant, quantization_groups
from flexquant.quantization.vocabulary import ROTATES, split_mapping
from flexquant.quantization.within_reach import GPTQWithinReach

SMALLEST_NORM = 1e-6
REFERENCE = 0.5
"""Usual alpha, which is always measured for comparison."""
SAMPLE_TOKENS = 2048
FLOOR = 1e-5
HEAD_IN_INT8 = QuantizationScheme(
    targets=[f"re:.*{LM_HEAD}$"],
    weights=QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel"),
)


def needs_calibration(variant: ResolvedVariant) -> bool:
    """Whether calibration rows are needed to make the variant."""
    by_modifier = any(modifier.requires_calibration_data for modifier in build_modifiers(variant))
    return by_modifier or variant.recipe.scale_distillation is not None


def build_modifiers(
    variant: ResolvedVariant, tokens: int = 0, int4: Mapping[str, Int4Weight] | None = None
) -> list[Modifier]:
    """Return the modifiers in order, for ``tokens`` tokens; raise FlexQuantError for arguments it refuses.

    ``int4`` has the weights by linear in which the variant is to be nested.
    """
    recipe = variant.recipe
    try:
        built = [
            _modifier(name, {**given}, variant, tokens, int4 or {})
            for name, given in recipe.modifiers.items()
        ]
        _check_observers(built[-1])
        if recipe.head == "int8":
            built.append(QuantizationModifier(config_groups={"group_of_head": HEAD_IN_INT8}, ignore=[]))
    except ValueError as e:
        raise FlexQuantError(f"{recipe.place} is refused by llmcompressor ({said_by(e)})") from e
    return built


def _modifier(
    name: str, arguments: JsonObject, variant: ResolvedVariant, tokens: int, int4: Mapping[str, Int4Weight]
) -> Modifier:
    """Return one modifier of a recipe, from its own ``arguments``; raise ValueError for refused ones."""
    if name == "SmoothQuantModifier":
        given = arguments.pop("smoothing_strength")
        if isinstance(given, list):
            return SearchedSmoothQuant(candidates=given, tokens=tokens, **arguments)
        fixed = given if isinstance(given, dict) else dict.fromkeys(variant.smoothed, given)
        return SearchedSmoothQuant(fixed=fixed, **arguments)
    if name == "AWQModifier":
        pairs = [pair for m in arguments.pop("mappings") if (pair := split_mapping(m))]
        return AWQModifier(mappings=[AWQMapping(smooth, balance) for balance, smooth in pairs], **arguments)
    if name == ROTATES:
        return QuIPModifier(**arguments)
    groups = quantization_groups(arguments)
    in_groups = ("scheme", "targets", "group_size", "config_groups")
    kept = {"ignore": [], **{key: value for key, value in arguments.items() if key not in in_groups}}
    if name == "AutoRoundModifier":
        # Importing it takes seconds. Compiling only pays on GPUs.
        from llmcompressor.modifiers.autoround import AutoRoundModifier

        on_gpu = torch.accelerator.is_available()
        return AutoRoundModifier(config_groups=groups, enable_torch_compile=on_gpu, **kept)
    quantizer = {"GPTQModifier": GPTQModifier, "QuantizationModifier": QuantizationModifier}[name]
    if "first_token_weight" in kept:
        quantizer = TokenNormalizedGPTQ
    if variant.recipe.nested_in is not None:
        return GPTQWithinReach(config_groups=groups, int4=int4, **kept)
    return quantizer(config_groups=groups, **kept)


def _check_observers(quantizer: QuantizationMixin) -> None:
    """Raise ValueError for an observer that llmcompressor does not have."""
    for group in quantizer.resolved_config.config_groups.values():
        for arguments in (group.weights, group.input_activations):
            observer = None if arguments is None else arguments.observer
            if observer is not None and observer.replace("_", "-") not in Observer.registered_names():
                known = ", ".join(name.replace("-", "_") for name in Observer.registered_names())
                raise ValueError(f"'{observer}' is no observer; choose among {known}")


class TokenNormalizedGPTQ(GPTQModifier):
    """llmcompressor's GPTQ on inputs of equal norm; each row must begin at the beginning of a sequence.

    GPTQ weights the error of a linear by H = sum of x x^T over the calibration tokens. A few tokens, mostly
    the first of a row, have activations hundreds of times larger than all others and would decide H alone, so
    each x is divided by its norm. The first token, to which every later one attends, gets the weight of
    several. benchmarks/results/quality-methods compares the methods.
    """

    first_token_weight: float = 1.0
    """Number of tokens that a row's first token counts for."""

    def calibrate_module(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], _output: torch.Tensor
    ) -> None:
        """Add a linear's inputs ``args[0]``, [rows, tokens, in] or, of an expert, [tokens, in] of one row.

        Raises FlexQuantError for inputs of another shape, in which a row's first token cannot be found.
        """
        x = args[0].float()
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(SMALLEST_NORM)
        if self.first_token_weight != 1:
            x = x.unsqueeze(0) if x.ndim == 2 else x
            if x.ndim != 3:
                found = f"the inputs of {self._module_names.get(module, 'a linear')} have the shape"
                why = "expected [rows, tokens, in], so the first token of a row cannot be found"
                advice = "remove first_token_weight from the recipe"
                raise FlexQuantError(f"{found} {list(x.shape)}, {why}; {advice}")
            x[:, 0] *= self.first_token_weight**0.5
        super().calibrate_module(module, (x,), _output)


class SearchedSmoothQuant(SmoothQuantModifier):
    """llmcompressor's SmoothQuant with a strength per mapping."""

    candidates: list[float] = []
    """Strengths to try for each mapping, beside no smoothing."""
    fixed: dict[str, float | None] = {}
    """Name of a smoothed module -> strength, if nothing is searched; None: not smoothed."""
    tokens: int = 0
    """Number of all calibration tokens."""

    chosen: dict[str, float | None] = {}
    """Name of the smoothed module -> strength of its mapping, a result like the next two."""
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
        largest_weight = torch.stack([layer.weight.abs().amax(dim=0) for layer in balance_layers])
        magnitudes = largest_input, largest_weight.amax(dim=0).float()
        fixed = name in self.fixed
        self.chosen[name] = self.fixed[name] if fixed else self._search(name, balance_layers, *magnitudes)
        return smoothing_scales(self.chosen[name], *magnitudes)

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
        self.errors[name] = {}
        for alpha in (None, *sorted({*self.candidates, REFERENCE})):
            s, pairs = smoothing_scales(alpha, largest_input, weights), zip(quantised, targets, strict=True)
            self.errors[name][alpha] = sum(_output_error(x, layer, y, s) for layer, y in pairs)
        return min([None, *self.candidates], key=self.errors[name].__getitem__)


def smoothing_report(smoothing: SearchedSmoothQuant) -> JsonObject | None:
    """Return each mapping's strength, and the output MSE at every strength where it was searched.

    ``mse_gain``: summed MSE with REFERENCE over that with the chosen strengths. None if nothing was smoothed.
    """
    chosen, errors = smoothing.chosen, smoothing.errors
    if not chosen:
        return None
    mappings: JsonObject = {name: {"chosen": alpha} for name, alpha in chosen.items()}
    if not errors:
        return {"mappings": mappings}
    for name, found in errors.items():
        mappings[name]["output_mean_square"] = smoothing.power[name]
        mappings[name]["mse_by_alpha"] = {("none" if a is None else str(a)): e for a, e in found.items()}
    best = math.fsum(found[chosen[name]] for name, found in errors.items())
    reference = math.fsum(found[REFERENCE] for found in errors.values())
    return {"mse_gain": reference / best if best else None, "mappings": mappings}


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
    plain = args.model_copy(update={"observer_kwargs": {}})
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=plain)
    found = observer(weight).get_qparams()
    return fake_quantize(weight, found["scale"], found["zero_point"], args, found["global_scale"])


def _round_input(x: torch.Tensor, args: QuantizationArgs | None) -> torch.Tensor:
    """Quantise and dequantise activations [batch, tokens, in] by their own scale; ``args`` None: neither."""
    if args is None:
        return x
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity())
    return fake_quantize(x, scale, zero_point, args)
