# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write the numbers of the README pages from the committed results: each stands between two comments.

python -m benchmarks.readme_tables           # write them
python -m benchmarks.readme_tables --check   # fail if they are not what the results say
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import left_out_tables, one_copy_tables, speed_tables
from benchmarks.calibration_table import calibration_table
from benchmarks.decode_quality_tables import layered, trigger
from benchmarks.serving_tables import (
    disaggregated,
    generation,
    generation_one_copy,
    layers_in_use,
    loaded,
    memory,
    operators,
    own_cost,
    own_time,
    read,
    starting,
    switching,
    watching,
)
from benchmarks.table import markdown

ROOT = Path(__file__).parents[1]
ELSEWHERE = (ROOT / "examples/disaggregated/README.md", ROOT / "merge/README.md")
PAGES = [*sorted((ROOT / "benchmarks").glob("*.md")), *ELSEWHERE]
BLOCK = re.compile(r"(<!-- from results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

METHODS = {
    "w8a8": "W8A8: SmoothQuant searched per layer + GPTQ (default)",
    "w8a8-alpha06": "W8A8: SmoothQuant 0.6 + GPTQ",
    "w8a8-alpha05": "W8A8: SmoothQuant 0.5 + GPTQ",
    "w4a16": "W4A16: GPTQ on normalised tokens, importance-weighted scales (default)",
    "w4a16-norm2": "the same, scales searched by squared error",
    "w4a16-g32": "the same, groups of 32",
    "w4a16-spared-16bit": "the same, the most sensitive 5 % of weights in 16 bit",
    "w4a16-spared-w8a8": "the same, the most sensitive 5 % of weights in W8A8",
    "w4a16-gptq-imatrix": "W4A16: GPTQ, importance-weighted scales",
    "w4a16-gptq": "W4A16: GPTQ as llm-compressor does it",
    "w4a16-awq": "W4A16: AWQ without v → o, rounding to nearest",
    "w4a16-rtn-mse": "W4A16: rounding to nearest, scales clipped by MSE",
    "w4a16-rtn": "W4A16: rounding to nearest",
}


def quality_cells(result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    quality = result["quality"]
    change = quality["perplexity"] / reference["quality"]["perplexity"] - 1
    kl = "–" if quality["mean_kl"] is None else f"{quality['mean_kl']:.4f} ± {quality['mean_kl_error']:.4f}"
    top = "–" if quality["top1_agreement"] is None else f"{quality['top1_agreement']:.1%}"
    return [f"{quality['perplexity']:.2f}", "–" if result is reference else f"{change:+.1%}", kl, top]


def policies() -> str:
    return policies_of("quality/quality.json")


def demo_policies() -> str:
    """Return the table of policies for the checkpoint that `make demo` builds."""
    return policies_of("quality-demo/quality.json")


def demo_policies_untrained() -> str:
    """Return the same table for a checkpoint whose scales were not trained."""
    return policies_of("quality-demo-untrained/quality.json")


def one_copy_policies() -> str:
    """Return the table of one copy, two copies, and what lies between."""
    return policies_of("quality-one-copy/quality.json")


def policies_of(file: str) -> str:
    reference, *results = read(file)["results"]
    rows = []
    for result in [reference, *(r for r in results if not same_policy(r))]:
        name = f"`{result['policy']}`" if result is not reference else "16 bit"
        answers = result.get("answers")
        size = result["bytes_per_weight"]
        rows.append(
            [
                name,
                str(result["batch_size"]),
                *quality_cells(result, reference),
                f"{answers['identical']}/{answers['questions']}" if answers else "–",
                f"{size['resident']:.2f}",
                f"{size['decode']:.2f}",
            ]
        )
    header = ["policy", "batch", "perplexity", "change", "KL to 16 bit (nats)", "same top token"]
    return markdown([*header, "same answers", "bytes/weight held", "read in decode"], rows)


def same_policy(result: dict[str, Any]) -> bool:
    """Return whether a row only repeats the same policy at another batch size."""
    return (result.get("same_as") or {}).get("policy") == result["policy"]


def methods() -> str:
    reference, *results = read("quality-methods/quality.json")["results"]
    found = {result["policy"]: result for result in results}
    rows = [["16 bit", *quality_cells(reference, reference), "2.00"]]
    for name, text in METHODS.items():
        size = found[name]["bytes_per_weight"]["decode"]
        rows.append([text, *quality_cells(found[name], reference), f"{size:.2f}"])
    header = ["how", "perplexity", "change", "KL to 16 bit (nats)", "same top token", "bytes/weight"]
    return markdown(header, rows)


def calibration() -> str:
    """Return what variants lose that were calibrated on different texts, the model's own among them."""
    return calibration_table(read("calibration.json"))


def calibration_self() -> str:
    """Return what variants lose with `--calibration self`, beside Python's documentation alone."""
    return calibration_table(read("calibration-self.json"))


def int4_smollm2() -> str:
    """Return what the ways to W4A16 in groups of 32 lose on SmolLM2-135M-Instruct."""
    return calibration_table(read("int4-smollm2.json"), "how")


def int4_qwen3() -> str:
    """Return what the ways to W4A16 lose on the small Qwen3 of benchmarks/small_model.py."""
    return calibration_table(read("int4-qwen3.json"), "how")


def smoothing() -> str:
    found = read("smoothing.json")["smoothing"]
    ratios, best = found["ratios_to_per_mapping"], found["best_single_alpha"]
    summed, relative = ratios["summed_mse"], ratios["relative_mse"]
    return (
        f"Searching SmoothQuant's strength for each of {len(found['mappings'])} mappings leaves "
        f"{summed['all_0.5']:.2f} times less output MSE, summed over the layers, than 0.5 everywhere, "
        f"{summed['best_single']:.2f} times less than the best single strength ({best}) "
        f"and {summed['none']:.2f} times less than no smoothing; relative to each layer's output "
        f"{relative['all_0.5']:.2f}, {relative['best_single']:.2f} and {relative['none']:.2f} times."
    )


def merging() -> str:
    found, wide, awq = read("merge.json"), read("merge-8192.json"), read("merge-awq.json")
    verifying = ""
    if "verify_to_read" in found:
        verifying = (
            f". `flexquant verify` took {found['verify_to_read']:.1f} times as long as reading the files "
            f"from the disk, and {found['verify_to_read_cached']:.1f} times where they were in memory"
        )
    merge, alone = found["merge_to_cp"], found["merge_without_comparing_to_cp"]
    synced = merge / found["merge_to_cp_and_sync"]
    return (
        f"Merging {found['input_bytes'] / 1e9:.1f} GB on two CPU cores took {merge:.1f} times as long as "
        f"`cp -r` of the same bytes ({alone:.1f} times without comparing the weights; `cp -r` and `sync` "
        "together took "
        f"{synced:.1f} times as long), and at most "
        f"{found['peak_rss_above_interpreter_bytes'] / 1e6:.0f} MB of memory{verifying}. Of layers "
        f"{wide['hidden_size']} wide, {wide['input_bytes'] / 1e9:.1f} GB took {wide['merge_to_cp']:.1f} "
        f"times as long as `cp -r`, and {wide['merge_without_comparing_to_cp']:.1f} times without comparing. "
        f"With the INT4 source in AWQ's format, which merging converts, {awq['input_bytes'] / 1e9:.1f} GB "
        f"took {awq['merge_to_cp']:.1f} times as long as `cp -r` "
        f"({awq['merge_without_comparing_to_cp']:.1f} times without comparing), and "
        f"{awq['peak_rss_above_interpreter_bytes'] / 1e6:.0f} MB."
    )


def merging_memory() -> str:
    found, awq = read("merge.json"), read("merge-awq.json")
    return (
        f"Merging {found['input_bytes'] / 1e9:.1f} GB took at most "
        f"{found['peak_rss_above_interpreter_bytes'] / 1e6:.0f} MB of memory, PyTorch included "
        "([measured](../benchmarks/SERVER.md#merging)); a larger model takes no more. "
        f"With a source in AWQ's format it took {awq['peak_rss_above_interpreter_bytes'] / 1e6:.0f} MB: each "
        "thread holds the tensor that it converts."
    )


def main() -> int:
    functions = (
        policies,
        demo_policies,
        demo_policies_untrained,
        one_copy_policies,
        methods,
        calibration,
        calibration_self,
        int4_smollm2,
        int4_qwen3,
        smoothing,
        merging,
        merging_memory,
    )
    servers = (
        own_cost,
        own_time,
        watching,
        switching,
        starting,
        layers_in_use,
        loaded,
        memory,
        disaggregated,
        operators,
    )
    quality = (generation, generation_one_copy, layered, trigger)
    of_modules = (*speed_tables.BLOCKS, *one_copy_tables.BLOCKS, *left_out_tables.BLOCKS)
    blocks = {f.__name__: f for f in (*functions, *servers, *quality, *of_modules)}
    wrong = False
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]()}\n{match[3]}", text)
        wrong |= written != text
        if "--check" not in sys.argv[1:]:
            page.write_text(written, encoding="utf-8")
    return int(wrong and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
