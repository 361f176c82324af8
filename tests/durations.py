# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Record how long each test file takes, from the JUnit files that ``make test`` leaves in ``.work/junit``.

python -m tests.durations
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from flexquant.evaluation.engine import describe_machine, describe_versions

ROOT = Path(__file__).parents[1]
JUNIT = ROOT / ".work" / "junit"
RECORD = ROOT / "tests" / "durations.json"


def main() -> int:
    sessions = {}
    for file in sorted(JUNIT.glob("*.xml")):
        (suite,) = ElementTree.parse(file).getroot().iter("testsuite")
        files: Counter[str] = Counter()
        for case in suite.iter("testcase"):
            files[case.attrib["classname"].removeprefix("tests.")] += float(case.attrib["time"])
        sessions[file.stem] = {
            "seconds": round(float(suite.attrib["time"])),
            "tests": int(suite.attrib["tests"]),
            "files": {name: round(seconds, 1) for name, seconds in files.most_common() if seconds >= 1},
        }
    if not sessions:
        print(f"{JUNIT} has no *.xml; run 'make test' first", file=sys.stderr)
        return 1
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    record = {"commit": commit, "machine": describe_machine(), "versions": describe_versions()}
    record["sessions"] = sessions
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
