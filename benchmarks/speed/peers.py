# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Servers of other programs, compared on CPUs: llama.cpp's and OpenVINO GenAI (`make .venv/peers/.done`).

Both serve the 16-bit checkpoint as GGUF, converted and quantised by llama.cpp's own programs, with settings
that their manuals advise, and without a cache of prompts, as vLLM has none here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.results import ROOT
from benchmarks.speed.servers import GIB, Server, ServerOptions, own_bytes
from benchmarks.speed.shapes import Shape
from benchmarks.speed.subjects import LLAMA_CPP, OPENVINO, Subject
from examples.vllm_server import VLLMServer
from flexquant.errors import FlexQuantError

ENVIRONMENT = ROOT / ".venv/peers"
MADE_FROM = "made-from.json"
VERSIONS = {
    LLAMA_CPP: "llama_cpp_python-*",
    OPENVINO: "lib/python*/site-packages/openvino_genai-*.dist-info",
}
"""Peer -> the folder in the environment that has its version in its name."""


def check_peer(subject: Subject, on_gpu: bool) -> str:
    """Return a peer's version; raise FlexQuantError if it is not set up, or cannot be compared."""
    leave_out = f"leave {subject.name} out of --subjects"
    if on_gpu:
        raise FlexQuantError(f"{subject.name} is compared on CPUs only, but a GPU is used here; {leave_out}")
    assert subject.peer is not None
    found = list(ENVIRONMENT.glob(VERSIONS[subject.peer]))
    if not found or not (ENVIRONMENT / ".done").is_file():
        raise FlexQuantError(
            f"subject '{subject.name}' needs {ENVIRONMENT}, which is not there or not complete; run "
            f"`make .venv/peers/.done`, or {leave_out}"
        )
    return found[0].name.removesuffix(".dist-info")


def make_gguf(folder: Path, subject: Subject, work: Path) -> Path:
    """Return the GGUF file of a 16-bit checkpoint in a peer's quantisation; make what is missing in ``work``.

    Raises FlexQuantError if ``work`` holds files of another model, or if llama.cpp does not convert this one.
    """
    made_from = {"folder": str(folder.resolve())} | {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(folder.glob("*.safetensors"))
    }
    note = work / MADE_FROM
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) != made_from:
        raise FlexQuantError(
            f"{work} holds GGUF files of another model than {folder} is now; delete it, or choose another "
            "--work"
        )
    work.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(made_from), encoding="utf-8")
    whole = work / "F16.gguf"
    if not whole.is_file():
        llama_cpp = next(ENVIRONMENT.glob(f"{VERSIONS[LLAMA_CPP]}/vendor/llama.cpp"))
        script = Path(__file__).with_name("to_gguf.py")
        _make(whole, [sys.executable, "-P", str(script), str(llama_cpp), str(folder)], subject)
    assert subject.quantisation is not None
    file = work / f"{subject.quantisation}.gguf"
    if not file.is_file():
        _make(file, [str(ENVIRONMENT / "bin/llama-quantize"), str(whole)], subject, subject.quantisation)
    return file


def _make(file: Path, command: Sequence[str], subject: Subject, *more: str) -> None:
    """Run a program that writes a file, which is there only when it is complete."""
    print(f"making {file}", flush=True)
    stage = file.with_name(f".{file.name}")
    done = subprocess.run([*command, str(stage), *more], capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}").splitlines()[-1]
        raise FlexQuantError(
            f"llama.cpp does not make {file} of this model: {said}; leave {subject.name} out of --subjects"
        )
    stage.rename(file)


def peer_arguments(
    subject: Subject, file: Path, options: ServerOptions, shape: Shape, port: int
) -> list[str]:
    """Return the command of a peer's server, with the threads and the KV cache of vLLM's worker."""
    threads, gib = options.cpu_threads, int(options.kv_cache_gib or 1)
    if subject.peer == OPENVINO:
        script = Path(__file__).with_name("openvino_server.py")
        named = {"threads": threads, "max-length": options.max_length, "cache-gib": gib}
        command = [str(ENVIRONMENT / "bin/python"), str(script)]
    else:
        # As many requests at once as the KV cache holds of the greatest length.
        length = -(-options.max_length // 256) * 256
        slots = max(1, min(options.max_sequences, gib * 2**30 // (shape.kv_bytes_per_token * length)))
        named = {"threads": threads, "cpu-range": f"0-{threads - 1}", "cpu-strict": 1, "flash-attn": "on"}
        named |= {"parallel": slots, "ctx-size": slots * length, "cache-ram": 0, "host": "127.0.0.1"}
        # vLLM's client loses an answer that has a ping in it.
        named |= {"sse-ping-interval": -1}
        command = [str(ENVIRONMENT / "bin/llama-server"), "--no-kv-unified", "--no-cache-prompt", "--no-ui"]
    named |= {"model": file, "port": port}
    return [*command, *(part for name, value in named.items() for part in (f"--{name}", str(value)))]


class PeerServer(Server):
    """One running server of a peer; takes prompts as token ids."""

    def __init__(
        self, subject: Subject, folder: Path, file: Path, shape: Shape, options: ServerOptions, log: Path
    ) -> None:
        """Serve the GGUF ``file`` of the 16-bit checkpoint ``folder``."""
        self.subject, self.folder, self.file = subject, folder, file
        self.shape, self.options = shape, options
        self.program = f"the server of {subject.name}"
        VLLMServer.__init__(self, file, [], log, dict(os.environ))

    def command(self, model: str, port: int) -> list[str]:
        return peer_arguments(self.subject, Path(model), self.options, self.shape, port)

    @property
    def checkpoint_bytes(self) -> int:
        return self.file.stat().st_size

    def wait_until_ready(self, timeout: float) -> dict[str, Any]:
        """Return what the server takes, its version and settings; raise ServerError if it does not start."""
        seconds = self.wait_until_healthy(timeout)
        named = [Path(part).name for part in self.command(self.file.name, 0)]
        gib = round(own_bytes(self.processes.pid) * GIB["bytes"], 3)
        return {"start_seconds": round(seconds, 2), "process_gib": gib, "command": named}
