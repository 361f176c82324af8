# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How fast and how small is merging? Against ``cp -r`` of the same bytes, interleaved.

    python -m benchmarks.merge --gib 8 --folder /data --output benchmarks/results/merge.json
    python -m benchmarks.merge --gib 8 --hidden 8192 --folder /data
    python -m benchmarks.merge --awq

Makes two random checkpoints of one model, Llama-shaped, W8A8 and W4A16, a shard a layer; with ``--awq`` the
second is in AWQ's format, which merging converts. Merging compares the weights (the KV caches must be
interchangeable), hashes every tensor and waits for the disk. ``cp`` does none of it, so a merge that compares
nothing is timed too, and ``cp -r`` and ``sync``. ``flexquant verify`` of the result is timed against ``cat``
of its files, once with none of them in the page cache and once with what the cache holds by then. Prints a
table and, as the last line, the same as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.speed.shapes import Shape
from flexquant.serving.kernels import cpu_model

GIB = 1 << 30
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The output that each place of a word of AWQ's holds, of eight neighbouring ones."""
TIMED = (
    *("cp", "cp_and_sync", "merge", "merge_without_comparing"),
    *("read", "verify", "read_cached", "verify_cached"),
)
"""What is timed: ``cp -r``, merges, and ``cat`` and ``flexquant verify`` with empty and full page cache."""

T = TypeVar("T")


def memory(name: str) -> int:
    """Return ``VmRSS``, this process's memory in bytes, or ``VmHWM``, the most that it had.

    Not getrusage's peak, which counts what the parent had when it started this process.
    """
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def merge_once(sources: dict[str, str], output: str) -> tuple[float, int]:
    """Return a merge's seconds without imports, and its peak memory in bytes without the interpreter's."""
    before = memory("VmRSS")
    importlib.import_module("flexquant.merge.kv.compatibility")
    from flexquant.merge import merge_checkpoints

    started = time.perf_counter()
    merge_checkpoints(sources, output, max_shard_size=GIB // 2)
    return time.perf_counter() - started, memory("VmHWM") - before


def merge_without_comparing_once(sources: dict[str, str], output: str) -> float:
    """Return the seconds of a merge that does not compare the variants."""
    compatibility = importlib.import_module("flexquant.merge.kv.compatibility")
    compatibility.check_kv_compatibility = lambda *_: compatibility.KVReport(mixable=[[*sources]])
    return merge_once(sources, output)[0]


def copy_once(sources: dict[str, str], output: str) -> tuple[float, float]:
    """Return the seconds of ``cp -r``, and of ``cp -r`` and ``sync``."""
    os.mkdir(output)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", *sources.values(), output], check=True)
    copied = time.perf_counter() - started
    os.sync()
    return copied, time.perf_counter() - started


def verify_once(folder: str) -> float:
    """Return the seconds of a verification, imports left out."""
    from flexquant.merge import verify_checkpoint

    started = time.perf_counter()
    verify_checkpoint(folder)
    return time.perf_counter() - started


def read_once(folder: str) -> float:
    """Return the seconds that ``cat`` takes for all files."""
    started = time.perf_counter()
    files = sorted(str(path) for path in Path(folder).iterdir())
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def drop_from_cache(folder: str) -> None:
    """Have the system drop the content of a folder's files from the page cache."""
    for path in Path(folder).iterdir():
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_child(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(function, *arguments).result()


def make_sources(folder: Path, gib: float, hidden: int, awq: bool) -> tuple[dict[str, str], int]:
    """Write the two checkpoints, of ``gib`` GiB together; return their folders and the number of layers."""
    # Here, as the processes whose memory is measured import this module too.
    from benchmarks.speed.synthetic import write_checkpoint

    shape = Shape(hidden, 4 * hidden, 1, heads=32, kv_heads=8, head_dim=hidden // 32, vocabulary=1024)
    weights = sum(outputs * inputs for outputs, inputs in shape.projections().values())
    shape = replace(shape, layers=max(1, round(gib * GIB / (1.5 * weights))), tied=True)
    sources = {scheme: folder / scheme for scheme in ("w8a8", "w4a16")}
    for scheme, path in sources.items():
        write_checkpoint(path, shape, scheme)
    if awq:
        convert_to_awq(sources["w4a16"])
    return {scheme: str(path) for scheme, path in sources.items()}, shape.layers


def convert_to_awq(folder: Path) -> None:
    """Rewrite a checkpoint in W4A16, groups of 128, in AWQ's format."""
    import torch
    from safetensors.torch import load_file, save_file

    weight_map = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(".weight_packed")]:
            module = name.removesuffix("weight_packed")
            packed, scale = tensors.pop(name), tensors.pop(f"{module}weight_scale")
            del tensors[f"{module}weight_shape"]
            rows, groups = scale.shape
            pairs = packed.view(torch.uint8)  # [rows, columns / 2], the first of two in the lower half
            values = torch.stack([pairs & 15, pairs >> 4], -1).view(rows // 8, 8, -1)[:, AWQ_COLUMNS]
            words = (values[:, 0::2] | values[:, 1::2] << 4).permute(2, 0, 1).contiguous()
            tensors[f"{module}qweight"] = words.view(torch.int32).squeeze(-1)
            tensors[f"{module}qzeros"] = torch.full((groups, rows // 8), -0x77777778, dtype=torch.int32)  # 8s
            tensors[f"{module}scales"] = scale.T.contiguous()
        weight_map |= dict.fromkeys(tensors, file.name)
        save_file(tensors, file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": awq}))


def measure(folder: Path, gib: float, hidden: int, repeats: int, awq: bool) -> dict[str, Any]:
    """Return the sizes, the seconds of every kind of run, and their medians over `cp -r` or reading."""
    sources, num_layers = make_sources(folder, gib, hidden, awq)
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    peaks = []
    output = str(folder / "output")
    for _ in range(repeats):
        for kind in ("cp", "merge_without_comparing", "merge"):
            os.sync()
            if kind == "cp":
                copied, synced = copy_once(sources, output)
                times["cp"].append(copied)
                times["cp_and_sync"].append(synced)
            elif kind == "merge_without_comparing":
                times[kind].append(in_child(merge_without_comparing_once, sources, output))
            else:
                seconds, peak = in_child(merge_once, sources, output)
                times[kind].append(seconds)
                peaks.append(peak)
                for name, function in (("read", read_once), ("verify", verify_once)):
                    drop_from_cache(output)
                    times[name].append(in_child(function, output))
                    times[f"{name}_cached"].append(in_child(function, output))
            shutil.rmtree(output)
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    compared = [("verify", "read"), ("merge", "cp"), ("merge", "cp_and_sync")]
    compared += [("merge_without_comparing", base) for base in ("cp", "cp_and_sync")]
    return {
        "hidden_size": hidden,
        "num_layers": num_layers,
        "input_bytes": sum(f.stat().st_size for path in sources.values() for f in Path(path).iterdir()),
        **{f"seconds_{name}": seconds for name, seconds in times.items()},
        **{f"{one}_to_{base}": median[one] / median[base] for one, base in compared},
        "verify_to_read_cached": median["verify_cached"] / median["read_cached"],
        "peak_rss_above_interpreter_bytes": max(peaks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2, help="size of both inputs together (default: 2)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the layers (default: 2048)")
    parser.add_argument("--awq", action="store_true", help="make the INT4 checkpoint in AWQ's format")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, interleaved (default: 3)")
    parser.add_argument("--folder", help="where to make the temporary inputs (default: the system's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="flexquant-merge-") as folder:
        measured = measure(Path(folder), args.gib, args.hidden, args.repeats, args.awq)
    result = {
        "benchmark": "merge",
        "argv": sys.argv[1:],
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, {platform.platform()}",
        "versions": {"python": platform.python_version()} | {p: version(p) for p in ("flexquant", "torch")},
        **measured,
    }
    print(f"{'':23}  {'median s':>8}  {'GB/s':>6}")
    for name in TIMED:
        seconds = statistics.median(measured[f"seconds_{name}"])
        print(f"{name:23}  {seconds:8.2f}  {measured['input_bytes'] / seconds / 1e9:6.2f}")
    peak = measured["peak_rss_above_interpreter_bytes"]
    print(f"peak memory above the interpreter, torch included: {peak / 1e6:.0f} MB")
    line = json.dumps(result)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
