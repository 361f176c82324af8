# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plot each policy's quality over the bytes that one decode pass reads per weight."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import staged_file
from flexquant.documents.figures import new_figure
from flexquant.errors import FlexQuantError


def save_quality_plot(document: JsonObject, files: list[Path]) -> None:
    """Draw mean KL (log scale; perplexity without a reference) over decode bytes per weight into ``files``.

    Runs with equal numbers share one point, labelled with all their names. Raises FlexQuantError without
    matplotlib, and for a file that cannot be written or whose suffix matplotlib does not know.
    """
    figure, canvas = new_figure(7, 5)
    axes = figure.subplots()
    has_kl = document["reference"] is not None
    for marker, ((x, y, error), label) in zip(
        cycle("osD^vPX"), _points(document, has_kl).items(), strict=False
    ):
        axes.errorbar(x, y, yerr=error, fmt=marker, capsize=3, label=label)
    if has_kl:
        axes.set_yscale("log")
    axes.margins(x=0.1, y=0.2)
    figure.legend(loc="outside lower center")
    axes.set_xlabel("bytes read by a decode pass, per weight of the decoder layers (16-bit: 2.0)")
    axes.set_ylabel("mean KL divergence to 16 bit, nats" if has_kl else "perplexity")
    axes.set_title(f"{document['checkpoint']}: quality of decoding by policy")
    axes.grid(alpha=0.3)
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with staged_file(file) as partial:
                canvas.print_figure(partial, format=file.suffix[1:])
        except OSError as e:
            raise FlexQuantError(f"cannot write the plot {file} ({e.strerror}); name another file") from e
        except ValueError as e:
            raise FlexQuantError(f"cannot write the plot {file} ({e}); end its name in .png or .svg") from e


def _points(document: JsonObject, has_kl: bool) -> dict[tuple[float, float, float | None], str]:
    """Return the plot's points: (bytes per weight, quality, error of the quality) -> names of the runs."""
    names: dict[tuple[float, float, float | None], dict[str, list[int]]] = {}
    results = [r for r in document["results"] if "decode_plan" in r]
    for result in results:
        quality = result["quality"]
        y, error = (quality["mean_kl"], quality["mean_kl_error"]) if has_kl else (quality["perplexity"], None)
        point = result["bytes_per_weight"]["decode"], y, error
        names.setdefault(point, {}).setdefault(result["policy"], []).append(result["batch_size"])
    sizes = {r["policy"]: sum(o["policy"] == r["policy"] for o in results) for r in results}
    return {
        point: ", ".join(
            policy if len(batch_sizes) == sizes[policy] else f"{policy} at {', '.join(map(str, batch_sizes))}"
            for policy, batch_sizes in policies.items()
        )
        for point, policies in names.items()
    }
