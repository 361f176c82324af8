# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantise one variant in memory: load the 16-bit model, run the modifiers, train scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from llmcompressor.modifiers import Modifier
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.writer import Progress
from flexquant.quantization.distillation import distill_scales
from flexquant.quantization.modifiers import build_modifiers
from flexquant.quantization.oneshot import explained_memory, load_model, run_modifiers
from flexquant.quantization.report import smoothing_report
from flexquant.quantization.resolve import ResolvedVariant
from flexquant.quantization.sensitivity import SpareSensitiveLayers
from flexquant.quantization.smoothing import REFERENCE, SearchedSmoothQuant
from flexquant.quantization.source_model import SourceModel


@dataclass(frozen=True)
class QuantizedModel:
    """A quantised model that is not saved yet, and what was found on the way."""

    model: PreTrainedModel
    findings: JsonObject
    """Findings for the report."""
    strengths: Mapping[str, float | None]
    """Mapping of SmoothQuant -> the strength that was chosen; None: not smoothed."""
    spared: Sequence[str]
    """Linears that were kept in another scheme, or in 16 bit."""


def quantize_in_memory(
    variant: ResolvedVariant,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]] | None,
    seed: int,
    show: Progress | None = None,
) -> QuantizedModel:
    """Return the model of ``variant``, calibrated on ``rows`` of token ids (None: without calibration)."""
    tensors = [torch.tensor(row) for row in rows or ()]
    model = load_model(source)
    modifiers, _ = build_modifiers(variant, tensors, sum(map(len, tensors)))
    run_modifiers(model, tokenizer, modifiers, tensors, seed, show)
    findings, strengths, spared = _findings(modifiers)
    findings["distillation"] = None
    if (distillation := variant.recipe.scale_distillation) is not None:
        with explained_memory(f"training the scales of '{variant.recipe.name}'", "remove scale_distillation"):
            teacher = load_model(source)
            by_epoch = distill_scales(model, teacher, tensors, distillation.epochs, seed, show)
            del teacher
        findings["distillation"] = {"kl_by_epoch": by_epoch}
    return QuantizedModel(model, findings, strengths, spared)


def _findings(
    modifiers: Sequence[Modifier],
) -> tuple[JsonObject, Mapping[str, float | None], Sequence[str]]:
    """Return the findings for the report, the strengths of smoothing, and the spared linears."""
    findings: JsonObject = {"smoothing": None, "sensitivities": None}
    strengths: Mapping[str, float | None] = {}
    spared: Sequence[str] = []
    for modifier in modifiers:
        if isinstance(modifier, SearchedSmoothQuant):
            strengths = modifier.chosen
            findings["smoothing"] = smoothing_report(strengths, modifier.errors, modifier.power, REFERENCE)
        if isinstance(modifier, SpareSensitiveLayers):
            findings["sensitivities"], spared = modifier.found, modifier.spared
    return findings, strengths, spared
