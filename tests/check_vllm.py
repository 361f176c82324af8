# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Check FlexQuant against published vLLMs by their own types: ``python -m tests.check_vllm 0.33.0``.

The wheel of each version is downloaded with pip; nothing is installed or imported. mypy checks FlexQuant with
the wheel's vLLM in front of the installed one, and the names that ``tests.vllm_names`` lists,
which are hidden from mypy, are looked for in the wheel's source. Prints what does not fit, and ends with 1 if
anything does not. Without a version, ``BY_TYPES`` are checked so, and the others that ``CHECKED`` lists by
the hidden names alone; ``flexquant/serving/VLLM_VERSIONS.md`` is written.
"""

import ast
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.vllm_names import CHECKED, EXPECTED, NAMES, NEEDED, Names

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / ".work" / "vllm-wheels"
PAGE = ROOT / "flexquant" / "serving" / "VLLM_VERSIONS.md"
BY_TYPES = ("0.26.0", "0.32.0", "0.33.0")
"""The oldest, the installed and the newest version; mypy takes two minutes for one that it has not seen."""
PLANTED = 18
"""Breaks of vLLM's API that a test plants in a copy of the installed one; the check finds all."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux1_x86_64")
SETTINGS = """
[mypy-vllm.*]
follow_imports = silent
[mypy-tests.*]
follow_imports = silent
[mypy-benchmarks.*]
disable_error_code = arg-type, assignment, index
"""
"""Beside FlexQuant's own settings: no errors within vLLM, and none of the benchmarks' own."""


def main(arguments: Sequence[str]) -> int:
    versions = list(arguments) or list(CHECKED)
    by_types = arguments or BY_TYPES
    problems = {version: check(fetch(version), version, version in by_types) for version in versions}
    for version, found in problems.items():
        print(f"vLLM {version}: {len(found)} problems", *found, sep="\n  ")
    if not arguments:
        PAGE.write_text(page(problems), encoding="utf-8")
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
            raise SystemExit(f"pip could not download vLLM {version}; see `pip index versions vllm`")
        unpacked = Path(temporary) / "source"
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [n for n in archive.namelist() if n.endswith(".py")])
        unpacked.rename(folder)
    return folder


def check(site: Path, version: str, by_types: bool = True) -> list[str]:
    """Return what does not fit the vLLM ``version`` in the folder ``site``."""
    of_types = unexpected(type_errors(site), version) if by_types else []
    return [*of_types, *missing_mentions(site, NAMES, version)]


def type_errors(site: Path) -> list[str]:
    """Return mypy's errors in FlexQuant, and in benchmarks that import vLLM, with the vLLM in ``site``."""
    cache = ROOT / ".work" / "mypy" / site.name
    cache.mkdir(parents=True, exist_ok=True)
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    own |= {"mypy_path": f"{ROOT}:{site}", "cache_dir": cache}
    settings = cache / "mypy.ini"
    settings.write_text("\n".join(["[mypy]", *(f"{key} = {value}" for key, value in own.items()), SETTINGS]))
    imports = re.compile(r"^ *(?:from|import) (?:vllm|flexquant\.serving\.vllm_api)\b", re.MULTILINE)
    benchmarks = [f for f in (ROOT / "benchmarks").rglob("*.py") if imports.search(f.read_text())]
    uses = ROOT / "tests" / "vllm_uses.py"
    files = [str(f.relative_to(ROOT)) for f in (ROOT / "flexquant", uses, *sorted(benchmarks))]
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--no-error-summary", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 1):
        raise SystemExit(f"mypy failed on {site}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [line for line in done.stdout.splitlines() if ": error: " in line]


def unexpected(errors: Iterable[str], version: str) -> list[str]:
    """Return the errors without those of ``EXPECTED``, and the expected ones that are not there."""
    plain, number = {error: re.sub(r":\d+: error:", ":", error) for error in errors}, _number(version)
    here = [start for start, (a, b, _) in EXPECTED.items() if _number(a) <= number <= _number(b)]
    gone = [start for start in here if not any(error.startswith(start) for error in plain.values())]
    return [
        *(error for error, text in plain.items() if not text.startswith(tuple(here))),
        *(f"{start}: mypy does not find this error any more; take it out of EXPECTED" for start in gone),
    ]


def missing_mentions(site: Path, tables: Iterable[Names], version: str) -> list[str]:
    """Return the listed names that the source of vLLM ``version`` lacks, or has out of their range."""
    problems = []
    for names in tables:
        path = site.joinpath(*names.module.split("."))
        file = next((f for f in (path / "__init__.py", path.with_suffix(".py")) if f.is_file()), None)
        there = mentioned(file.read_text(encoding="utf-8")) if file is not None else set()
        wanted = (names.since or (0, 0)) <= _number(version) <= (names.until or (99, 0))
        what = "is not mentioned in the module" if wanted else "is there, although the table says it is not"
        wrong = [name for name in names.mentions if (name in there) != wanted]
        problems += [f"{names.module}.{name} {what}" for name in wrong]
    return problems


def mentioned(code: str) -> set[str]:
    """Return the names, strings, and attributes (``a.b.c``, ``b.c`` and ``c``) that occur in code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            found |= {".".join(parts[i:]) for i in range(len(parts))}
        elif isinstance(node, ast.Name | ast.alias):
            found.add(node.id if isinstance(node, ast.Name) else node.name)
    return found


def page(problems: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown page with each version's problems and what it needed."""
    lines = [
        "<!-- Written by `make check-vllm`. -->",
        "# FlexQuant against vLLM's types, by version",
        "",
        "mypy checks FlexQuant against some versions' source. `vllm_api.py` gives the reason for each",
        "private name; `tests/vllm_names.py` lists names hidden from mypy, which are checked too. A test",
        f"plants {PLANTED} breaks in a copy of the installed version, and all are found.",
        "[What a new version asks for](../../tests/README.md#a-new-version-of-vllm).",
        "",
        "| vLLM | checked by | problems | what it needed beside the versions before |",
        "|---|---|---|---|",
        *(
            f"| {version} | {'types and names' if version in BY_TYPES else 'names'} "
            f"| {len(found) or 'none'} | {NEEDED.get(version, 'nothing')} |"
            for version, found in problems.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _number(version: str) -> tuple[int, int]:
    major, minor = map(int, version.split(".")[:2])
    return major, minor


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
