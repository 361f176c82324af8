# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The tests' own helper for programs shows what fails, and lets nothing outlast its time."""

from __future__ import annotations

import sys

import pytest

from tests import programs


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_another_exit_code_fails_with_what_was_printed():
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    done = programs.run(python(code), timeout=60, status=3)
    assert (done.stdout, done.stderr) == ("one\n", "two\n")
    assert programs.run(python(code), timeout=60, status=None).returncode == 3
    with pytest.raises(pytest.fail.Exception, match="(?s)ended with 3 instead of 0.*one.*two"):
        programs.run(python(code), timeout=60)


def test_a_program_that_takes_too_long_may_clean_up_and_fails(tmp_path):
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where pytest runs in the background
print("started", flush=True)
try:
    time.sleep(600)
finally:
    print("cleaned up")
"""
    with pytest.raises(pytest.fail.Exception, match="(?s)did not end within 5 s.*started\ncleaned up"):
        programs.run(python(code), timeout=5)
