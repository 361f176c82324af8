# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Break a copy of the source in every way that :mod:`tests.faults.planted` names: each must turn a test red.

    python -m tests.faults.run [--only NAME ...] [--jobs N]

Each run has a fresh copy of the files that git knows or would add. The copy's folder is first on
``PYTHONPATH``, in front of the editable install of this repository, and holds the folders that are imported
as ``flexquant.merge`` and ``flexquant.policies`` as links in its package: pytest, what it starts and vLLM's
entry point all import the copy. First the chosen tests have to pass on an unbroken copy.

A fault is *red* if a test of its row fails, and *GREEN* if all pass, which means that a test is missing.
Exits with 1 if a fault is green or could not be tried. What is printed ends with a table of the rooms: how
many faults were planted in each, and how many were red. The output of every run stays in ``.work/faults``,
and what came of all of them in ``outcomes.json`` there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import Queue
from pathlib import Path

from tests.cores import take_cores
from tests.faults.fault import Fault
from tests.faults.table import FAULTS
from tests.unit.test_rooms import documented

ROOT = Path(__file__).parents[2]
WORK = ROOT / ".work" / "faults"
LIMIT = 600
"""Seconds after which the tests of a fault are given up."""
BASELINE_LIMIT = 3600
"""Seconds after which all tests on the unbroken source are given up."""
WHERE = """
import importlib.util, sys
for name in sys.argv[1:]:
    print(importlib.util.find_spec(name).origin)
"""


@dataclass(frozen=True)
class Outcome:
    """What the tests of one fault said."""

    name: str
    verdict: str
    """``red``, ``GREEN`` or ``ERROR``."""
    test: str
    """The first test that failed."""
    message: str
    seconds: float


@dataclass(frozen=True)
class PytestRun:
    """The exit status of pytest, and the tests that did not pass with the first line of why."""

    status: int
    failed: dict[str, str]
    skipped: dict[str, str]
    seconds: float


def repository_files() -> list[str]:
    """Return the paths of the files that git knows or would add, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})


def copy_repository(copy: Path) -> None:
    """Copy the repository, and link the packages that lie outside of ``flexquant/`` into it."""
    for name in repository_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    setuptools = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in setuptools["package-dir"].items():
        link = copy / package.replace(".", "/")
        if not link.exists():
            link.symlink_to(os.path.relpath(copy / folder, link.parent))


def environment_of(copy: Path, environment: str) -> dict[str, str]:
    return {
        **os.environ,
        **({"TRITON_INTERPRET": "1"} if environment == "interpreter" else {}),
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def python_of(environment: str) -> str:
    folder = "serve" if environment in ("interpreter", "ranks") else environment
    return str(ROOT / ".venv" / folder / "bin" / "python")


def check_imports(copy: Path, environment: str) -> None:
    """Raise RuntimeError unless Python imports the copy, whatever folder it starts in."""
    packages = ["flexquant", "flexquant.merge", "flexquant.policies"]
    found = subprocess.run(
        [python_of(environment), "-c", WHERE, *packages],
        cwd="/",
        env=environment_of(copy, environment),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    for package, origin in zip(packages, found, strict=True):
        if not Path(origin).is_relative_to(copy):
            raise RuntimeError(f"{package} is imported from {origin} instead of {copy}")


def run_pytest(
    copy: Path, environment: str, tests: Iterable[str], *options: str, limit: int = LIMIT
) -> PytestRun:
    """Run ``tests`` in the copy; the output goes into a file beside it, and temporary files go again."""
    log, results, temporary = (copy.with_suffix(suffix) for suffix in (".log", ".xml", ".tmp"))
    command = [python_of(environment), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={results}", f"--basetemp={temporary}", *options, *tests]
    start = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment_of(copy, environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    seconds = time.monotonic() - start
    shutil.rmtree(temporary, ignore_errors=True)
    failed, skipped = {}, {}
    for case in ElementTree.parse(results).iter("testcase") if results.exists() else ():
        name = f"{case.get('classname')}::{case.get('name')}"
        for tag, found in (("failure", failed), ("error", failed), ("skipped", skipped)):
            if (element := case.find(tag)) is not None:
                found[name] = " ".join((element.get("message") or "").split())
    return PytestRun(status, failed, skipped, seconds)


def fresh_copy(name: str) -> Path:
    """Return a new copy of the repository, ``.work/faults/<name>``, in the place of an older one."""
    copy = WORK / name
    shutil.rmtree(copy, ignore_errors=True)
    for suffix in (".log", ".xml"):
        copy.with_suffix(suffix).unlink(missing_ok=True)
    copy_repository(copy)
    return copy


def baseline(environment: str, faults: Sequence[Fault], jobs: int) -> list[str]:
    """Run all tests of an environment on an unbroken copy; return what is wrong."""
    copy = fresh_copy(f"unbroken-{environment}")
    try:
        check_imports(copy, environment)
        tests = dict.fromkeys(test for fault in faults for test in fault.tests)
        side_by_side = ["-n", str(jobs), "--dist", "loadfile"] if environment != "ranks" else []
        done = run_pytest(copy, environment, tests, *side_by_side, limit=BASELINE_LIMIT)
    except (RuntimeError, OSError, subprocess.SubprocessError) as e:
        return [str(e)]
    finally:
        shutil.rmtree(copy)
    problems = [
        f"{name} {what} ({message})"
        for what, tests_found in (("fails", done.failed), ("is skipped", done.skipped))
        for name, message in tests_found.items()
    ]
    if done.status != 0 and not problems:
        problems = [f"pytest exits with {done.status}; see {copy.with_suffix('.log')}"]
    return problems


def try_fault(fault: Fault) -> Outcome:
    """Plant a fault into a copy of the source and run its tests."""
    copy = fresh_copy(fault.name)
    try:
        fault.plant(copy)
        done = run_pytest(copy, fault.environment, fault.tests, "-x")
    except (ValueError, OSError, subprocess.SubprocessError) as e:
        return Outcome(fault.name, "ERROR", "", str(e), 0.0)
    finally:
        shutil.rmtree(copy)
    if done.status == 0:
        return Outcome(fault.name, "GREEN", "no test sees it", "", done.seconds)
    # Exit status 1 says that tests failed; any other says that pytest did not get so far as to run them.
    if done.status != 1 or not done.failed:
        problem = f"pytest exits with {done.status}; see {copy.with_suffix('.log')}"
        return Outcome(fault.name, "ERROR", "", problem, done.seconds)
    test, message = next(iter(done.failed.items()))
    return Outcome(fault.name, "red", test, message, done.seconds)


def table_of_rooms(faults: Sequence[Fault], outcomes: Sequence[Outcome]) -> str:
    """Return a line for each room of flexquant/README.md, in its order."""
    planted = Counter(fault.room for fault in faults)
    red = {outcome.name for outcome in outcomes if outcome.verdict == "red"}
    seen = Counter(fault.room for fault in faults if fault.name in red)
    lines = [f"{'room':<14}{'planted':>8}{'red':>6}"]
    lines += [f"{room:<14}{planted[room]:>8}{seen[room]:>6}" for room in documented()]
    return "\n".join(lines)


def take_a_share_of_the_cores(numbers: Queue[int], jobs: int) -> None:
    """Give this worker, and what it starts, cores of its own."""
    take_cores(numbers.get(), jobs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[fault.name for fault in FAULTS])
    jobs_help = "faults side by side, each on cores of its own (default: one for each core, at most 2)"
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))), help=jobs_help)
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only is None or fault.name in arguments.only]
    start = time.monotonic()

    WORK.mkdir(parents=True, exist_ok=True)
    numbers: Queue[int] = Queue()
    for job in range(arguments.jobs):
        numbers.put(job)
    problems = []
    for environment in dict.fromkeys(fault.environment for fault in faults):
        chosen = [fault for fault in faults if fault.environment == environment]
        problems += baseline(environment, chosen, arguments.jobs)
    for problem in problems:
        print(f"on the unbroken source: {problem}; repair that first", flush=True)
    outcomes = []
    share = {"initializer": take_a_share_of_the_cores, "initargs": (numbers, arguments.jobs)}
    with ProcessPoolExecutor(arguments.jobs, **share) as pool:
        beside = [fault for fault in faults if fault.environment != "ranks"] if not problems else []
        alone = [fault for fault in faults if fault.environment == "ranks"] if not problems else []
        found = itertools.chain(pool.map(try_fault, beside), map(try_fault, alone))
        for fault, outcome in zip([*beside, *alone], found, strict=True):
            outcomes.append(outcome)
            print(f"{outcome.verdict:<6}{outcome.seconds:5.0f} s  {outcome.name}: {fault.breaks}")
            print(textwrap.shorten(f"{outcome.test} {outcome.message}", 200), flush=True)

    seconds = time.monotonic() - start
    seen = sum(outcome.verdict == "red" for outcome in outcomes)
    print(f"{seen} of {len(faults)} faults are seen by a test, in {seconds:.0f} s")
    summary = {"baseline": problems, "faults": [asdict(o) for o in outcomes], "seconds": round(seconds)}
    (WORK / "outcomes.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(table_of_rooms(faults, outcomes))
    return 0 if seen == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
