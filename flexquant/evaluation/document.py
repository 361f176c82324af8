# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The document of an evaluation, which ``quality.json`` holds."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from flexquant.checkpoint.model_config import JsonObject


class Run(TypedDict):
    policy: str
    batch_size: int


class BytesPerWeight(TypedDict):
    """Stored bytes for a weight of the decoder layers, scales included; 2.0 in the 16-bit model."""

    resident: float
    """Of the layers that some plan takes from a variant, shared tensors once."""
    decode: float
    """Of those that a decode pass reads."""


class Result(Run):
    """What was measured of a policy, or of the 16-bit reference, which has no plans, at one batch size."""

    quality: JsonObject
    """The fields of :class:`flexquant.evaluation.measure.Quality`."""
    bytes_per_weight: BytesPerWeight
    prefill_plan: NotRequired[str]
    decode_plan: NotRequired[str]
    same_as: NotRequired[Run | None]
    """An earlier run with the same plans, whose quality this is."""
    answers: NotRequired[JsonObject | None]
    """The fields of :class:`flexquant.evaluation.measure.AnswerAgreement`, and ``same_as``, a policy."""
    passes: NotRequired[JsonObject]
    """The fields of :class:`flexquant.evaluation.schedule.Passes`; of a run that was measured."""
    deviations: NotRequired[list[str]]
    """How these passes differ from those that were meant, in sentences."""


class Evaluation(TypedDict):
    schema: str
    checkpoint: str
    reference: str | None
    settings: JsonObject
    """The fields of :class:`flexquant.evaluation.inputs.Settings`."""
    text: dict[str, str]
    """``file`` and its ``sha256``."""
    questions: int
    """How many were answered at each policy."""
    results: list[Result]
    machine: JsonObject
    versions: dict[str, str]
    argv: list[str]
