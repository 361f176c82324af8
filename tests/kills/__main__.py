# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Many kills of commands, and their record.

    python -m tests.kills --work FOLDER COMMAND=TIMES [COMMAND=TIMES ...]

kills each command that often and adds what came of it to the record, tests/kills/record.json. What a kill
leaves wrong ends the run; its folder below FOLDER stays. ``quantize`` and ``build`` run in the environment
with llm-compressor, the others in the one with vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from flexquant.measuring.machine import describe_command, describe_machine, describe_versions
from tests.kills.commands import COMMANDS
from tests.kills.killing import Killed, kill_often

RECORD = Path(__file__).parent / "record.json"


def add_to_record(record: Path, name: str, seed: int, killed: Killed) -> None:
    """Replace what the record says of one command."""
    quantizer = {"llmcompressor": version("llmcompressor")} if find_spec("llmcompressor") else {}
    document = json.loads(record.read_text()) if record.is_file() else {"kills": 0, "commands": {}}
    document["commands"][name] = {
        **asdict(killed),
        "found": dict(killed.found.most_common()),
        "left_wrong": 0,
        "finished_by_the_same_command": killed.kills,
        "seed": seed,
        "command": describe_command(),
        "machine": describe_machine(),
        "versions": describe_versions() | quantizer,
    }
    document["kills"] = sum(command["kills"] for command in document["commands"].values())
    record.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for what the commands write")
    parser.add_argument("--seed", type=int, default=1, help="draws the moments (default: %(default)s)")
    parser.add_argument(
        "--record", type=Path, default=RECORD, help="file to add to (default: the committed one)"
    )
    parser.add_argument("commands", nargs="+", metavar="COMMAND=TIMES", help=f"of {', '.join(COMMANDS)}")
    args = parser.parse_args()
    # Sums of several threads may differ from run to run.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, times in (text.split("=") for text in args.commands):
        killed = kill_often(COMMANDS[name], args.work.resolve() / name, int(times), args.seed)
        add_to_record(args.record, name, args.seed, killed)
        print(name, killed, flush=True)


if __name__ == "__main__":
    main()
