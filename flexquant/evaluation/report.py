# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The document of an evaluation: written as JSON (``quality.json``) and as a Markdown table, and drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, NotRequired, TypedDict

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import write_text
from flexquant.documents.results import align_cells, new_figure
from flexquant.errors import FlexQuantError
from flexquant.policy.pass_times import device_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _with_error(quality: JsonObject, name: str) -> str:
    value, error = quality[name], quality[f"{name}_error"]
    return _number(value, "{:.4f}") + ("" if error is None else f" ± {error:.4f}")


def _plans(result: Result) -> str:
    if "decode_plan" not in result:
        return "-"
    return " > ".join(dict.fromkeys([result["prefill_plan"], result["decode_plan"]]))


def _same_answers(result: Result) -> str:
    answers = result.get("answers")
    return f"{answers['identical']}/{answers['questions']}, {answers['matched']:.0%}" if answers else "-"


COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("policy", lambda r: r["policy"]),
    ("batch", lambda r: str(r["batch_size"])),
    ("prefill > decode", _plans),
    ("perplexity", lambda r: f"{r['quality']['perplexity']:.3f}"),
    ("log-ppl diff.", lambda r: _with_error(r["quality"], "log_perplexity_difference")),
    ("mean KL", lambda r: _with_error(r["quality"], "mean_kl")),
    ("p99 KL", lambda r: _number(r["quality"]["p99_kl"], "{:.3g}")),
    ("top-1", lambda r: _number(r["quality"]["top1_agreement"], "{:.1%}")),
    ("same answers", _same_answers),
    ("B/weight", lambda r: f"{r['bytes_per_weight']['resident']:.2f}"),
    ("decode", lambda r: f"{r['bytes_per_weight']['decode']:.2f}"),
    ("same as", lambda r: "{policy} at {batch_size}".format(**same) if (same := r.get("same_as")) else "-"),
)


def format_quality_table(document: Evaluation) -> str:
    """Return the results as an aligned Markdown table, followed by notes on how they were measured."""
    columns = [[title, *map(cell, document["results"])] for title, cell in COLUMNS]
    told = [column for column in columns if {*column[1:]} != {"-"}]
    rows = align_cells([list(row) for row in zip(*told, strict=True)])
    rows.insert(1, ["-" * len(title) for title in rows[0]])
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", *_notes(document)])


@contextmanager
def writable_folder(folder: str | Path, option: str) -> Iterator[Path]:
    """Make a folder, writable, before measuring takes hours; if the block fails, remove it if it is empty.

    A folder that was there stays. Raises FlexQuantError, which names ``option``, if it cannot be written.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise FlexQuantError(f"cannot write into {folder} ({e.strerror}); give another {option}") from e
    try:
        yield folder
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def write_results(document: Evaluation, folder: str | Path) -> None:
    """Write ``quality.json`` and ``quality.md``; raise FlexQuantError, which says where numbers are kept."""
    folder = Path(folder)
    numbers = json.dumps(document, indent=2) + "\n"
    table = f"# Quality of {document['checkpoint']}\n\n{format_quality_table(document)}\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in {folder / "quality.json": numbers, folder / "quality.md": table}.items():
            write_text(file, text)
    except (OSError, FlexQuantError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise FlexQuantError(f"cannot write {file} ({reason}); {_keep_aside(numbers)}") from e


def _keep_aside(numbers: str) -> str:
    """Write the numbers into a temporary file; return a phrase that says where they are."""
    try:
        file = Path(gettempdir(), f"quality-{token_hex(8)}.json")
        write_text(file, numbers)
    except OSError as e:
        return f"nor a temporary file ({e.strerror}), so the printed table is all that is kept"
    return f"the numbers are kept in {file} instead"


def _notes(document: Evaluation) -> list[str]:
    settings, text = document["settings"], document["text"]
    versions = " ".join(f"{name} {version}" for name, version in document["versions"].items())
    greedy = f"{document['questions']} greedy ones of up to {settings['answer_tokens']} tokens"
    share = "the mean share of the reference's answer before the first difference"
    answers = f"Same answers: of {greedy}, and {share}."
    notes = [
        f"{settings['samples']} rows of {text['file']} (SHA-256 {text['sha256'][:12]}), each "
        f"{settings['prompt_tokens']} tokens of prompt and {settings['tokens']} forced tokens, seed "
        f"{settings['seed']}. KL divergence and log-perplexity are in nats, with standard errors over rows. "
        "B/weight: bytes held for a weight of the decoder layers, scales included; decode: bytes that one "
        "decode pass reads.",
        *([answers] if any(result.get("answers") for result in document["results"]) else []),
        f"{device_name({**document})}, {versions}.",
    ]
    for result in document["results"]:
        for deviation in result.get("deviations", ()):
            notes.append(f"Warning: {result['policy']}, batch {result['batch_size']}: {deviation}.")
    return [line for note in notes for line in (note, "")][:-1]


def draw_quality(document: Evaluation) -> Figure:
    """Draw mean KL, else perplexity, over decode bytes a weight; raise FlexQuantError without matplotlib."""
    figure = new_figure(7, 5)
    axes = figure.subplots()
    has_kl = document["reference"] is not None
    points: dict[tuple[float, float, float | None], dict[str, list[str]]] = {}
    for result in document["results"]:
        if "decode_plan" in result:
            quality = result["quality"]
            y = (quality["mean_kl"], quality["mean_kl_error"]) if has_kl else (quality["perplexity"], None)
            names = points.setdefault((result["bytes_per_weight"]["decode"], *y), {})
            names.setdefault(result["policy"], []).append(str(result["batch_size"]))
    for marker, ((x, mean, error), names) in zip(cycle("osD^vPX"), points.items(), strict=False):
        label = ", ".join(f"{policy} at {', '.join(sizes)}" for policy, sizes in names.items())
        axes.errorbar(x, mean, yerr=error, fmt=marker, capsize=3, label=label)
    axes.margins(x=0.1, y=0.2)
    axes.grid(alpha=0.3)
    axes.set(
        xlabel="bytes read by a decode pass, per weight of the decoder layers (16-bit: 2.0)",
        ylabel="mean KL divergence to 16 bit, nats" if has_kl else "perplexity",
        yscale="log" if has_kl else "linear",
        title=f"{document['checkpoint']}: quality of decoding by policy",
    )
    figure.legend(loc="outside lower center")
    return figure
