# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compile the C++ loops of this folder, once for a machine: PyTorch has no operators for what they do.

Without a compiler there are none, and PyTorch's operators do the same in several steps, but more slowly.
"""

import functools
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import torch
from vllm.logger import init_logger

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.results import digest_of, hash_file
from flexquant.errors import said_by
from flexquant.serving.kernels import cpu_identity
from flexquant.serving.vllm_api import envs

NAMES = ("int4_to_int8.cpp", "weight_only.cpp", "rotation.cpp")
SOURCES = [Path(__file__).with_name(name) for name in NAMES]
# A multiplication and an addition round twice, as PyTorch's operators do, whatever the CPU.
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
OPENMP = ["-fopenmp"]
"""Without it PyTorch's headers compile ``at::parallel_for`` for one thread."""

logger = init_logger("vllm.flexquant.cpu")


def loops_key() -> JsonObject:
    """Return what the compiled loops depend on."""
    sources = [source.read_text(encoding="utf-8") for source in SOURCES]
    return {"sources": sources, "flags": FLAGS + OPENMP, "torch": torch.__version__, "cpu": cpu_identity()}


@functools.cache
def has_loops() -> bool:
    """Whether the loops are compiled, which is done now if it was not done before on such a machine."""
    folder, key = Path(envs.VLLM_CACHE_ROOT) / "flexquant" / "loops", digest_of(loops_key())[:16]
    path = os.environ.get("PATH", "")
    # PyTorch looks for ninja, which vLLM brings, also where the environment is not activated.
    os.environ["PATH"] = os.pathsep.join([path, str(Path(sys.executable).parent)])
    try:
        if not _load_kept(folder, key):
            _compile(folder, key)
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as e:
        logger.warning(
            "FlexQuant computes by INT8 weights and rotates slowly, as its loops could not be compiled (%s); "
            "install g++ and ninja",
            said_by(e),
        )
        return False
    finally:
        os.environ["PATH"] = path
    return True


def _load_kept(folder: Path, key: str) -> bool:
    """Load the loops that an earlier start has compiled; False if there are none that can be trusted."""
    for library in folder.glob(f"{key}-*.so"):
        try:
            if not (_is_only_ours(folder) and _is_only_ours(library)):
                raise OSError("users other than this one and root can change it")
            if library.stem != f"{key}-{hash_file(library)}":
                raise OSError("it is damaged")
            torch.ops.load_library(library)
            return True
        except OSError as e:
            logger.warning("FlexQuant compiles its loops again, and does not load %s: %s", library, e)
    return False


def _compile(folder: Path, key: str) -> None:
    """Compile the loops, load them, and keep them in ``folder`` if no other user can write there."""
    from torch.utils.cpp_extension import load

    is_kept = False
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_kept = _is_only_ours(folder) and os.access(folder, os.W_OK)
    if not is_kept:
        logger.warning(
            "FlexQuant compiles its loops at every start, as other users can write to %s or this one cannot; "
            "make it a folder that this user alone can write to",
            folder,
        )
    # A folder of this process's own: PyTorch's lock in it would outlive a process that is killed.
    with tempfile.TemporaryDirectory(dir=folder if is_kept else None) as build:
        sources, flags = [str(source) for source in SOURCES], FLAGS + OPENMP
        load("loops", sources, flags, extra_ldflags=OPENMP, build_directory=build, is_python_module=False)
        if is_kept:
            library = next(Path(build).glob("*.so"))
            library.chmod(0o755)
            kept = folder / f"{key}-{hash_file(library)}.so"
            for refused in {*folder.glob(f"{key}-*.so")} - {kept}:
                refused.unlink(missing_ok=True)
            os.replace(library, kept)


def _is_only_ours(path: Path) -> bool:
    """Whether no user but this one and root can write a file or a folder."""
    found = path.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def thread_memory(kept: threading.local, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Return this thread's ``memory``, of at least ``numbers``: two threads may multiply at once."""
    memory: torch.Tensor | None = getattr(kept, "memory", None)
    if memory is None or memory.numel() < numbers:
        with torch.inference_mode(False):  # made inside that mode, it could not be written to outside of it
            memory = kept.memory = torch.empty(numbers, dtype=dtype)
    return memory
