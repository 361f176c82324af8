# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a device file, a YAML document of schema ``flexquant.device/v1``: bandwidths, rates and overheads.

    memory_gib: 80
    memory_gb_per_s: 3350
    tflops: {bf16: 989.4, int8: 1978.9, fp8: 1978.9}    # data sheet, dense
    processors: 132                                     # streaming multiprocessors; left out for CPUs
    call_us: 25                                         # overhead of a single call: launch, ramp-up, tail
    call_in_pass_us: 8                                  # overhead in a pass: CUDA graphs hide launches
    attention_tflops: 500                               # in prefill; default: the bf16 kernel's rate
    kernels:                                            # by scheme
      w8a8: {efficiency: 0.6, bandwidth: 0.9, tiles: {64: 64x64, 128: 64x128, 256: 128x128}}
      w4a16: {efficiency: 0.387, bandwidth: 0.83}

``efficiency`` and ``bandwidth`` are the fractions of the data sheet's rate and bandwidth that a kernel
reaches; a measured device gives ``tflops`` and ``gb_per_s`` instead. ``tiles`` is for kernels without
split-K: it maps a largest number of tokens to output tiles of rows x columns; the last entry also holds for
more tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexquant.documents.named_files import builtin_names, read_named
from flexquant.documents.yaml_document import Document, KeyPath, from_yaml, show
from flexquant.errors import FlexQuantError

SCHEMA = "flexquant.device/v1"
PACKAGE = "flexquant.planning.devices"
RATES = {"bf16": "bf16", "w8a8": "int8", "fp8": "fp8", "w4a16": "bf16", "w8a16": "bf16", "w4a8": "int8"}
"""Scheme -> type of the numbers that its kernel multiplies, a key of ``tflops``.

If a device gives no kernel for w8a16 (8-bit weights, 16-bit activations), w4a16's is used, as in vLLM.
"""

# Smallest and largest values that a device file may give.
BANDWIDTH = (1, 100_000)  # GB/s
RATE = (0.001, 100_000)  # TFLOPS
MEMORY = (0.1, 10_000)  # GiB
FRACTION = (0.01, 1)
OVERHEAD = (0, 1_000_000)  # microseconds
CACHE = 20
"""Largest ratio of a kernel's bandwidth, for weights that stay in caches, to the memory's bandwidth."""
TILE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


@dataclass(frozen=True)
class Tile:
    """The part of the output that a kernel computes at a time, if a pass has up to ``tokens`` tokens."""

    tokens: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Kernel:
    """How fast a linear of one scheme runs."""

    flops_per_s: float
    """Operations a second; a multiplication and an addition count as two."""
    bytes_per_s: float
    """Bytes of weights, activations and outputs that the kernel moves a second."""
    call_seconds: float
    """Overhead of a single call: launch, ramp-up, tail."""
    call_in_pass_seconds: float
    """Overhead of a call among the others of a forward pass."""
    tiles: tuple[Tile, ...]
    """Tiles, ascending in tokens; empty for kernels that spread work evenly (split-K, stream-K)."""


@dataclass(frozen=True)
class Device:
    """Contents of a device file, in bytes and seconds."""

    name: str
    """The name or path by which it was loaded."""
    description: str
    memory_bytes: float
    """Size of the memory."""
    bytes_per_s: float
    """The data sheet's memory bandwidth."""
    tflops: Mapping[str, float]
    """The data sheet's dense rates in TFLOPS, by the operands' type: bf16; int8 and fp8 if it has them."""
    processors: int
    """Number of streaming multiprocessors; 1 for a CPU."""
    layer_seconds: float
    """Time of a decoder layer of any size beside its linears, e.g. for norms and to call the attention."""
    pass_seconds: float
    """Time of a forward pass of any size beside its layers, for scheduling and sampling."""
    reserve_bytes: float
    """Memory reserved for activations, CUDA graphs and the runtime."""
    attention_flops_per_s: float
    """Operations a second of attention in prefill."""
    kernels: Mapping[str, Kernel]
    """Scheme -> kernel, for the schemes that the device can run; bf16 is always one of them."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device has multiprocessors; device files of CPUs leave out ``processors``."""
        return self.processors > 1

    def kernel(self, scheme: str) -> Kernel:
        """Return the kernel of a scheme; raise :class:`FlexQuantError` for one that the device cannot run."""
        if scheme == "w8a16" and scheme not in self.kernels:
            scheme = "w4a16"
        if scheme not in self.kernels:
            raise FlexQuantError(
                f"device {self.name} has no kernel for {scheme}, only for {', '.join(self.kernels)}; choose "
                "another device or a checkpoint in these schemes, or give its rate under 'tflops' and its "
                "kernel under 'kernels'"
            )
        return self.kernels[scheme]


def builtin_devices() -> list[str]:
    """Return the sorted names of the devices that come with FlexQuant."""
    return builtin_names(PACKAGE)


def load_device(name_or_path: str) -> Device:
    """Load a built-in device by name, or a device file by path.

    :func:`~flexquant.documents.named_files.read_named` tells names from paths. Raises
    :class:`FlexQuantError` for an unknown name, an unreadable file, and a missing or absurd number, with its
    file, line and key.
    """
    content, source = read_named(name_or_path, PACKAGE, "device")
    return parse_device(content, source, name_or_path)


def parse_device(content: bytes, source: str, name: str) -> Device:
    """Validate a device's YAML; ``source`` opens the message of the FlexQuantError for a bad document."""
    return _validate(from_yaml(content, source, "device", ("schema", "memory_gb_per_s")), name)


def _validate(document: Document, name: str) -> Device:
    data = document.data
    required = ("schema", "description", "memory_gib", "memory_gb_per_s", "tflops", "kernels")
    overheads = ("call_us", "call_in_pass_us", "layer_us", "pass_us")
    optional = ("processors", "attention_tflops", *overheads, "reserve_gib")
    document.check_keys(data, (), required, optional)
    if data["schema"] != SCHEMA:
        document.fail(("schema",), f"is {show(data['schema'])}; this FlexQuant reads '{SCHEMA}' only")
    if not isinstance(data["description"], str):
        document.fail(("description",), f"is {show(data['description'])}; give text")
    memory = _number(document, ("memory_gib",), MEMORY, "GiB")
    bandwidth = _number(document, ("memory_gb_per_s",), BANDWIDTH, "GB/s")
    document.check_keys(data["tflops"], ("tflops",), ("bf16",), ("int8", "fp8"))
    tflops = {key: _number(document, ("tflops", key), RATE, "TFLOPS") for key in data["tflops"]}
    for key, rate in tflops.items():
        if rate < tflops["bf16"] / 10:
            document.fail(
                ("tflops", key),
                f"is {rate:g}, less than a tenth of the bf16 rate {tflops['bf16']:g}; give both in TFLOPS "
                "(10^12 operations a second), or leave the type out if the device lacks it",
            )
    processors = data.get("processors", 1)
    if not isinstance(processors, int) or isinstance(processors, bool) or not 1 <= processors <= 10_000:
        document.fail(("processors",), f"is {show(processors)}; give a whole number from 1 to 10000")
    call, layer, whole = (
        _number(document, (key,), OVERHEAD, "microseconds", 0.0) / 1e6
        for key in ("call_us", "layer_us", "pass_us")
    )
    call_in_pass = None
    if "call_in_pass_us" in data:
        call_in_pass = _number(document, ("call_in_pass_us",), OVERHEAD, "microseconds") / 1e6
    reserve = _number(document, ("reserve_gib",), (0, memory), "GiB", 0.0)
    if not isinstance(data["kernels"], dict) or "bf16" not in data["kernels"]:
        document.fail(("kernels",), f"is {show(data['kernels'])}; give bf16 at least, of {', '.join(RATES)}")
    document.check_keys(data["kernels"], ("kernels",), ("bf16",), [s for s in RATES if s != "bf16"])
    kernels = {
        scheme: _kernel(document, scheme, tflops, bandwidth, call, call_in_pass, "processors" in data)
        for scheme in data["kernels"]
    }
    bf16 = kernels["bf16"].flops_per_s
    attention = 1e12 * _number(document, ("attention_tflops",), RATE, "TFLOPS", bf16 / 1e12)
    gib = 2.0**30
    return Device(
        name,
        data["description"],
        memory * gib,
        bandwidth * 1e9,
        tflops,
        processors,
        layer,
        whole,
        reserve * gib,
        attention,
        kernels,
    )


def _kernel(
    document: Document,
    scheme: str,
    tflops: Mapping[str, float],
    bandwidth: float,
    call: float,
    call_in_pass: float | None,
    tiles_allowed: bool,
) -> Kernel:
    path: KeyPath = ("kernels", scheme)
    data = document.data["kernels"][scheme]
    document.check_keys(data, path, (), ("efficiency", "tflops", "bandwidth", "gb_per_s", "call_us", "tiles"))
    for fraction, measured in (("efficiency", "tflops"), ("bandwidth", "gb_per_s")):
        if (fraction in data) == (measured in data):
            found = "has both" if fraction in data else "has neither"
            document.fail(path, f"{found} '{fraction}' and '{measured}'; give one of the two")
    if "tflops" in data:
        rate = _number(document, (*path, "tflops"), RATE, "TFLOPS")
    elif RATES[scheme] not in tflops:
        document.fail(
            path, f"needs the {RATES[scheme]} rate, which 'tflops' lacks; add it, or remove the kernel"
        )
    else:
        rate = _number(document, (*path, "efficiency"), FRACTION, "of the rate") * tflops[RATES[scheme]]
    if "gb_per_s" in data:
        limits = (BANDWIDTH[0], min(BANDWIDTH[1], CACHE * bandwidth))
        speed = _number(document, (*path, "gb_per_s"), limits, f"GB/s, up to {CACHE} x memory_gb_per_s")
    else:
        speed = _number(document, (*path, "bandwidth"), FRACTION, "of memory_gb_per_s") * bandwidth
    own_call = _number(document, (*path, "call_us"), OVERHEAD, "microseconds", call * 1e6) / 1e6
    tiles = _tiles(document, (*path, "tiles"), data.get("tiles", {}))
    if tiles and not tiles_allowed:
        document.fail((*path, "tiles"), "need to know how many 'processors' the device has; add that key")
    return Kernel(
        rate * 1e12, speed * 1e9, own_call, own_call if call_in_pass is None else call_in_pass, tiles
    )


def _tiles(document: Document, path: KeyPath, data: Any) -> tuple[Tile, ...]:
    if not isinstance(data, dict):
        document.fail(path, f"is {show(data)}; give a mapping from tokens to tiles, e.g. {{64: 64x128}}")
    tiles = []
    for tokens, text in data.items():
        match = TILE.fullmatch(text) if isinstance(text, str) else None
        if not str(tokens).isdecimal() or int(tokens) < 1 or match is None:
            document.fail((*path, tokens), f"is {show(text)}; write e.g. 64: 64x128 (tokens: rows x columns)")
        tiles.append(Tile(int(tokens), int(match[1]), int(match[2])))
    return tuple(sorted(tiles, key=lambda tile: tile.tokens))


def _number(
    document: Document,
    path: KeyPath,
    allowed: tuple[float, float],
    unit: str,
    default: float | None = None,
) -> float:
    value = document.data
    for key in path:
        if default is not None and key not in value:
            return default
        value = value[key]
    low, high = allowed
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        document.fail(path, f"is {show(value)}; give a number from {low:g} to {high:g} ({unit})")
    if not low <= value <= high:
        document.fail(path, f"is {value:g}; give a number from {low:g} to {high:g} ({unit})")
    return float(value)
