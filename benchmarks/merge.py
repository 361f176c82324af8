# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How fast and how small is merging? Against ``cp -r`` of the same bytes, interleaved.

    python -m benchmarks.merge --gib 8 --folder /data --output benchmarks/results/merge.json
    python -m benchmarks.merge --gib 8 --hidden 8192 --folder /data
    python -m benchmarks.merge --awq

Makes two random checkpoints of one model, Llama-shaped, W8A8 and W4A16, several shards each; with ``--awq``
the second is in AWQ's format, which merging converts. Merging compares the weights (the KV caches must be
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
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from benchmarks.merge_sources import make_source, weights_of_layer
from flexquant.serving.kernels import cpu_model

GIB = 1 << 30

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


def measure_verify(folder: str, times: dict[str, list[float]]) -> None:
    """Time verifying and reading, and append the seconds to the four lists."""
    for name, function in (("read", read_once), ("verify", verify_once)):
        drop_from_cache(folder)
        times[name].append(in_child(function, folder))
        times[f"{name}_cached"].append(in_child(function, folder))


def measure(folder: Path, gib: float, hidden: int, repeats: int, int4: str) -> dict[str, object]:
    num_layers = max(1, round(gib * GIB / (1.5 * weights_of_layer(hidden))))
    pool = os.urandom(max(32 << 20, 3 * hidden * hidden))  # the largest packed projection has 2 * hidden^2
    sources = {name: str(folder / name) for name in ("w8a8", "w4a16")}
    for path, scheme in zip(sources.values(), ("w8a8", int4), strict=True):
        make_source(Path(path), scheme, num_layers, hidden, pool)
    nbytes = sum(f.stat().st_size for path in sources.values() for f in Path(path).iterdir())
    copies, synced, merges, streams, peaks = [], [], [], [], []
    readings: dict[str, list[float]] = {
        name: [] for name in ("read", "read_cached", "verify", "verify_cached")
    }
    for _ in range(repeats):
        for kind in ("cp", "merge without comparing", "merge"):
            output = str(folder / "output")
            os.sync()
            if kind == "cp":
                seconds, seconds_synced = copy_once(sources, output)
                copies.append(seconds)
                synced.append(seconds_synced)
            elif kind == "merge without comparing":
                streams.append(in_child(merge_without_comparing_once, sources, output))
            else:
                seconds, peak = in_child(merge_once, sources, output)
                merges.append(seconds)
                peaks.append(peak)
                measure_verify(output, readings)
            shutil.rmtree(output)
    cp, cp_sync, merge, stream = (statistics.median(times) for times in (copies, synced, merges, streams))
    read, read_cached, verify, verify_cached = (statistics.median(times) for times in readings.values())
    return {
        "hidden_size": hidden,
        "num_layers": num_layers,
        "input_bytes": nbytes,
        "seconds_cp": copies,
        "seconds_cp_and_sync": synced,
        "seconds_merge": merges,
        "seconds_merge_without_comparing": streams,
        **{f"seconds_{name}": times for name, times in readings.items()},
        **{f"{name}_gb_per_s": nbytes / statistics.median(times) / 1e9 for name, times in readings.items()},
        "verify_to_read": verify / read,
        "verify_to_read_cached": verify_cached / read_cached,
        "cp_gb_per_s": nbytes / cp / 1e9,
        "cp_and_sync_gb_per_s": nbytes / cp_sync / 1e9,
        "merge_gb_per_s": nbytes / merge / 1e9,
        "merge_without_comparing_gb_per_s": nbytes / stream / 1e9,
        "merge_to_cp": merge / cp,
        "merge_to_cp_and_sync": merge / cp_sync,
        "merge_without_comparing_to_cp": stream / cp,
        "merge_without_comparing_to_cp_and_sync": stream / cp_sync,
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
        measured = measure(Path(folder), args.gib, args.hidden, args.repeats, "awq" if args.awq else "w4a16")
    result = {
        "benchmark": "merge",
        "argv": sys.argv[1:],
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, {platform.platform()}",
        "versions": {"python": platform.python_version()} | {p: version(p) for p in ("flexquant", "torch")},
        **measured,
    }
    rows = {
        "cp -r": "cp",
        "cp -r and sync": "cp_and_sync",
        "flexquant merge": "merge",
        "  without comparing": "merge_without_comparing",
        "cat": "read",
        "flexquant verify": "verify",
        "cat, cached": "read_cached",
        "verify, cached": "verify_cached",
    }
    print(f"{'':19}  {'median s':>8}  {'GB/s':>6}")
    for label, key in rows.items():
        seconds = statistics.median(measured[f"seconds_{key}"])
        print(f"{label:19}  {seconds:8.2f}  {measured[f'{key}_gb_per_s']:6.2f}")
    peak = measured["peak_rss_above_interpreter_bytes"]
    print(f"peak memory above the interpreter, torch included: {peak / 1e6:.0f} MB")
    line = json.dumps(result)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
