# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One 16-bit model in, one folder per variant out, by a recipe and with one set of calibration samples."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.merge.sidecars import RECIPE
from flexquant.merge.staging import prepare_output, staged_folder
from flexquant.quantization.architecture import empty_model
from flexquant.quantization.calibration import calibration_rows, read_documents
from flexquant.quantization.modifiers import build_modifiers
from flexquant.quantization.recipe import Calibration, Recipe, VariantRecipe
from flexquant.quantization.report import (
    is_complete,
    portable_settings,
    read_report,
    resolved_document,
    rows_sha256,
    smoothing_report,
    variant_fingerprint,
    write_report,
)
from flexquant.quantization.resolve import ResolvedVariant, resolve_variant, with_findings
from flexquant.quantization.source_model import SourceModel, find_folder, load_tokenizer, read_source

Rows = Sequence[Sequence[int]]
ProgressLine = Callable[[str], None]


@dataclass(frozen=True)
class QuantizedVariant:
    """One folder that :func:`quantize_variants` wrote, or found finished."""

    name: str
    folder: str
    kept: bool
    """Whether it was finished already, by an earlier run with ``resume``."""
    seconds: float
    """Calibrating and writing, without loading the calibration data; 0 when kept."""
    num_bytes: int
    """Size of the safetensors files."""
    group_size: int | None
    """Input features that share one weight scale; None: one scale per output channel or tensor."""
    smoothed: int
    """Mappings that SmoothQuant smoothed."""
    mse_gain: float | None
    """How many times smaller the summed output MSE of all mappings is than with one alpha of 0.5."""
    spared: list[str]
    """The units kept in another scheme or in 16 bit because they were found sensitive."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Job:
    """A variant on its way."""

    variant: ResolvedVariant
    folder: Path
    fingerprint: str
    rows: Rows | None
    """Calibration rows; None for a recipe that needs none."""


def quantize_variants(
    model: str | Path,
    output: str | Path,
    recipe: Recipe,
    *,
    variants: Sequence[str] | None = None,
    calibration: str | Path | None = None,
    samples: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: ProgressLine = lambda message: None,
) -> list[QuantizedVariant]:
    """Write ``output``/<name> for each variant of the recipe: a compressed-tensors checkpoint for vLLM.

    ``model`` is a folder or Hugging Face id of a 16-bit model. ``variants`` names those to make (default:
    all). ``calibration``, which is what :func:`~flexquant.quantization.calibration.read_documents` takes,
    ``samples``, ``length`` (tokens in a sample) and ``seed`` replace the recipe's where given. Equal inputs
    give equal bytes on one machine with one number of threads. A folder appears only when complete; in it,
    ``recipe.yaml`` reproduces the variant and ``quantization_report.json`` says what was searched.
    ``resume`` keeps variants that an earlier run finished from the same model, recipe, data and versions;
    ``overwrite`` replaces others. ``progress`` receives one line per step.

    Raises FlexQuantError, before any calibration, for a model, recipe or calibration data that cannot be
    used, an output that may not be replaced, and when llmcompressor is not installed; and for activations
    that are not finite or memory that runs out.
    """
    if importlib.util.find_spec("llmcompressor") is None:
        raise FlexQuantError(
            "quantising needs llmcompressor, which is not installed; install flexquant[quantize] in an "
            "environment of its own, since vLLM needs another compressed-tensors"
        )
    recipes = _choose_variants(recipe, variants)
    folder = find_folder(model, progress)
    folders = {r.name: Path(output) / r.name for r in recipes}
    for target in folders.values():
        if not resume or read_report(target) is None:
            prepare_output(target, [folder], overwrite=overwrite)
    progress(f"reading the weights of {folder}")
    source = read_source(folder)
    empty = empty_model(source.config)
    resolved = [resolve_variant(r, empty, source.config.model_type) for r in recipes]
    needs_data = {v.recipe.name: build_modifiers(v)[1] for v in resolved}
    data = None if calibration is None else str(calibration)
    given: dict[str, Any] = {"data": data, "samples": samples, "length": length, "seed": seed}
    settings = replace(recipe.calibration, **{k: v for k, v in given.items() if v is not None})
    tokenizer = load_tokenizer(source)
    rows = _calibration_rows(settings, tokenizer, progress) if any(needs_data.values()) else []
    jobs = []
    for variant in resolved:
        used = rows if needs_data[variant.recipe.name] else None
        fingerprint = variant_fingerprint(source, recipe.variants[variant.recipe.name], used, settings.seed)
        jobs.append(_Job(variant, folders[variant.recipe.name], fingerprint, used))
    kept = [resume and _is_finished(job, overwrite) for job in jobs]
    results = []
    for job, finished in zip(jobs, kept, strict=True):
        started = time.monotonic()
        if finished:
            progress(f"{job.variant.recipe.name}: {job.folder} is finished, and kept")
        else:
            _quantize(job, source, recipe, settings, tokenizer, progress)
        seconds = 0.0 if finished else time.monotonic() - started
        results.append(_result(job, finished, seconds))
    return results


def _choose_variants(recipe: Recipe, names: Sequence[str] | None) -> list[VariantRecipe]:
    names = list(recipe.variants) if names is None else list(dict.fromkeys(names))
    for name in names:
        if name not in recipe.variants:
            raise FlexQuantError(
                f"'{name}' is no variant of the recipe '{recipe.name}'; it has {', '.join(recipe.variants)}"
            )
    if not names:
        raise FlexQuantError(f"no variant is chosen; the recipe has {', '.join(recipe.variants)}")
    return [recipe.variants[name] for name in names]


def _calibration_rows(settings: Calibration, tokenizer: Any, progress: ProgressLine) -> Rows:
    if settings.data is None:
        progress("calibrating on Python's own documentation; text like your users' gives better accuracy")
    return calibration_rows(
        read_documents(settings.data),
        tokenizer,
        samples=settings.samples,
        length=settings.length,
        seed=settings.seed,
    )


def _is_finished(job: _Job, overwrite: bool) -> bool:
    """Whether the variant's folder is what this run would write; removes one of which files are gone."""
    report = read_report(job.folder)
    if report is None:
        return False
    if report.get("fingerprint") != job.fingerprint:
        if overwrite:
            return False
        raise FlexQuantError(
            f"{job.folder} was made from another model, recipe, calibration data or versions; replace it "
            "with --overwrite, or choose another folder"
        )
    if is_complete(job.folder, report):
        return True
    shutil.rmtree(job.folder)
    return False


def _quantize(
    job: _Job,
    source: SourceModel,
    recipe: Recipe,
    settings: Calibration,
    tokenizer: Any,
    progress: ProgressLine,
) -> None:
    import torch

    from flexquant.quantization.oneshot import explained_memory, load_model, run_modifiers, save_model

    name = job.variant.recipe.name
    for note in job.variant.notes:
        progress(f"{name}: {note}")
    if job.rows is None:
        progress(f"{name}: quantising without calibration")
    else:
        progress(f"{name}: calibrating with {len(job.rows)} samples of {len(job.rows[0])} tokens")
    dtype = source.config.dtype or torch.bfloat16
    rows = [torch.tensor(row) for row in job.rows or ()]
    with explained_memory(name):
        quantized = load_model(source.folder, dtype)
        modifiers, _ = build_modifiers(job.variant, rows, sum(map(len, rows)))
        run_modifiers(quantized, tokenizer, modifiers, rows, settings.seed)
        findings, strengths, spared = _findings(modifiers)
        with staged_folder(job.folder) as stage:
            save_model(quantized, dtype, source.folder, stage)
            del quantized
            resolved = with_findings(job.variant, strengths, spared)
            document = resolved_document(resolved, recipe.description, settings, source, job.rows)
            (stage / RECIPE).write_text(document, encoding="utf-8")
            write_report(stage, {**_facts(job, settings), **findings})
    progress(f"{name}: wrote {job.folder}")


def _facts(job: _Job, settings: Calibration) -> dict[str, Any]:
    calibration = None
    if job.rows is not None:
        calibration = {**portable_settings(settings), "rows_sha256": rows_sha256(job.rows)}
    return {
        "fingerprint": job.fingerprint,
        "calibration": calibration,
        "group_size": job.variant.group_size,
        "quantized_linears": len(job.variant.linears),
        "notes": list(job.variant.notes),
    }


def _findings(
    modifiers: Sequence[Any],
) -> tuple[dict[str, Any], Mapping[str, float | None], Sequence[str]]:
    """Return the report's part on what was searched, the strengths of smoothing, and the spared linears."""
    from flexquant.quantization.sensitivity import SpareSensitiveLayers
    from flexquant.quantization.smoothing import REFERENCE, SearchedSmoothQuant

    findings: dict[str, Any] = {"smoothing": None, "sensitivities": None}
    strengths: Mapping[str, float | None] = {}
    spared: Sequence[str] = []
    for modifier in modifiers:
        if isinstance(modifier, SearchedSmoothQuant):
            strengths = modifier.chosen
            findings["smoothing"] = smoothing_report(strengths, modifier.errors, modifier.power, REFERENCE)
        if isinstance(modifier, SpareSensitiveLayers):
            findings["sensitivities"], spared = modifier.found, modifier.spared
    return findings, strengths, spared


def _result(job: _Job, kept: bool, seconds: float) -> QuantizedVariant:
    report = read_report(job.folder) or {}
    smoothing, sensitivities = report.get("smoothing") or {}, report.get("sensitivities") or {}
    gain = smoothing.get("ratios_to_per_mapping", {}).get("summed_mse", {})
    return QuantizedVariant(
        name=job.variant.recipe.name,
        folder=str(job.folder),
        kept=kept,
        seconds=seconds,
        num_bytes=sum(file.stat().st_size for file in job.folder.glob("*.safetensors")),
        group_size=job.variant.group_size,
        smoothed=sum(m["chosen"] is not None for m in smoothing.get("mappings", {}).values()),
        mse_gain=next((ratio for way, ratio in gain.items() if way.startswith("all_")), None),
        spared=[unit for unit, found in sensitivities.items() if found["spared"]],
    )
