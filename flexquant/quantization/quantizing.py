# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Quantise a 16-bit model into one folder per variant, by a recipe, with one set of calibration samples."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.folder import RECIPE
from flexquant.checkpoint.output import check_free_space, prepare_output, remove_leftovers, staged_folder
from flexquant.checkpoint.schemes import is_w4a16, is_w8a8
from flexquant.checkpoint.writer import Progress
from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError
from flexquant.quantization.progress import Stage, no_stage, quiet_libraries
from flexquant.quantization.recipe import Calibration, Recipe, VariantRecipe
from flexquant.quantization.report import (
    QuantizedVariant,
    Report,
    Rows,
    find_difference,
    portable_settings,
    read_quantized,
    read_report,
    resolved_document,
    variant_inputs,
    write_report,
)
from flexquant.quantization.resolve import ResolvedVariant, resolve_variant, schemes_of
from flexquant.quantization.source_model import SourceModel, empty_model, find_folder, read_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from flexquant.quantization.loss import Reference

STAGES_BEFORE_VARIANTS = 3
"""Stages of :func:`quantize_variants` before the variants: model, calibration text, texts to measure with."""
LEAST_BITS = 4
"""Least bits that a parameter takes in a variant, whatever the recipe."""


@dataclass(frozen=True)
class _Job:
    """A variant to make in this run, and its inputs."""

    variant: ResolvedVariant
    folder: Path
    made_from: Mapping[str, object]
    rows: Rows | None
    """Calibration rows; None for a recipe that needs none."""

    def title(self, finished: bool) -> str:
        name = self.variant.recipe.name
        if finished:
            return f"{name}: {self.folder} is finished, and kept"
        if self.rows is None:
            return f"{name}: quantising without calibration"
        return f"{name}: quantising on {len(self.rows)} samples of {len(self.rows[0])} tokens"


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
    check: Callable[[Path], None] = lambda folder: None,
    progress: Callable[[str], None] = lambda message: None,
    stage: Stage = no_stage,
    verbose: bool = False,
) -> list[QuantizedVariant]:
    """Write ``output``/<name> for each variant of the recipe: a compressed-tensors checkpoint for vLLM.

    ``model`` is a folder or Hugging Face id of a 16-bit model. ``variants`` names the variants to make
    (default: all). ``calibration``, ``samples``, ``length`` (tokens in a sample) and ``seed`` replace the
    recipe's values if given; ``calibration`` is "self" (the model writes ``output``/calibration.jsonl) or
    what :func:`~flexquant.documents.texts.read_documents` takes. ``resume`` keeps variants that an earlier
    run finished from the same inputs; ``overwrite`` replaces others, each once the new one is complete.
    ``check`` may refuse the model's folder before anything is quantised. ``progress`` receives notes;
    ``stage`` is entered for each stage. Libraries' output is discarded unless ``verbose``.

    Equal inputs give equal bytes on one machine with one number of threads. A folder appears only when
    complete, with a report and ``recipe.yaml``, which reproduces it, beside the variant of ``nested_in``.

    Raises FlexQuantError, with nothing calibrated or deleted, for unusable inputs, an output that may not be
    replaced, too little disk space, and without llmcompressor; later if activations are not finite or memory
    runs out.
    """
    if importlib.util.find_spec("llmcompressor") is None:
        advice = "install flexquant[quantize] in an environment of its own"
        why = "since vLLM needs another compressed-tensors"
        raise FlexQuantError(f"quantising needs llmcompressor, which is not installed; {advice}, {why}")
    recipes = _choose(recipe, variants)
    _check_nested(recipes, recipe, Path(output))
    folder = find_folder(model, progress)
    for chosen in recipes:
        target = Path(output) / chosen.name
        remove_leftovers(target)
        if not (resume or overwrite) and read_report(target, replaceable=True) is not None:
            raise FlexQuantError(f"{target} is finished; go on with --resume, or replace it with --overwrite")
        if not resume or read_report(target, replaceable=overwrite) is None:
            prepare_output(target, [folder], overwrite=overwrite)
    data = None if calibration is None else str(calibration)
    given = {"data": data, "samples": samples, "length": length, "seed": seed}
    settings = recipe.calibration.model_copy(update={k: v for k, v in given.items() if v is not None})
    with nullcontext() if verbose else quiet_libraries(progress):
        from flexquant.quantization.oneshot import separate_experts

        with stage(f"reading {folder}"):
            source = read_source(folder)
            tokenizer = load_tokenizer(folder)
            empty = separate_experts(empty_model(source.config))
            resolved = [resolve_variant(chosen, empty, source.config.model_type) for chosen in recipes]
            check(folder)
            for variant in resolved:
                for note in variant.notes:
                    progress(f"{variant.recipe.name}: {note}")
        run = _Run(recipe, settings, Path(output), overwrite, progress, stage, source, tokenizer)
        return run.quantize(resolved, resume)


@dataclass(frozen=True)
class _Run:
    """What all variants of one call of :func:`quantize_variants` have in common."""

    recipe: Recipe
    settings: Calibration
    output: Path
    overwrite: bool
    progress: Callable[[str], None]
    stage: Stage
    source: SourceModel
    tokenizer: PreTrainedTokenizerBase

    def quantize(self, resolved: Sequence[ResolvedVariant], resume: bool) -> list[QuantizedVariant]:
        """Make the variants; with ``resume`` those that no earlier run has finished."""
        self._check_made_before(resolved)
        jobs = self._jobs(resolved)
        kept = self._find_finished(jobs) if resume else [False] * len(jobs)
        check_free_space(self.output, kept.count(False) * self.source.parameters * LEAST_BITS // 8)
        reference = self._reference(needed=not all(kept))
        results = {}
        for job, finished in zip(jobs, kept, strict=True):
            started = time.monotonic()
            unit = " layers" if job.variant.recipe.scale_distillation is None else ""
            with self.stage(job.title(finished), unit=unit) as show:
                if reference is not None and not finished:
                    self._quantize(job, reference, show)
            seconds = 0.0 if finished else time.monotonic() - started
            name = job.variant.recipe.name
            results[name] = read_quantized(job.variant, job.folder, finished, seconds)
        return [results[variant.recipe.name] for variant in resolved]

    def _check_made_before(self, resolved: Sequence[ResolvedVariant]) -> None:
        """Raise FlexQuantError for an earlier variant to nest in that is another model's or has no INT4."""
        from flexquant.quantization.within_reach import read_int4

        recipes = [variant.recipe for variant in resolved]
        for name in {r.nested_in for r in recipes if r.nested_in} - {r.name for r in recipes}:
            folder = self.output / name
            if (read_report(folder) or {})["made_from"].get("weights") != self.source.weights_sha256:
                problem = f"{folder} was made from another model than {self.source.folder}"
                raise FlexQuantError(f"{problem}; quantise '{name}' anew, or choose another folder")
            read_int4(folder)

    def _jobs(self, resolved: Sequence[ResolvedVariant]) -> list[_Job]:
        """Return a job for every variant, with calibration rows if some variant needs them.

        A variant that is nested in another comes after it.
        """
        from flexquant.quantization.calibration import calibration_rows
        from flexquant.quantization.modifiers import needs_calibration

        needs_data = [needs_calibration(variant) for variant in resolved]
        rows: Rows = []
        if any(needs_data):
            inputs = self.settings, self.source, self.tokenizer, self.output
            rows = calibration_rows(*inputs, self.overwrite, self.progress, self.stage)
        else:
            with self.stage("no calibration text is needed"):
                pass
        jobs: dict[str, _Job] = {}
        each = zip(resolved, needs_data, strict=True)
        for variant, needs in sorted(each, key=lambda found: found[0].recipe.nested_in is not None):
            used, name = rows if needs else None, variant.recipe.name
            given = self.source, self.recipe.variants[name], used, self.settings.seed
            int4, nested_in = variant.recipe.nested_in, None
            if int4 is not None:
                made = jobs[int4].made_from if int4 in jobs else None
                nested_in = made or (read_report(self.output / int4) or {}).get("made_from")
            jobs[name] = _Job(variant, self.output / name, variant_inputs(*given, nested_in), used)
        return list(jobs.values())

    def _reference(self, *, needed: bool) -> Reference | None:
        """Return the 16-bit model's answers to the texts with which variants are measured; None: none are."""
        from flexquant.quantization.loss import read_reference
        from flexquant.quantization.oneshot import explained_memory, load_whole

        if not needed:
            with self.stage("all variants are finished"):
                return None
        with (
            self.stage("the 16-bit model reads texts to measure the variants with"),
            explained_memory("reading texts with the 16-bit model", "free memory"),
        ):
            reference = read_reference(load_whole(self.source), self.tokenizer)
        for kind in reference.rows.keys() - reference.answers.keys():
            self.progress(f"what variants lose on {kind} is not measured: the 16-bit model itself gives NaN")
        return reference

    def _find_finished(self, jobs: Sequence[_Job]) -> list[bool]:
        """Return which variants are finished; raise FlexQuantError for other folders, unless replaceable."""
        finished, problems = [], []
        for job in jobs:
            problem: str | None = "is missing"
            if (report := read_report(job.folder, replaceable=self.overwrite)) is not None:
                self.progress(f"{job.variant.recipe.name}: comparing {job.folder} with its hashes")
                if problem := find_difference(job.folder, report, job.made_from):
                    problems.append(f"{job.folder} {problem}")
            finished.append(problem is None)
        if problems and not self.overwrite:
            advice = "replace what differs with --overwrite, or choose another folder"
            raise FlexQuantError(f"{'; '.join(problems)}; {advice}")
        return finished

    def _quantize(self, job: _Job, reference: Reference, show: Progress | None) -> None:
        from flexquant.quantization.loss import measure_loss
        from flexquant.quantization.oneshot import explained_memory, quantize_in_memory, save_model
        from flexquant.quantization.within_reach import read_int4

        variant, settings, source = job.variant, self.settings, self.source
        calibration = None
        if job.rows is not None:
            calibration = {**portable_settings(settings), "rows_sha256": digest_of(job.rows)}
        with explained_memory(f"quantising '{variant.recipe.name}'"):
            inputs = self.tokenizer, job.rows, settings.seed
            nested_in = variant.recipe.nested_in
            int4 = None if nested_in is None else read_int4(self.output / nested_in)
            model, resolved, findings = quantize_in_memory(variant, source, *inputs, show, int4)
            losses = measure_loss(model, reference)
            with staged_folder(job.folder, overwrite=self.overwrite) as stage:
                save_model(model, source, variant, stage)
                del model
                about = self.recipe.description, settings, source
                document = resolved_document(resolved, *about, job.rows, losses)
                (stage / RECIPE).write_text(document, encoding="utf-8")
                report: Report = {
                    "made_from": job.made_from,
                    "calibration": calibration,
                    "group_size": variant.group_size,
                    "quantized_linears": len(variant.linears),
                    "notes": list(variant.notes),
                    **findings,
                }
                write_report(stage, report)


def _check_nested(chosen: Sequence[VariantRecipe], recipe: Recipe, output: Path) -> None:
    """Raise FlexQuantError for a variant to be nested that is not W8A8, or in what is not W4A16 or there."""
    for variant in chosen:
        if (name := variant.nested_in) is None:
            continue
        if not any(map(is_w8a8, schemes_of(variant))):
            problem = "and is not quantised to W8A8 with one scale a row; remove it"
        elif (other := recipe.variants.get(name)) is not None and not any(map(is_w4a16, schemes_of(other))):
            problem = "which is not quantised to W4A16; name a variant that is, or remove it"
        elif name not in (made.name for made in chosen) and read_report(output / name) is None:
            problem = f"which neither this run makes nor {output} has; quantise '{name}' into {output} first"
        else:
            continue
        raise FlexQuantError(f"{variant.place} has nested_in: {name}, {problem}")


def _choose(recipe: Recipe, names: Sequence[str] | None) -> list[VariantRecipe]:
    names = list(recipe.variants) if names is None else list(dict.fromkeys(names))
    known = ", ".join(recipe.variants)
    if unknown := [name for name in names if name not in recipe.variants]:
        raise FlexQuantError(f"'{unknown[0]}' is no variant of the recipe '{recipe.name}'; it has {known}")
    if not names:
        raise FlexQuantError(f"no variant is chosen; the recipe has {known}")
    return [recipe.variants[name] for name in names]
