# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Take every text architecture of the installed vLLM through the chain, and write the page of the outcomes.

    python -m tests.architectures [ARCHITECTURE ...] [--work FOLDER]

Without names: those that the results, tests/architectures/results.json, lack. Each has a process of its own,
since a model class that fails may leave vLLM in any state; it is forked, so that vLLM is imported once.
The results are written after each, and from them the page, flexquant/serving/ARCHITECTURES.md.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter as AsWritten
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from flexquant.evaluation.engine import describe_machine, describe_versions
from tests.architectures.chain import SECONDS, Outcome, try_architecture
from tests.architectures.outcomes import FAILS, PAGE, RESULTS, page

FORK = multiprocessing.get_context("fork")
PATIENCE = 30
"""Seconds that a process gets to end after its time."""


def text_architectures() -> list[str]:
    """Return the names of vLLM's text generation models, with those whose code it takes from transformers."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS, _TRANSFORMERS_SUPPORTED_MODELS

    models = _TRANSFORMERS_SUPPORTED_MODELS.items()
    by_transformers = {name for name, (_, its_class) in models if "Multi" not in its_class}
    return sorted({*_TEXT_GENERATION_MODELS, *by_transformers}, key=str.lower)


def try_one(architecture: str, work: Path) -> dict[str, Any]:
    """Run the chain of one architecture; a process that breaks off or takes too long is an outcome too."""
    folder = work / architecture
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    output = folder / "outcome.json"
    arguments = (folder / "log", architecture, folder / "checkpoints", output)
    process = FORK.Process(target=with_log, args=arguments)
    process.start()
    process.join(SECONDS + PATIENCE)
    reason = f"the process ended with {process.exitcode}"
    if process.is_alive():
        process.kill()
        process.join()
        reason = f"no end within {SECONDS + PATIENCE} s"
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if output.is_file():
        found: dict[str, Any] = json.loads(output.read_text())
        return found
    return asdict(Outcome(architecture, None, [], FAILS, reason))


def with_log(path: Path, architecture: str, checkpoints: Path, output: Path) -> None:
    """Try an architecture in a process of its own, and write all that it prints to a file."""
    with open(path, "wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    try_architecture(architecture, checkpoints, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AsWritten)
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--work", type=Path, help="folder that keeps the logs (default: a temporary one)")
    args = parser.parse_args()
    names = text_architectures()
    if unknown := set(args.architectures) - set(names):
        parser.error(f"vLLM has no {', '.join(sorted(unknown))}")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"architectures": {}}
    results |= {"argv": ["python", "-m", "tests.architectures"], "text_models": len(names)}
    results |= {"machine": describe_machine(), "versions": describe_versions()}
    import_module("vllm.entrypoints.llm")
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.architectures or [name for name in names if name not in results["architectures"]]:
            found = try_one(name, args.work or Path(temporary))
            print(f"{name}: {found['outcome']} {found['reason']}", flush=True)
            results["architectures"][name] = found
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
