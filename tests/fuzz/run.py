# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Coverage-guided fuzzing of what reads files of others, by atheris (libFuzzer).

    python -m tests.fuzz.run policy --runs 1000000

begins with the inputs in sound/. A finding ends it with the exception and leaves the input in the present
folder. Bounds: 5 seconds an input, and 2.5 GiB for the process.
"""

import argparse
import sys
import tempfile
from argparse import RawDescriptionHelpFormatter as AsWritten
from functools import partial
from pathlib import Path

import atheris

from tests.fuzz.mutations import mutated


def main() -> None:
    instrumented = atheris.instrument_imports(include=["flexquant", "yaml", "json"])
    with instrumented:
        from tests.fuzz.targets import TARGETS, sound, try_out
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AsWritten)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000, help="executions (%(default)s)")
    args = parser.parse_args()
    kept = Path(tempfile.mkdtemp(prefix="flexquant-corpus-"))
    for number, data in enumerate(sound(args.target)):
        (kept / str(number)).write_bytes(data)
    target = TARGETS[args.target]
    with instrumented:  # some targets import what they need when they are called
        try_out(target, sound(args.target)[0])

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        """Change a document's values half of the time, and its bytes otherwise."""
        changed = mutated(args.target, data, seed) if seed % 2 else None
        return atheris.Mutate(data, longest) if changed is None or len(changed) > longest else changed

    options = [f"-runs={args.runs}", "-seed=1", "-timeout=5", "-rss_limit_mb=2560", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *options, str(kept)], partial(try_out, target), custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
