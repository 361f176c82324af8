# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find the fastest of several kernels for a layer, timed once on a machine and then remembered.

A trial's result is a file in vLLM's cache folder, so that the next start, and the other ranks of this one,
take the same kernels: kernels differ in the last bits of their results. To time them anew, delete the folder
``flexquant/cpu_kernels`` there.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import digest_of, versions_of
from flexquant.serving.cpu.machine import cpu_model
from flexquant.serving.vllm_api import envs

logger = init_logger("vllm.flexquant.cpu")

CLEARLY = 0.95
"""Share of the first kernel's time below which another kernel is chosen."""
TIMEOUT = 600
"""Largest number of seconds for all trials of a start."""


def find_fastest(layers: Sequence[JsonObject]) -> list[str]:
    """Return the name of the fastest kernel for each layer, by the geometric mean of the times over sizes.

    ``layers`` have the form that :func:`flexquant.serving.cpu.trial.measure` takes. The first kernel is kept
    unless another is clearly faster, and if the trial fails.
    """
    keys = [{**_circumstances(), **layer} for layer in layers]
    files = [_folder() / f"{digest_of(key)[:32]}.json" for key in keys]
    missing = [i for i, key in enumerate(keys) if _read(files[i], key) is None]
    chosen = [layer["kernels"][0] for layer in layers]
    if missing:
        logger.info("FlexQuant tries which CPU kernels are the fastest, once on this machine")
        try:
            measured = _try([layers[i] for i in missing])
        except (OSError, subprocess.SubprocessError, ValueError) as e:
            logger.warning("FlexQuant could not try CPU kernels, and takes vLLM's: %s", e)
            measured = []
        for i, times in zip(missing, measured, strict=False):
            chosen[i] = _least(times, chosen[i])
            _write(files[i], {"key": keys[i], "chosen": chosen[i], "microseconds": times})
    return [_read(file, key) or first for file, key, first in zip(files, keys, chosen, strict=True)]


def _least(times: dict[str, dict[str, float]], first: str) -> str:
    means = {name: statistics.geometric_mean(found.values()) for name, found in times.items()}
    means[first] *= CLEARLY
    return min(means, key=lambda name: means[name])


def _try(layers: list[JsonObject]) -> list[dict[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "request.json", Path(folder) / "reply.json"
        request.write_text(
            json.dumps({"threads": torch.get_num_threads(), "layers": layers}), encoding="utf-8"
        )
        command = [sys.executable, "-m", "flexquant.serving.cpu.trial", str(request), str(reply)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            raise OSError(f"the process ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        return json.loads(reply.read_text(encoding="utf-8"))


def _circumstances() -> JsonObject:
    versions = versions_of(("torch", "vllm", "zentorch"))
    return {"cpu": cpu_model(), "threads": torch.get_num_threads(), "versions": versions}


def _folder() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "flexquant" / "cpu_kernels"


def _read(file: Path, key: JsonObject) -> str | None:
    """Return an earlier trial's choice; None if there is none, or if its file cannot be used."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found["chosen"] if found["key"] == key and found["chosen"] in key["kernels"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, found: JsonObject) -> None:
    """Store a trial, unless another rank was first or the folder is not writable."""
    written = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(found, indent=1), encoding="utf-8")
        if _read(file, found["key"]) is None:
            os.replace(written, file)
    except OSError as e:
        logger.warning("FlexQuant will try the CPU kernels again at the next start: %s", e)
    finally:
        written.unlink(missing_ok=True)
