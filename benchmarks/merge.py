# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How fast and how small is merging? Against ``cp -r`` of the same bytes, interleaved.

    python benchmarks/merge.py --gib 8 --folder /data --output benchmarks/results/merge.json

Makes two random checkpoints of one model, Llama-shaped, W8A8 and W4A16, several shards each. Merging
compares the weights (the KV caches must be interchangeable), hashes every tensor and waits for the disk.
``cp`` does none of it, so the time of the comparison and of ``cp -r`` and ``sync`` is given too.
Prints a table and, as the last line, the same as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from flexquant.measuring.machine import cpu_model

HIDDEN, INTERMEDIATE, KV_SIZE, VOCAB, GROUP_SIZE = 2048, 8192, 512, 1024, 128
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_SIZE, HIDDEN),
    "self_attn.v_proj": (KV_SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
LAYERS_PER_SHARD = 4
GIB = 1 << 30
BF16_ONE = b"\x80\x3f"

Tensors = Iterator[tuple[str, str, list[int], bytes]]


def layer_tensors(layer: int, scheme: str, pool: bytes) -> Tensors:
    """Yield (name, dtype, shape, bytes) of one decoder layer, the bytes cut from a random pool."""
    prefix = f"model.layers.{layer}."

    def cut(name: str, size: int) -> bytes:
        start = hash_name(name) % (len(pool) - size)
        return pool[start : start + size]

    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", "BF16", [HIDDEN], BF16_ONE * HIDDEN
    for projection, (rows, columns) in PROJECTIONS.items():
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


def make_source(folder: Path, scheme: str, num_layers: int, pool: bytes) -> None:
    folder.mkdir()
    shards = []
    for first in range(0, num_layers, LAYERS_PER_SHARD):
        layers = range(first, min(first + LAYERS_PER_SHARD, num_layers))
        shards.append([t for layer in layers for t in layer_tensors(layer, scheme, pool)])
        write_shard(folder / shard_name(len(shards) - 1), shards[-1])
        shards[-1] = [(name, dtype, shape, b"") for name, dtype, shape, _ in shards[-1]]
    embedding = bytearray(pool[: 2 * VOCAB * HIDDEN])
    embedding[1::2] = embedding[1::2].translate(bytes((b & 0x80) | 0x3C for b in range(256)))  # about 2 ** -6
    outer = [("model.embed_tokens.weight", [VOCAB, HIDDEN]), ("lm_head.weight", [VOCAB, HIDDEN])]
    shards.append(
        [(name, "BF16", shape, embedding) for name, shape in outer]
        + [("model.norm.weight", "BF16", [HIDDEN], BF16_ONE * HIDDEN)]
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
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
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


def merge_once(sources: dict[str, str], output: str) -> tuple[float, float, int]:
    """Return seconds in all and until the weights are compared (no imports), and the peak memory in bytes.

    The memory is that above the bare interpreter, torch included.
    """
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    importlib.import_module("flexquant.merge.kv.compatibility")
    from flexquant.merge import merge_checkpoints

    compared = 0.0

    def kv_progress(done: int, total: int) -> None:
        nonlocal compared
        compared = time.perf_counter()

    started = time.perf_counter()
    merge_checkpoints(sources, output, max_shard_size=GIB // 2, kv_progress=kv_progress)
    seconds = time.perf_counter() - started
    return seconds, compared - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def copy_once(sources: dict[str, str], output: str) -> tuple[float, float]:
    """Return the seconds of ``cp -r``, and of ``cp -r`` and ``sync``."""
    os.mkdir(output)
    started = time.perf_counter()
    subprocess.run(["cp", "-r", *sources.values(), output], check=True)
    copied = time.perf_counter() - started
    os.sync()
    return copied, time.perf_counter() - started


def measure(folder: Path, gib: float, repeats: int) -> dict[str, object]:
    layer_bytes = 1.5 * sum(rows * columns for rows, columns in PROJECTIONS.values())
    num_layers = max(1, round(gib * GIB / layer_bytes))
    pool = os.urandom(32 << 20)
    sources = {scheme: str(folder / scheme) for scheme in ("w8a8", "w4a16")}
    for scheme, path in sources.items():
        make_source(Path(path), scheme, num_layers, pool)
    nbytes = sum(f.stat().st_size for path in sources.values() for f in Path(path).iterdir())
    copies, synced, merges, compares, peaks = [], [], [], [], []
    for _ in range(repeats):
        for kind in ("cp", "merge"):
            output = str(folder / "output")
            os.sync()
            if kind == "cp":
                seconds, seconds_synced = copy_once(sources, output)
                copies.append(seconds)
                synced.append(seconds_synced)
            else:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
                    seconds, seconds_compare, peak = child.submit(merge_once, sources, output).result()
                merges.append(seconds)
                compares.append(seconds_compare)
                peaks.append(peak)
            shutil.rmtree(output)
    streams = [merge - compare for merge, compare in zip(merges, compares, strict=True)]
    cp, cp_sync, merge, stream = (statistics.median(times) for times in (copies, synced, merges, streams))
    return {
        "input_bytes": nbytes,
        "seconds_cp": copies,
        "seconds_cp_and_sync": synced,
        "seconds_merge": merges,
        "seconds_merge_without_comparing": streams,
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
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, interleaved (default: 3)")
    parser.add_argument("--folder", help="where to make the temporary inputs (default: the system's)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="flexquant-merge-") as folder:
        measured = measure(Path(folder), args.gib, args.repeats)
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
