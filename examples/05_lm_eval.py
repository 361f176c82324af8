# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run tasks of lm-evaluation-harness against a served merged checkpoint, once for every policy.

python examples/05_lm_eval.py MERGED_CHECKPOINT --tasks arc_easy,gsm8k --policies w8a8,phase,w4a16

lm-evaluation-harness talks to the server over HTTP, so it needs no vLLM and lives in an environment of its
own (beside vLLM it changes the release of python-dateutil):

    python3 -m venv .venv/lm-eval && .venv/lm-eval/bin/pip install "lm-eval[api]>=0.4.13" transformers

Pass --lm-eval .venv/lm-eval/bin/lm_eval, or have lm_eval on PATH. Tasks that score given answers by their
loglikelihood (arc_easy, hellaswag, mmlu) run prefill passes only: there ``phase`` is ``w8a8``. What a policy
does in decode shows in tasks that generate (gsm8k, ifeval).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vllm_server import vllm_serve

from flexquant.documents.results import table_lines

MISSING = """lm_eval is not at {!r}, beside this Python or on PATH. Install it in an environment of its own:
    python3 -m venv .venv/lm-eval && .venv/lm-eval/bin/pip install "lm-eval[api]>=0.4.13" transformers
and pass --lm-eval .venv/lm-eval/bin/lm_eval"""


def evaluate(lm_eval: str, url: str, args: argparse.Namespace) -> dict:
    """Run lm_eval against the server at ``url``, and return what it wrote."""
    model_args = {
        "model": args.checkpoint,
        "base_url": f"{url}/completions",
        "tokenizer": args.checkpoint,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,  # vLLM takes token ids, so both count the same tokens
        "num_concurrent": args.concurrent,
        "max_length": args.max_length,
    }
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", json.dumps(model_args)]
    command += ["--tasks", args.tasks]
    if args.limit is not None:
        command += ["--limit", str(args.limit)]
    if args.include_path:
        command += ["--include_path", args.include_path]
    with tempfile.TemporaryDirectory() as folder:
        # lm_eval's own table is not shown; its progress and its errors are.
        done = subprocess.run([*command, "--output_path", folder], stdout=subprocess.DEVNULL)
        written = list(Path(folder).rglob("results_*.json"))
        if done.returncode or not written:
            sys.exit(f"lm_eval ended with code {done.returncode} and {len(written)} results")
        return json.loads(written[0].read_text())


def print_table(runs: dict[str, dict]) -> None:
    """Print a row for every metric of every task: its value and standard error under each policy."""
    rows = [["task", "metric", *(Path(policy).name for policy in runs)]]
    for task, metrics in next(iter(runs.values()))["results"].items():
        for metric, value in metrics.items():
            name, _, chosen = metric.partition(",")  # "exact_match,strict-match": the metric and its filter
            if name.endswith("_stderr") or not chosen or not isinstance(value, int | float):
                continue
            row = [task, name if chosen == "none" else f"{name} ({chosen})"]
            for run in runs.values():
                error = run["results"][task].get(f"{name}_stderr,{chosen}")
                after = f" ± {error:.4f}" if isinstance(error, float) else ""
                row.append(f"{run['results'][task][metric]:.4f}{after}")
            rows.append(row)
    print("", *table_lines(rows, numbers=range(2, len(rows[0]))), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="folder written by 'flexquant merge'")
    parser.add_argument("--tasks", required=True, help="tasks of lm_eval, separated by commas")
    parser.add_argument("--policies", default="w8a8,phase,w4a16", help="names or YAML files (%(default)s)")
    parser.add_argument("--limit", type=int, help="only the first N samples of every task")
    parser.add_argument("--include-path", help="folder with tasks of your own")
    parser.add_argument("--output", type=Path, help="write what lm_eval measured to this JSON file")
    parser.add_argument("--lm-eval", default="lm_eval", help="the lm_eval command (%(default)s)")
    parser.add_argument("--concurrent", type=int, default=4, help="requests at a time (%(default)s)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens a request (%(default)s)")
    args = parser.parse_args()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    lm_eval = shutil.which(args.lm_eval, path=path)
    if lm_eval is None:
        sys.exit(MISSING.format(args.lm_eval))

    runs: dict[str, dict] = {}
    for policy in args.policies.split(","):
        options = ["--additional-config", json.dumps({"flexquant": {"policy": policy}})]
        options += ["--max-model-len", str(args.max_length), "--enforce-eager"]
        options += ["--max-num-seqs", str(args.concurrent)]
        print(f"Policy {policy}: starting vllm serve {args.checkpoint} ...", flush=True)
        with vllm_serve(args.checkpoint, *options) as url:
            start = time.monotonic()
            measured = evaluate(lm_eval, url, args)
        runs[policy] = {key: measured[key] for key in ("results", "n-samples", "versions", "lm_eval_version")}
        runs[policy]["seconds"] = round(time.monotonic() - start, 1)
        if args.output:  # after every policy: a later one may fail
            args.output.write_text(json.dumps({"checkpoint": args.checkpoint, "policies": runs}, indent=2))
    print_table(runs)


if __name__ == "__main__":
    main()
