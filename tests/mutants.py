# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Mutation tests of a room: ``make mutants PATHS=flexquant/policy``.

mutmut knows one selection of tests for a whole project; here each room has its own, so that one without
torch and vLLM is not slowed down by others. It works in a copy of the tree, ``.work/mutants/ROOM``, where
afterwards ``python -m mutmut results`` names the mutants that survived, and ``python -m mutmut show NAME``
shows one. In merge/ the tests of a mutant can take half a minute: with ``--tests "absent merge"`` fewer are
run, and survivors have to be tried against the others.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import RawDescriptionHelpFormatter as AsWritten
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "flexquant/policy": ("cli_policy memory_fit pass_times policy policy_refusals routes"),
    "flexquant/checkpoint": (
        "absent foreign_errors format heads hub merge merge_ends_early merging_kinds mixing origins output "
        "same_model same_tokenizer settings_by_layer source_errors split_verify staged_file what_configs_name"
    ),
    "merge": (
        "absent conversion dequantize draft_heads foreign_errors heads kv_compat kv_layouts kv_proof "
        "kv_sampling kv_states merge merge_ends_early merging_formats merging_kinds mixing nested_fit "
        "nesting nesting_refusals origins quark_format same_model same_tokenizer settings_by_layer "
        "source_errors split_verify"
    ),
    "flexquant/serving/worker": "heads keys one_copy pass_records w4a8_scales",
}
"""Room -> the tests in tests/unit that are run against its mutants."""


def copy_tree(folder: Path, paths: list[str], tests: list[str]) -> None:
    """Copy what git lists into ``folder``, links followed, with mutmut's settings for ``paths``."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        elif source.is_file():
            shutil.copy2(source, target)
    settings = {
        # mutmut tells modules by their path, and merge/ is in the package as a link.
        "only_mutate": [
            re.sub("^merge(?=/|$)", "flexquant/merge", path) + ("" if path.endswith(".py") else "/*.py")
            for path in paths
        ],
        "pytest_add_cli_args_test_selection": [f"tests/unit/test_{name}.py" for name in tests],
    }
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(
        text.replace("[tool.mutmut]\n", "[tool.mutmut]\n" + lines), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AsWritten)
    parser.add_argument("paths", nargs="+", help=f"rooms or files of one of them: {', '.join(ROOMS)}")
    parser.add_argument("--tests", help="tests in tests/unit in place of those of the room")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    paths = [path.rstrip("/") for path in arguments.paths]
    rooms = {room for room in ROOMS for path in paths if path == room or path.startswith(room + "/")}
    if len(rooms) != 1:
        parser.error(f"name paths in one of {', '.join(ROOMS)}")
    (room,) = rooms

    folder = ROOT / ".work" / "mutants" / room.replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)  # mutmut does not see that a test has changed
    copy_tree(folder, paths, (arguments.tests or ROOMS[room]).split())
    run = [sys.executable, "-m", "mutmut", "run", "--max-children", str(arguments.jobs)]
    subprocess.run(run, cwd=folder, check=True)


if __name__ == "__main__":
    main()
