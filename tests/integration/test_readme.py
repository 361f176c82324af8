# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every command that the README shows works as written."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from benchmarks.speed.command_line import make_parser
from examples.vllm_server import vllm_serve
from flexquant.cli import build_parser, main
from tests import programs, readme

BIN = Path(sys.executable).parent
TUNED = programs.ROOT / "benchmarks" / "results" / "tuning" / "smollm2-135m.yaml"
FEW = {
    "eval": "--samples 4 --batch-sizes 4 --prompt-tokens 32 --tokens 8 --no-questions",
    "search": "--samples 1 --batch-size 1 --prompt-tokens 8 --tokens 2",
    "sensitivity": "--samples 1 --batch-size 1 --prompt-tokens 8 --tokens 2",
    "tune": "--quick --rounds 1 --max-batch 4 --max-tokens 32",
    "fit": "--quick --rounds 1 --max-batch 4 --max-tokens 32",
}


@pytest.fixture
def folder(tmp_path, real_model, real_variants, real_merged):
    """Return a folder with what the README's commands expect: a build's output, a policy, a text."""
    (tmp_path / "my-variants").mkdir()
    for name, path in real_variants.items():
        (tmp_path / "my-variants" / name).symlink_to(path)
    (tmp_path / "my-model").symlink_to(real_model)
    (tmp_path / "my-model-merged").symlink_to(real_merged)
    (tmp_path / "my-policy.yaml").write_text(readme.documents("flexquant.policy/v1")[0])
    (tmp_path / "my-text.txt").write_text(topics["execmodel"])
    return tmp_path


def of(program: str) -> list[str]:
    return [command for command in readme.commands() if shlex.split(command)[0] == program]


def test_the_readme_shows_no_other_commands():
    programs = {shlex.split(command)[0] for command in readme.commands()}
    assert programs == {"make", "flexquant", "vllm", "python"}


@pytest.mark.parametrize("command", of("make"))
def test_what_make_runs_is_there_and_understood(command):
    """`make test` runs this. test_examples runs what `make demo` starts; this checks that it starts that."""
    command = [*shlex.split(command), "--dry-run", "--always-make"]
    lines = programs.run(command, timeout=120).stdout.replace("\\\n", " ").splitlines()
    assert lines
    for program, *arguments in filter(None, map(shlex.split, lines)):
        if program.endswith("/flexquant"):
            build_parser().parse_args(arguments)
        for script in (a.removeprefix("--ignore=") for a in arguments if a.endswith(".py")):
            assert (programs.ROOT / script).is_file(), script


@pytest.mark.parametrize("command", of("python"))
def test_benchmark_commands_are_understood(command):
    """test_benchmarks runs the smallest of these commands."""
    program, module, name, *arguments = shlex.split(command)
    assert (program, module, name) == ("python", "-m", "benchmarks")
    make_parser("").parse_args(["run", *arguments] if arguments == ["--quick"] else arguments)


@pytest.mark.engine
@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.full)])
def test_flexquant_commands_in_order(folder, monkeypatch, measured):
    """`make test` parses the commands that measure, which have tests of their own, and runs the others."""
    monkeypatch.chdir(folder)
    commands = [c for c in of("flexquant") if not c.startswith(("flexquant quantize", "flexquant build"))]
    assert len(commands) > 6
    if not measured:
        shutil.copy(TUNED, "my-tuned.yaml")
    for command in commands:
        _, subcommand, *arguments = shlex.split(command)
        if measured or subcommand not in FEW:
            assert main([subcommand, *arguments, *shlex.split(FEW.get(subcommand, ""))]) == 0, command
        else:
            build_parser().parse_args([subcommand, *arguments])


def test_the_program_flexquant_is_installed():
    """The test above calls the program's entry point, but not the program."""
    assert "phase-batch" in programs.run([BIN / "flexquant", "policy", "list"], timeout=120).stdout


@pytest.mark.engine
@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.full) if i else c for i, c in enumerate(of("vllm"))]
)
def test_vllm_commands(command, real_merged, tmp_path, monkeypatch):
    (tmp_path / "my-policy.yaml").write_text(readme.documents("flexquant.policy/v1")[0])
    shutil.copy(TUNED, tmp_path / "my-tuned.yaml")
    monkeypatch.chdir(tmp_path)
    program, subcommand, model, *arguments = shlex.split(command)
    assert (program, subcommand, model) == ("vllm", "serve", "my-model-merged")
    limits = ["--max-model-len", "512", "--enforce-eager"]
    with vllm_serve(real_merged, *arguments, *limits) as url:
        assert url
