# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What each policy and each way of quantising costs in quality: build, serve, measure on unseen text.

    python -m benchmarks.quality

Quantises SmolLM2-135M-Instruct by benchmarks/recipes/methods.yaml on one half of the sections of The Debian
Administrator's Handbook (the Debian package debian-handbook, which apt fetches), dealt out in turn by file
name, measures on the other half through vLLM, and writes to benchmarks/results: `quality` (the policies) and
`quality-methods` (ways to W8A8 and W4A16). Needs both environments of `make setup`. Started again it keeps
the variants that are finished.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = ".work/SmolLM2-135M-Instruct"
RECIPE = "benchmarks/recipes/methods.yaml"
POLICIES = ["w8a8", "w4a16", "phase", "phase-batch", "phase-batch-layer"]
BATCH_SIZES = "16,64"
PACKAGE = "debian-handbook"
SECTIONS = "usr/share/doc/debian-handbook/html/en-US/sect.*.html"
NAMES = ("calibration.txt", "held-out.txt")
ROWS = {"prompt-tokens": 128, "tokens": 64}


class Paragraphs(HTMLParser):
    """Collects the text of every <div class="para">, with white space squeezed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open_divs: list[bool] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self._open_divs.append(("class", "para") in attributes)

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._open_divs.pop() and not any(self._open_divs):
            self.found.append(" ".join("".join(self._text).split()))
            self._text = []

    def handle_data(self, data: str) -> None:
        if any(self._open_divs):
            self._text.append(data)


def read_section(path: Path) -> str:
    parser = Paragraphs()
    parser.feed(path.read_text(encoding="utf-8"))
    return "\n\n".join(filter(None, parser.found))


def write_texts(output: Path) -> None:
    """Write the text to calibrate on and the text to measure on into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", PACKAGE], cwd=scratch, check=True)
        (package,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg", "-x", str(package), scratch], check=True)
        sections = [read_section(path) for path in sorted(Path(scratch).glob(SECTIONS))]
    output.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(NAMES):
        (output / name).write_text("\n\n".join(sections[i :: len(NAMES)]) + "\n", encoding="utf-8")


def run(*command: str | Path) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


def evaluate(flexquant: Path, checkpoint: Path, output: Path, policies: list[str], *options: str) -> None:
    """Measure policies of a checkpoint into ``output``/quality.{json,md,png}."""
    rows = [argument for name, value in ROWS.items() for argument in (f"--{name}", str(value))]
    text = checkpoint.with_name("held-out.txt")
    command = [flexquant, "eval", checkpoint, "--text", text, "--reference", MODEL]
    run(*command, "--policies", ",".join(policies), "--output", output, *rows, *options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path(".work/quality"), help="texts and checkpoints")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="(%(default)s)")
    parser.add_argument("--quantize", type=Path, default=Path(".venv/quantize/bin"), help="(%(default)s)")
    parser.add_argument("--serve", type=Path, default=Path(".venv/serve/bin"), help="(%(default)s)")
    args = parser.parse_args()
    work, results = args.work, args.results

    if not (ROOT / work / "held-out.txt").exists():
        write_texts(ROOT / work)
    build = [args.quantize / "flexquant", "build", MODEL, "--output", work / "merged", "--recipe", RECIPE]
    run(*build, "--variants-folder", work / "variants", "--calibration", work / "calibration.txt")
    variants = sorted(path.name for path in (ROOT / work / "variants").iterdir())
    methods = [name for name in variants if name not in POLICIES]
    flexquant = args.serve / "flexquant"
    options = ["--batch-sizes", BATCH_SIZES, "--samples", "64"]
    evaluate(flexquant, work / "merged", results / "quality", POLICIES, *options)
    options = ["--batch-sizes", "16", "--samples", "32", "--no-questions"]
    every = ["w8a8", "w4a16", *methods]
    evaluate(flexquant, work / "merged", results / "quality-methods", every, *options)


if __name__ == "__main__":
    main()
