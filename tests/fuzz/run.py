# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Coverage-guided fuzzing of what reads files of others, by atheris (libFuzzer).

    python -m tests.fuzz.run policy --runs 1000000

begins with the corpus of that target. A finding ends it with the exception and leaves the input in the
present folder. Bounds: 5 seconds an input, and 2.5 GiB for the process.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz.corpus import corpus
from tests.fuzz.mutations import mutated

SECONDS, MIB, LONGEST = 5, 2560, 4096


def main() -> None:
    instrumented = atheris.instrument_imports(include=["flexquant", "yaml", "json"])
    with instrumented:
        from tests.fuzz.targets import TARGETS, try_out
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000, help="executions (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, help="folder for what reaches new code (default: nothing is kept)"
    )
    args = parser.parse_args()
    # libFuzzer ends the process itself, so a folder without --keep stays behind.
    kept = args.keep or Path(tempfile.mkdtemp(prefix="flexquant-corpus-"))
    kept.mkdir(parents=True, exist_ok=True)
    for data in corpus(args.target):
        (kept / hashlib.sha1(data).hexdigest()).write_bytes(data)
    target = TARGETS[args.target]
    with instrumented:  # some targets import what they need when they are called
        try_out(target, corpus(args.target)[0])

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        """Change a document's values half of the time, and its bytes otherwise."""
        changed = mutated(args.target, data, seed) if seed % 2 else None
        return atheris.Mutate(data, longest) if changed is None or len(changed) > longest else changed

    options = [f"-runs={args.runs}", f"-seed={args.seed}", f"-timeout={SECONDS}", f"-rss_limit_mb={MIB}"]
    options += [f"-max_len={LONGEST}", "-print_final_stats=1", "-reduce_inputs=1"]
    arguments = [sys.argv[0], *options, str(kept)]
    atheris.Setup(arguments, lambda data: try_out(target, data), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
