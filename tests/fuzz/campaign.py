# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A long run of all fuzzing targets, and its record.

    python -m tests.fuzz.campaign --work FOLDER [TARGET=EXECUTIONS ...]

runs each target that often, in parts, each from the inputs that the parts before have kept in FOLDER. After
every part the record, tests/fuzz/campaign.json, gets its numbers added, and what the parts found new goes
into the corpus, tests/fuzz/found.zip. A finding ends the campaign; its input lies in the present folder.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flexquant.measuring.machine import describe_command, describe_machine, describe_versions
from tests.fuzz.corpus import keep

RECORD = Path(__file__).parent / "campaign.json"
PART = 1_000_000
TARGETS = {
    "policy": 400_000,
    "recipe": 100_000,
    "device": 100_000,
    "yaml_document": 200_000,
    "merged_config": 3_200_000,
    "safetensors_header": 3_000_000,
    "safetensors_index": 3_000_000,
    "sources": 20_000,
}


def run_part(target: str, executions: int, seed: int, folder: Path) -> dict[str, float]:
    """Run one part in ``folder``, which keeps what it finds; return libFuzzer's own final numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run", target, "--runs", str(executions)]
    command += ["--seed", str(seed), "--keep", str(folder)]
    start = time.monotonic()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{target}, seed {seed}: a finding.\n{done.stderr[-4000:]}")
    stats = {name: int(value) for name, value in re.findall(r"stat::(\w+):\s+(\d+)", done.stderr)}
    coverage = re.findall(r"cov: (\d+)", done.stderr)[-1]
    return {
        "executions": stats["number_of_executed_units"],
        "seconds": time.monotonic() - start,
        "peak_rss_mib": stats["peak_rss_mb"],
        "branches": int(coverage),
    }


def read_record() -> dict[str, Any]:
    try:
        return json.loads(RECORD.read_text())
    except FileNotFoundError:
        return {"targets": {}}


def add_to_record(target: str, part: dict[str, float]) -> None:
    """Add a part to the record: executions and seconds are summed, memory and branches keep their maximum."""
    document = read_record()
    so_far = document["targets"].setdefault(target, dict.fromkeys(part, 0) | {"parts": 0})
    for name, value in part.items():
        so_far[name] = so_far[name] + value if name in ("executions", "seconds") else max(so_far[name], value)
    so_far["seconds"] = round(so_far["seconds"], 1)
    so_far["parts"] += 1
    document |= {
        "command": describe_command(),
        "machine": describe_machine(),
        "versions": describe_versions() | {"atheris": version("atheris")},
        "executions": sum(target["executions"] for target in document["targets"].values()),
    }
    RECORD.write_text(json.dumps(document, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for what is found")
    parser.add_argument("targets", nargs="*", metavar="TARGET=EXECUTIONS", help=f"default: {TARGETS}")
    args = parser.parse_args()
    wanted = dict(text.split("=") for text in args.targets) or TARGETS
    for target, executions in wanted.items():
        folder = args.work / target
        for done in range(0, int(executions), PART):
            seed = 1 + read_record()["targets"].get(target, {"parts": 0})["parts"]
            add_to_record(target, run_part(target, min(PART, int(executions) - done), seed, folder))
            keep(target, folder)


if __name__ == "__main__":
    main()
