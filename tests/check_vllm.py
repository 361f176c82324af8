# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check FlexQuant's tables of vLLM's names against published vLLMs: ``python -m tests.check_vllm 0.33.0``.

The wheel of each version is downloaded with pip and its source is parsed; nothing is installed or imported.
Prints what is missing, has moved or takes other parameters, and ends with 1 if anything does. Without a
version, all that ``CHECKED`` of ``flexquant.serving.vllm_names`` lists are checked, and
``flexquant/serving/VLLM_VERSIONS.md`` is written.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from flexquant.serving.vllm_names import CHECKED, NEEDED, Names
from tests.vllm_source import (
    TABLES,
    Problem,
    Source,
    check,
    entries,
    find_entry,
    in_range,
    is_bound,
    parameters,
    title,
)

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / ".work" / "vllm-wheels"
PAGE = ROOT / "flexquant" / "serving" / "VLLM_VERSIONS.md"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux1_x86_64")


def main(arguments: Sequence[str]) -> int:
    versions = list(arguments) or list(CHECKED)
    sources = {version: Source(fetch(version)) for version in versions}
    problems = {version: check(source, TABLES, version) for version, source in sources.items()}
    for version, found in problems.items():
        print(f"vLLM {version}: {describe(version, found)}")
        for problem in found:
            print(f"  {problem}")
    if not arguments:
        PAGE.write_text(page(sources, problems), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return int(any(problems.values()))


def fetch(version: str) -> Path:
    """Return a folder with the Python files of vLLM's wheel, which is downloaded unless it is there."""
    folder = SOURCES / version
    if folder.is_dir():
        return folder
    SOURCES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SOURCES) as temporary:
        platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        options = ["--python-version", "3.12", *platforms, "--dest", temporary, f"vllm=={version}"]
        if subprocess.run([*download, *options], stderr=subprocess.DEVNULL).returncode:
            raise SystemExit(
                f"pip could not download vLLM {version}; `pip index versions vllm` lists the published ones"
            )
        unpacked = Path(temporary) / "source"
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [n for n in archive.namelist() if n.endswith(".py")])
        unpacked.rename(folder)
    return folder


def describe(version: str, problems: Sequence[Problem]) -> str:
    """Return how many names were found, and how many were not or differ."""
    expected = [title(n, entry) for n in TABLES if in_range(n, version) for entry in entries(n)]
    kinds = Counter(problem.kind for problem in problems)
    found = len(expected) - len({problem.name for problem in problems} & set(expected))
    return f"{found} names found, " + ", ".join(
        f"{kinds[kind]} {kind}" for kind in ("missing", "moved", "changed")
    )


def page(sources: Mapping[str, Source], problems: Mapping[str, Sequence[Problem]]) -> str:
    """Return a Markdown page: each version's counts, and every name that differs between versions."""
    lines = [
        "<!-- Written by `make check-vllm`. -->",
        "# vLLM's names that FlexQuant uses, by version",
        "",
        "| vLLM | names | what it needed beside the versions before |",
        "|---|---|---|",
        *(
            f"| {version} | {describe(version, found)} | {NEEDED.get(version, 'nothing')} |"
            for version, found in problems.items()
        ),
        "",
        "Names whose module or parameters differ between these versions; all others are the same in each.",
        "`vllm_names.py` says what they are for.",
        "",
        "| name | as of | is |",
        "|---|---|---|",
    ]
    for names in TABLES:
        for entry in entries(names):
            forms = [(version, form(source, names, entry)) for version, source in sources.items()]
            runs = [(next(run)[0], what) for what, run in groupby(forms, key=lambda pair: pair[1])]
            if len(runs) > 1:
                lines += [f"| `{title(names, entry)}` | {version} | {what} |" for version, what in runs]
    return "\n".join(lines) + "\n"


def form(source: Source, names: Names, entry: str) -> str:
    """Return where a version defines a name, and with which parameters."""
    if entry in names.mentions:
        module = source.module(names.module)
        return "there" if module is not None and entry in module.mentioned else "missing"
    path, called, _ = entry.partition("(")
    found = find_entry(source, names.module, path)
    if found is None:
        return "missing"
    module, node = found
    taken = parameters(node, is_bound(node, path)) if called else None
    return f"in `{module.name}`" + (f", `({taken})`" if taken is not None else "")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
