# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How fast and how small is merging? Against ``cp -r`` of the same bytes, interleaved.

    python benchmarks/merge.py --gib 8 --folder /data --output benchmarks/results/merge.json
    python benchmarks/merge.py --gib 8 --hidden 8192 --folder /data

Makes two random checkpoints of one model, Llama-shaped, W8A8 and W4A16, several shards each. Merging
compares the weights (the KV caches must be interchangeable), hashes every tensor and waits for the disk.
``cp`` does none of it, so a merge that compares nothing is timed too, and ``cp -r`` and ``sync``.
``flexquant verify`` of the result is timed against ``cat`` of its files, once with none of them in the page
cache and once with what the cache holds by then. Prints a table and, as the last line, the same as JSON.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from flexquant.serving.cpu.machine import cpu_model

VOCAB, GROUP_SIZE = 1024, 128
HEADS, KV_HEADS = 32, 8
WEIGHTS_PER_SHARD = 1 << 28
GIB = 1 << 30
BF16_ONE = b"\x80\x3f"

T = TypeVar("T")
Tensors = Iterator[tuple[str, str, list[int], bytes]]


def projections(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's Linears."""
    intermediate, kv_size = 4 * hidden, hidden * KV_HEADS // HEADS
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def weights_of_layer(hidden: int) -> int:
    return sum(rows * columns for rows, columns in projections(hidden).values())


def layer_tensors(layer: int, scheme: str, hidden: int, pool: bytes) -> Tensors:
    """Yield (name, dtype, shape, bytes) of one decoder layer, the bytes cut from a random pool."""
    prefix = f"model.layers.{layer}."

    def cut(name: str, size: int) -> bytes:
        start = hash_name(name) % (len(pool) - size)
        return pool[start : start + size]

    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", "BF16", [hidden], BF16_ONE * hidden
    for projection, (rows, columns) in projections(hidden).items():
        name = f"{prefix}{projection}.weight"
        packed = cut(name, rows * columns // 2)
        if scheme == "w8a8":
            yield name, "I8", [rows, columns], times_16(packed)
            yield name + "_scale", "BF16", [rows, 1], b"\x80\x3a" * rows  # 2 ** -10
        else:
            groups = columns // GROUP_SIZE
            yield name + "_packed", "I32", [rows, columns // 8], packed
            yield name + "_shape", "I64", [2], rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
            yield name + "_scale", "BF16", [rows, groups], b"\x80\x3c" * (rows * groups)  # 2 ** -6


def times_16(packed: bytes) -> bytes:
    """Return 16 times each packed 4-bit value, as int8: the same weights at a scale of a sixteenth."""
    values = bytearray(2 * len(packed))
    values[0::2] = packed.translate(bytes(((b & 15) - 8) * 16 % 256 for b in range(256)))
    values[1::2] = packed.translate(bytes(((b >> 4) - 8) * 16 % 256 for b in range(256)))
    return bytes(values)


def hash_name(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % 1_000_000_007


def write_shard(path: Path, tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    header, position = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for *_, data in tensors:
            f.write(data)


def make_source(folder: Path, scheme: str, num_layers: int, hidden: int, pool: bytes) -> None:
    folder.mkdir()
    shards = []
    layers_per_shard = max(1, WEIGHTS_PER_SHARD // weights_of_layer(hidden))
    for first in range(0, num_layers, layers_per_shard):
        layers = range(first, min(first + layers_per_shard, num_layers))
        shards.append([t for layer in layers for t in layer_tensors(layer, scheme, hidden, pool)])
        write_shard(folder / shard_name(len(shards) - 1), shards[-1])
        shards[-1] = [(name, dtype, shape, b"") for name, dtype, shape, _ in shards[-1]]
    embedding = bytearray(pool[: 2 * VOCAB * hidden])
    embedding[1::2] = embedding[1::2].translate(bytes((b & 0x80) | 0x3C for b in range(256)))  # about 2 ** -6
    outer = [("model.embed_tokens.weight", [VOCAB, hidden]), ("lm_head.weight", [VOCAB, hidden])]
    shards.append(
        [(name, "BF16", shape, embedding) for name, shape in outer]
        + [("model.norm.weight", "BF16", [hidden], BF16_ONE * hidden)]
    )
    write_shard(folder / shard_name(len(shards) - 1), shards[-1])
    weight_map = {name: shard_name(i) for i, shard in enumerate(shards) for name, *_ in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    if scheme == "w4a16":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}
    group = {"targets": ["Linear"], "weights": weights}
    group |= {"input_activations": activations} if scheme == "w8a8" else {}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCAB,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": {"w8a8": "int-quantized", "w4a16": "pack-quantized"}[scheme],
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def shard_name(number: int) -> str:
    return f"shard-{number:03d}.safetensors"


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


def measure(folder: Path, gib: float, hidden: int, repeats: int) -> dict[str, object]:
    num_layers = max(1, round(gib * GIB / (1.5 * weights_of_layer(hidden))))
    pool = os.urandom(max(32 << 20, 3 * hidden * hidden))  # the largest packed projection has 2 * hidden^2
    sources = {scheme: str(folder / scheme) for scheme in ("w8a8", "w4a16")}
    for scheme, path in sources.items():
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
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, interleaved (default: 3)")
    parser.add_argument("--folder", help="where to make the temporary inputs (default: the system's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="flexquant-merge-") as folder:
        measured = measure(Path(folder), args.gib, args.hidden, args.repeats)
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
