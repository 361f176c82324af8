# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The table of faults fits the source, and the tests of a broken copy import that copy."""

from __future__ import annotations

import pytest

from tests.faults.run import ROOT, Outcome, check_imports, copy_repository, table_of_rooms
from tests.faults.table import FAULTS
from tests.unit.test_rooms import documented


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("faults") / "copy"
    copy_repository(folder)
    return folder


def test_every_fault_can_be_planted_and_leaves_python_code(copy):
    for fault in FAULTS:
        original = (copy / fault.file).read_text()
        fault.plant(copy)
        broken = (copy / fault.file).read_text()
        assert broken != original, fault.name
        compile(broken, fault.file, "exec")
        (copy / fault.file).write_text(original)


def test_every_fault_has_a_name_and_tests_of_its_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.tests and all((ROOT / test.partition("::")[0]).is_file() for test in fault.tests)


def test_every_room_has_faults():
    assert {fault.room for fault in FAULTS} == documented().keys()


def test_the_table_tells_how_many_faults_of_a_room_are_red():
    merged, served, unseen = (
        next(f for f in FAULTS if f.room == room) for room in ("merge", "serving", "cli")
    )
    outcomes = [Outcome(fault.name, "red", "a test", "", 1.0) for fault in (merged, served)]
    outcomes.append(Outcome(unseen.name, "GREEN", "", "", 1.0))
    lines = table_of_rooms([merged, served, unseen], outcomes).splitlines()
    counts = {room: (int(planted), int(red)) for room, planted, red in map(str.split, lines[1:])}
    assert list(counts) == list(documented())
    assert {room: pair for room, pair in counts.items() if any(pair)} == {
        "merge": (1, 1),
        "serving": (1, 1),
        "cli": (1, 0),
    }


def test_a_text_that_has_gone_is_told(copy):
    fault = FAULTS[0]
    (copy / fault.file).write_text("")
    with pytest.raises(
        ValueError, match=f"'{fault.name}' does not fit .* any more: its text is there 0 times"
    ):
        fault.plant(copy)


def test_python_imports_the_copy(copy):
    check_imports(copy, "serve")
    (copy / "flexquant" / "merge").unlink()
    with pytest.raises(RuntimeError, match="flexquant.merge is imported from .* instead of"):
        check_imports(copy, "serve")
