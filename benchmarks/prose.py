# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Two real English texts that share no chapter: one to calibrate on, one to measure quality on.

The text is The Debian Administrator's Handbook, from the Debian package debian-handbook, which apt fetches.
Its sections are dealt out in turn by file name: `calibration.txt` and `held-out.txt` in the output folder.

python benchmarks/prose.py --output .work/prose
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path

PACKAGE = "debian-handbook"
SECTIONS = "usr/share/doc/debian-handbook/html/en-US/sect.*.html"
NAMES = ("calibration.txt", "held-out.txt")


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


def fetch_package(folder: Path) -> None:
    subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write the two texts into")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as scratch:
        fetch_package(Path(scratch))
        sections = [read_section(path) for path in sorted(Path(scratch).glob(SECTIONS))]
    output.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(NAMES):
        text = "\n\n".join(sections[i :: len(NAMES)])
        (output / name).write_text(text + "\n", encoding="utf-8")
        print(f"{output / name}: {len(text.split()):,} words")


if __name__ == "__main__":
    main()
