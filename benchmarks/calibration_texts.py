# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Texts to compare calibration data with: two to calibrate on, and three kinds that nothing is calibrated on.

python benchmarks/calibration_texts.py --own variants/calibration.jsonl --output .work/texts

`handbook.txt` is one half of The Debian Administrator's Handbook, as in prose.py. `mix.jsonl` holds that
half, Python's documentation and what the model wrote itself (--own), a third each. No variant has seen
`prose.txt`, the Jargon File's paragraphs; `code.txt`, modules of Python's standard library; or `chat.jsonl`,
the questions and answers of the Debian FAQ as conversations. apt fetches Debian's packages.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from benchmarks.prose import SECTIONS, read_section
from flexquant.documents.texts import read_documents

PACKAGES = ("debian-handbook", "jargon-text", "debian-faq")
JARGON = "usr/share/doc/jargon-text/jargon.txt.gz"
FAQ = "usr/share/doc/debian/FAQ/debian-faq.en.txt.gz"
QUESTION = re.compile(r"^\d+\.\d+\. ([^?]+\?)\n\n((?:    .*\n|\n)+)", re.MULTILINE)
WORDS = 40
"""Fewest words of a paragraph of the Jargon File: shorter ones are mostly lists and headings."""
PIECE = 1000
"""Characters of each piece in the mix."""


def jargon(text: str) -> str:
    """Return the paragraphs of the Jargon File, with white space squeezed."""
    paragraphs = (" ".join(p.split()) for p in text.split("\n\n"))
    return "\n\n".join(p for p in paragraphs if len(p.split()) >= WORDS)


def faq(text: str) -> list[list[dict[str, str]]]:
    """Return the conversations of the Debian FAQ, each one question and its answer."""
    found = []
    for question, answer in QUESTION.findall(text.replace("\xa0", " ")):
        paragraphs = [" ".join(p.split()) for p in answer.split("\n\n")]
        content = "\n\n".join(filter(None, paragraphs))
        user = {"role": "user", "content": " ".join(question.split())}
        found.append([user, {"role": "assistant", "content": content}])
    return found


def code() -> str:
    """Return the modules of the standard library, in an order drawn once."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def mix(handbook: str, own: Path) -> list[str]:
    """Return pieces of the three texts in turn, as many of each as the shortest text has."""
    written = [d if isinstance(d, str) else "\n\n".join(m["content"] for m in d) for d in read_documents(own)]
    texts = [handbook, "\n\n".join(map(str, read_documents(None))), "\n\n".join(written)]
    pieces = [[text[i : i + PIECE] for i in range(0, len(text), PIECE)] for text in texts]
    return [piece for group in zip(*pieces, strict=False) for piece in group]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--own", type=Path, required=True, help=".jsonl file that the model wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the texts into")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(["apt-get", "download", "--quiet", *PACKAGES], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
        handbook = "\n\n".join([read_section(path) for path in sorted(folder.glob(SECTIONS))][::2])
        prose = jargon(gzip.decompress((folder / JARGON).read_bytes()).decode())
        chat = faq(gzip.decompress((folder / FAQ).read_bytes()).decode())
    lines = {
        "handbook.txt": [handbook],
        "mix.jsonl": [json.dumps({"text": piece}) for piece in mix(handbook, args.own)],
        "prose.txt": [prose],
        "code.txt": [code()],
        "chat.jsonl": [json.dumps({"messages": messages}) for messages in chat],
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, content in lines.items():
        (args.output / name).write_text("\n".join(content) + "\n", encoding="utf-8")
        print(f"{args.output / name}: {sum(len(line.split()) for line in content):,} words")


if __name__ == "__main__":
    main()
