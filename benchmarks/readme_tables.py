# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write the tables of the pages from the committed results: each stands between two comments.

The first comment names a function of this file or of speed/page_tables.py, and the results that it takes.

python -m benchmarks.readme_tables           # write them
python -m benchmarks.readme_tables --check   # fail if they are not what the results say

Tables without these comments are of results whose scripts are gone (see benchmarks/README.md).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import chain
from statistics import fmean
from typing import Any

from benchmarks.generation.results import table as answers_table
from benchmarks.result import RESULTS, markdown, model_name, read_result
from benchmarks.speed import page_tables

PAGES = sorted(RESULTS.parent.glob("*.md"))
BLOCK = re.compile(r"(<!-- from results: (\w+)((?: \S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
METHODS = {
    "w8a8": "W8A8: SmoothQuant searched per layer + GPTQ (`unrotated`, symmetric)",
    "w8a8-alpha06": "W8A8: SmoothQuant 0.6 + GPTQ",
    "w4a16": "W4A16: GPTQ on normalised tokens, importance-weighted scales (default)",
    "w4a16-g32": "the same, groups of 32",
    "w4a16-gptq-imatrix": "W4A16: GPTQ, importance-weighted scales",
    "w4a16-gptq": "W4A16: GPTQ as llm-compressor does it",
    "w4a16-awq": "W4A16: AWQ without v → o, rounding to nearest",
    "w4a16-rtn": "W4A16: rounding to nearest",
}


def quality_cells(result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return the change of perplexity, and the KL divergence with its standard error."""
    quality = result["quality"]
    change = quality["perplexity"] / reference["quality"]["perplexity"] - 1
    return [f"{change:+.1%}", f"{quality['mean_kl']:.4f} ± {quality['mean_kl_error']:.4f}"]


def policies(file: str) -> str:
    """Return a row for each policy and batch size, but for those that only repeat the same passes."""
    reference, *results = read_result(file)["results"]
    rows = [
        [
            f"`{result['policy'].removesuffix('.yaml')}`",
            str(result["batch_size"]),
            *quality_cells(result, reference),
            *(f"{result['bytes_per_weight'][size]:.2f}" for size in ("resident", "decode")),
        ]
        for result in results
        if result["quality"]["mean_kl"] is not None
        and (result.get("same_as") or {}).get("policy") != result["policy"]
    ]
    header = ["policy", "batch", "perplexity", "KL, nats", "bytes/weight held", "read in decode"]
    return markdown(header, rows)


def methods() -> str:
    """Return a row for each way to quantise."""
    reference, *results = read_result("quality-methods/quality.json")["results"]
    found = {result["policy"]: result for result in results}
    rows = [
        [text, *quality_cells(found[name], reference), f"{found[name]['bytes_per_weight']['decode']:.2f}"]
        for name, text in METHODS.items()
    ]
    return markdown(["how", "perplexity", "KL, nats", "bytes/weight"], rows)


def nesting(*files: str) -> str:
    """Return what W8A8 lost by itself and nested, means over the kinds of text, for each pair."""
    rows = []
    for name, pair in chain.from_iterable(read_result(file)["pairs"].items() for file in files):
        if "refused" in pair:
            rows.append([name, "refused", *[""] * 6])
            continue
        nested, cells = pair["nested"], []
        for what in ("kl", "perplexity"):
            for losses in pair["losses"].values():
                mean = fmean(loss[what] for loss in losses.values())
                cells.append(f"{mean:.4f}" if what == "kl" else f"{mean:+.2%}")
        bits = f"{nested['bits_with_source']:.2f}"
        rows.append([name, bits, f"{nested['changed']:.1%}", f"{nested['added_noise']:.2f}", *cells])
    header = ["pair", "bits a weight", "changed", "added noise", "KL: W8A8", "nested"]
    return markdown([*header, "perplexity: W8A8", "nested"], rows)


def default_recipe() -> str:
    """Return what W8A8 lost by two recipes: means over the kinds of text, and the largest of one."""
    rows = []
    for model, recipes in read_result("default-recipe.json")["losses"].items():
        cells = []
        for kinds in recipes.values():
            kl, change = ([loss[what] for loss in kinds.values()] for what in ("kl", "perplexity"))
            cells.append(f"{fmean(change):+.1%}, {fmean(kl):.4f} ({max(change):+.1%}, {max(kl):.4f})")
        rows.append([model, *cells])
    return markdown(["model", *recipes], rows)


def policies_by_text(folder: str) -> str:
    """Return a row for each text on which the same policies were evaluated."""
    found: dict[str, list[list[str]]] = {}
    for file in sorted((RESULTS / folder).glob("*.json")):
        reference, *results = read_result(f"{folder}/{file.name}")["results"]
        found[file.stem] = [
            [f"`{result['policy']}`", *quality_cells(result, reference)] for result in results
        ]
    rows = [[text, *chain.from_iterable(cells[1:] for cells in of_text)] for text, of_text in found.items()]
    header = [f"{cells[0]}: {what}" for cells in next(iter(found.values())) for what in ("perplexity", "KL")]
    return markdown(["text", *header], rows)


def generation() -> str:
    return answers_table(read_result("generation-one-copy.json"))


def head_gain() -> str:
    """Return the predicted time of a decode pass with an lm_head in INT8, over that with one in 16 bit."""
    devices = read_result("head-gain.json")["devices"]
    columns = [("w4a16", "1"), ("w4a16", "32"), ("w8a8", "1")]
    rows = [
        [
            model,
            f"{found['w4a16']['head_share']:.0%}",
            *(f"{of[model][s]['time'][count]:.2f}" for of in devices.values() for s, count in columns),
        ]
        for model, found in next(iter(devices.values())).items()
    ]
    named = [f"{device.upper()}: {s}, {count}" for device in devices for s, count in columns]
    return markdown(["model", "head, of W4A16's bytes", *named], rows)


def token_time() -> str:
    """Return where the time of a pass goes in each engine, in ms."""
    rows = []
    for name, found in read_result("token-time.json").items():
        of, operators = found["milliseconds"], found["operators"]
        loop = of["step"] - of["forward"] - of["logits"]
        cells = of["step"], operators["products"], operators["attention"], operators["small"], loop
        rows.append([name, *(f"{ms:.1f}" for ms in cells)])
    return markdown(["engine", "a pass", "products", "attention", "small operators", "vLLM's loop"], rows)


def own_cost() -> str:
    """Return what FlexQuant adds to a decode pass of each model, in percent with the interval."""
    rows = []
    for model, found in read_result("own-cost.json").items():
        percents = (f"{100 * (found[end] - 1):+.2f} %" for end in ("ratio", "low", "high"))
        rows.append(
            [
                model_name(model),
                f"{found['pass_ms']:.1f}",
                *percents,
            ]
        )
    return markdown(["model", "ms a pass", "time", "at least", "at most"], rows)


def merging() -> str:
    found, wide, awq = (
        read_result("merge.json"),
        read_result("merge-8192.json"),
        read_result("merge-awq.json"),
    )
    rows = [
        [
            name,
            f"{one['input_bytes'] / 1e9:.1f}",
            f"{one['merge_to_cp']:.1f}",
            f"{one['merge_without_comparing_to_cp']:.1f}",
            f"{one['merge_to_cp'] / one['merge_to_cp_and_sync']:.1f}",
            f"{one['peak_rss_above_interpreter_bytes'] / 1e6:.0f}",
        ]
        for name, one in (
            (f"{found['hidden_size']} wide", found),
            (f"{wide['hidden_size']} wide", wide),
            ("INT4 in AWQ's format", awq),
        )
    ]
    header = ["layers", "GB", "merge", "without comparing", "`cp -r` and `sync`", "peak memory, MB"]
    return markdown(header, rows)


TABLES = (
    *(
        policies,
        policies_by_text,
        methods,
        nesting,
        default_recipe,
        generation,
        head_gain,
        token_time,
        own_cost,
        merging,
    ),
    *page_tables.TABLES,
)


def main() -> int:
    tables: dict[str, Callable[..., str]] = {table.__name__: table for table in TABLES}
    wrong = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = BLOCK.sub(lambda m: f"{m[1]}{tables[m[2]](*m[3].split())}\n{m[4]}", text)
        comments = re.findall("^<!--", text, re.MULTILINE)
        wrong |= written != text or len(comments) != 2 * len(BLOCK.findall(text))
        if "--check" not in sys.argv[1:]:
            page.write_text(written, encoding="utf-8")
    return int(wrong and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
