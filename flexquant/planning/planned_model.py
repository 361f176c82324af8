# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Work out from a ``config.json`` alone what a model would be in each scheme, before it is quantised.

transformers builds the model without memory for its weights. Its linears in decoder layers, experts included,
get the bytes of a scheme; the rest stays in 16 bits, as in FlexQuant's recipes. A quantisation that the
config tells of is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import build_config, build_model
from flexquant.checkpoint.folder import check_folder, confined_file, read_json
from flexquant.checkpoint.hub import find_model
from flexquant.checkpoint.merged_config import CONFIG_FILE
from flexquant.checkpoint.model_config import JsonObject, count_layers, reads_more_than_text, text_config
from flexquant.checkpoint.module_names import decoder_layer, fused_name
from flexquant.errors import FlexQuantError
from flexquant.planning.linears import Linear, plain_linear
from flexquant.planning.model_shape import ModelShape, device_share
from flexquant.policy.rules import Derivation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GROUP_SIZES = (128, 64, 32)
"""Group sizes of INT4 weights; the first that divides all linears' inputs is taken, as in the recipes."""
QUANTISED = ("w8a8", "fp8", "w4a16")


@dataclass(frozen=True)
class PlannedModel:
    """A model whose linears are not quantised yet."""

    source: str
    """The model's name in messages."""
    config: PretrainedConfig
    """The language model's, with transformers' defaults for what ``config.json`` leaves out."""
    linears: Mapping[str, Linear]
    """Name, as vLLM fuses it -> linear of a decoder layer, in 16 bits."""
    kept: frozenset[str]
    """Names of the linears that no recipe quantises, such as routers."""
    head: Linear
    rest_bytes: float
    """Bytes of everything but the linears of decoder layers."""
    has_towers: bool
    """Whether the model also reads images or sound; what does so is not counted."""

    @classmethod
    def read(cls, model: str) -> PlannedModel:
        """Read the ``config.json`` of a folder or of a Hugging Face id, and nothing else.

        Raises FlexQuantError for a folder without one, and for a model that transformers cannot build.
        """
        folder = find_model(model, (CONFIG_FILE,))
        check_folder(folder)
        whole = read_json(confined_file(folder, CONFIG_FILE))
        config, parameters, quantised = _build(text_config(whole), str(folder / CONFIG_FILE))
        linears: dict[str, Linear] = {}
        rest, kept = 0, set()
        for name, shape in parameters.items():
            module = name.removesuffix(".weight")
            is_matrix = len(shape) == 2 and name.endswith(".weight")
            if not decoder_layer(name) or not (is_matrix or name in quantised and len(shape) > 1):
                rest += 2 * prod(shape)
                continue
            call = fused_name(module)
            linear = plain_linear(*shape[-2:])
            if len(shape) == 3:
                linear = replace(linear, experts=shape[0])
            if call in linears:
                linear = replace(linear, outputs=linear.outputs + linears[call].outputs)
            linears[call] = linear
            if name not in quantised:
                kept.add(call)
        if not linears.keys() - kept:
            raise FlexQuantError(
                f"{model} has no linears in decoder layers, which the cost model is about; give a causal "
                "language model"
            )
        matrices = (shape for shape in parameters.values() if len(shape) == 2)
        head = parameters.get("lm_head.weight") or next(matrices)
        return cls(
            model,
            config,
            linears,
            frozenset(kept),
            plain_linear(*head),
            rest,
            reads_more_than_text(whole),
        )

    @property
    def has_experts(self) -> bool:
        return any(linear.experts > 1 for linear in self.linears.values())

    def shape(
        self, schemes: Iterable[str], tensor_parallel_size: int, derived: Mapping[str, Derivation]
    ) -> ModelShape:
        """Return one device's share of the model with a variant, named after it, in each of ``schemes``.

        Arguments and errors are those of :func:`~flexquant.planning.model_shape.device_share`.
        """
        shared = self.rest_bytes
        own: dict[str, float] = {}
        linears: dict[str, dict[str, Linear]] = {}
        for scheme in schemes:
            linears[scheme] = {name: self._in_scheme(name, scheme) for name in self.linears}
            own[scheme] = sum(x.experts * x.weight_bytes for x in linears[scheme].values())
        return device_share(
            self.config, linears, self.head, own, shared, tensor_parallel_size, derived, self.source
        )

    def _in_scheme(self, name: str, scheme: str) -> Linear:
        linear = self.linears[name]
        weights = linear.outputs * linear.inputs
        if name in self.kept:
            return replace(linear, weight_bytes=2 * weights)
        if scheme == "w4a16":
            nbytes = weights / 2 + 2 * weights / self.group_size
        else:
            nbytes = weights + 2 * linear.outputs
        return replace(linear, scheme=scheme, weight_bytes=nbytes)

    @property
    def group_size(self) -> int:
        """Inputs of a group of INT4 weights, as the recipes choose it."""
        inputs = {linear.inputs for name, linear in self.linears.items() if name not in self.kept}
        fitting = (size for size in GROUP_SIZES if all(number % size == 0 for number in inputs))
        return next(fitting, GROUP_SIZES[-1])


def _build(config: JsonObject, source: str) -> tuple[PretrainedConfig, dict[str, tuple[int, ...]], set[str]]:
    """Return the whole config, the shape of every parameter by name, and which of them a recipe quantises.

    A linear's shape ends with its outputs and inputs, as most models hold it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        whole = build_config(config)
        text = whole.get_text_config()
        count_layers({"num_hidden_layers": getattr(text, "num_hidden_layers", None)})
        with torch.device("meta"):
            model = build_model(AutoModelForCausalLM, whole)
    except FlexQuantError as e:
        raise FlexQuantError(f"{source}: {e}") from e
    except Exception as e:  # a class of transformers can raise anything
        raise FlexQuantError(
            f"{source}: transformers cannot build the model ({' '.join(str(e).split())}); give a causal "
            "language model of a type that it knows"
        ) from e
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    turned = tuple(f"{n}." for n, module in model.named_modules() if getattr(module, "is_transposed", False))
    linears = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and decoder_layer(name)
    }
    experts = {name for name, shape in shapes.items() if ".experts." in name and len(shape) == 3}
    shapes |= {n: (shapes[n][0], *shapes[n][:0:-1]) for n in experts if n.startswith(turned)}
    return text, shapes, linears | experts
