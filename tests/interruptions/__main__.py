# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Interrupt commands many times, and record what came of it.

    python -m tests.interruptions --work FOLDER COMMAND=TIMES [COMMAND=TIMES ...]
    unshare --map-root-user --mount python -m tests.interruptions --full-disk --work FOLDER COMMAND=TIMES ...

kills each command that often, or fills its disk up, and adds what came of it to the record,
tests/interruptions/record.json. What is left wrong ends the run; after a kill, its folder below FOLDER stays.
``quantize`` and ``build`` run in the environment with llm-compressor, the others in the one with vLLM.
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
from tests.interruptions.commands import COMMANDS
from tests.interruptions.full_disk import FullDisk, small_disk
from tests.interruptions.interrupting import Interrupted, attempts_in, interrupt_often
from tests.interruptions.started import Started

RECORD = Path(__file__).parent / "record.json"


def interrupt(name: str, work: Path, times: int, seed: int, *, full_disk: bool) -> Interrupted:
    """Kill a command ``times``, or fill its disk up."""
    command, attempts = COMMANDS[name], attempts_in(work)
    if not full_disk:
        return interrupt_often(command, work, times, seed, Started.kill)
    attempts.mkdir(parents=True)
    with small_disk(attempts):
        return interrupt_often(command, work, times, seed, FullDisk(attempts))


def add_to_record(record: Path, interruption: str, name: str, seed: int, interrupted: Interrupted) -> None:
    """Replace what the record says of one interruption of one command."""
    quantizer = {"llmcompressor": version("llmcompressor")} if find_spec("llmcompressor") else {}
    document = json.loads(record.read_text()) if record.is_file() else {}
    commands = document.setdefault(interruption, {"times": 0, "commands": {}})["commands"]
    commands[name] = {
        **asdict(interrupted),
        "found": dict(interrupted.found.most_common()),
        "left_wrong": 0,
        "finished_by_the_same_command": interrupted.times,
        "seed": seed,
        "command": describe_command(),
        "machine": describe_machine(),
        "versions": describe_versions() | quantizer,
    }
    document[interruption]["times"] = sum(command["times"] for command in commands.values())
    record.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for what the commands write")
    parser.add_argument("--full-disk", action="store_true", help="fill the disk up, in place of a kill")
    parser.add_argument("--seed", type=int, default=1, help="draws the moments (default: %(default)s)")
    parser.add_argument(
        "--record", type=Path, default=RECORD, help="file to add to (default: the committed one)"
    )
    parser.add_argument("commands", nargs="+", metavar="COMMAND=TIMES", help=f"of {', '.join(COMMANDS)}")
    args = parser.parse_args()
    # With several threads, sums may differ from run to run.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Engines of one command would be bound to one and the same core.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for name, times in (text.split("=") for text in args.commands):
        work = args.work.resolve() / name
        interrupted = interrupt(name, work, int(times), args.seed, full_disk=args.full_disk)
        add_to_record(args.record, "full disk" if args.full_disk else "kill", name, args.seed, interrupted)
        print(name, interrupted, flush=True)


if __name__ == "__main__":
    main()
