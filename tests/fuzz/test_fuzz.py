# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Wrong files raise FlexQuantError and nothing else, within bounds of time and memory.

Changed documents are made from the sound ones in sound/.
"""

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import programs
from tests.fuzz.mutations import mutated
from tests.fuzz.targets import FOLDER, TARGETS, sound, try_out

EXAMPLES = 300
BOUNDS = {"max_examples": EXAMPLES, "derandomize": True, "database": None, "deadline": None}


@pytest.mark.parametrize("target", TARGETS)
def test_the_documents_by_hand_are_understood_or_refused(target: str) -> None:
    assert len(sound(target)) >= 2
    for data in sound(target):
        try_out(TARGETS[target], data)


@pytest.mark.parametrize("data", sound("sources"))
def test_sound_variants_are_merged(data: bytes) -> None:
    shutil.rmtree(FOLDER / "merged", ignore_errors=True)
    TARGETS["sources"](data)
    assert (FOLDER / "merged" / "config.json").is_file()


@pytest.mark.parametrize("target", [target for target in TARGETS if target != "yaml_document"])
def test_documents_that_are_nearly_right_are_understood_or_refused(target: str) -> None:
    tried = []

    @settings(**BOUNDS, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from(sound(target)), st.integers(0, 2**32))
    def check(data: bytes, number: int) -> None:
        if (changed := mutated(target, data, number)) is not None:
            tried.append(number)
            try_out(TARGETS[target], changed)

    check()
    assert len(tried) > EXAMPLES / 10


@pytest.mark.full
def test_a_run_guided_by_coverage_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", "merged_config", "--runs", "20000"]
    environment = {**programs.newcomers_environment(), "TMPDIR": str(tmp_path)}
    assert "Done 20000 runs" in programs.run(command, timeout=600, environment=environment).stderr


def test_a_document_of_many_values_takes_little_memory() -> None:
    """The test runs in a process whose limit the document, written out, would exceed by far."""
    code = """
import resource
from tests.fuzz.targets import yaml_document, try_out
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
lines = ["a0: &a0 [" + ", ".join("x" * 10) + "]"]
lines += ["a%d: &a%d [%s]" % (i, i, ", ".join(["*a%d" % (i - 1)] * 10)) for i in range(1, 12)]
try_out(yaml_document, chr(10).join(lines).encode())
"""
    programs.run([sys.executable, "-c", code], timeout=120)
