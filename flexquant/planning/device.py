# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a device file, a YAML document of schema ``flexquant.device/v1``: bandwidths, rates and overheads.

    memory_gib: 80
    memory_gb_per_s: 3350
    tflops: {bf16: 989.4, int8: 1978.9, fp8: 1978.9}    # data sheet, dense
    processors: 132                                     # streaming multiprocessors; left out for CPUs
    call_us: 25                                         # overhead of a single call: launch, ramp-up, tail
    call_in_pass_us: 8                                  # the same in a pass; default: call_us
    attention_tflops: 500                               # in prefill; default: the bf16 kernel's rate
    layer_us: 600                                       # a decoder layer beside its linears; default: 0
    pass_us: 500                                        # scheduling and sampling of a pass; default: 0
    reserve_gib: 2                                      # activations, CUDA graphs, runtime; default: 0
    overlap: 2                                          # of a kernel's bytes and operations; default: 1
    between_gb_per_s: 1500                              # of inputs and outputs between linears; optional
    int8_from_int4_us: 0.5                              # one copy's INT8, a million weights; optional
    kernels:                                            # by scheme
      w8a8: {efficiency: 0.6, bandwidth: 0.9, tiles: {64: 64x64, 128: 64x128, 256: 128x128}}
      w4a16: {efficiency: 0.387, bandwidth: 0.83}

``efficiency`` and ``bandwidth`` are the fractions of the data sheet's rate and bandwidth that a kernel
reaches; a measured device gives ``tflops`` and ``gb_per_s`` instead. ``tiles`` is for kernels without
split-K: it maps a largest number of tokens to output tiles of rows x columns. A kernel may have its own
``call_us``. ``overlap`` 1 adds the times of bytes and operations; 2 takes the root of the sum of squares.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, WrapValidator, model_validator

from flexquant.documents.yaml_document import (
    Document,
    Problem,
    Section,
    Text,
    from_yaml,
    read_named,
    read_section,
    says,
    show,
)
from flexquant.errors import FlexQuantError

SCHEMA: Literal["flexquant.device/v1"] = "flexquant.device/v1"
PACKAGE = "flexquant.planning.devices"
MARLIN = "w4a16-marlin"
"""W4A16 by Marlin, on a device on which vLLM prefers another kernel; elsewhere w4a16's kernel is Marlin."""
HUMMING = "w4a16-humming"
"""W4A16 by Humming, which vLLM takes where it is asked to."""
W4A8 = "w4a8"
"""INT4 weights and FP8 activations by CUTLASS, in groups of 128."""
W4A8_INT8 = "w4a8-humming"
"""INT4 weights and INT8 activations by Humming."""
RATES = {
    **{"bf16": "bf16", "w8a8": "int8", "fp8": "fp8", "w4a16": "bf16", MARLIN: "bf16", HUMMING: "bf16"},
    **{W4A8: "fp8", W4A8_INT8: "int8"},
}
"""Scheme -> type of the numbers that its kernel multiplies, a key of ``tflops``."""
CACHE = 20
"""Largest ratio of a kernel's bandwidth, for weights that stay in caches, to the memory's bandwidth."""
TILE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
GIB = 2.0**30


def within(low: float, high: float, unit: str, scale: float = 1) -> WrapValidator:
    """Accept a number from ``low`` to ``high`` in ``unit``; the model holds it times ``scale``."""

    def validate(value: object, handler: Callable[[object], float]) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise Problem(f"is {show(value)}; give a number from {low:g} to {high:g} ({unit})")
        return handler(value) * scale

    return WrapValidator(validate)


Bandwidth = Annotated[float, within(1, 100_000, "GB/s", 1e9)]
Rate = Annotated[float, within(0.001, 100_000, "TFLOPS", 1e12)]
Processors = Annotated[int, Field(strict=True, ge=1, le=10_000), says("give a whole number from 1 to 10000")]
Overhead = Annotated[float, within(0, 1_000_000, "microseconds", 1e-6)]


@dataclass(frozen=True)
class Tile:
    """The part of the output that a kernel computes at a time, if a pass has up to ``tokens`` tokens."""

    tokens: int
    rows: int
    columns: int


def _tiles(value: object) -> tuple[Tile, ...]:
    if not isinstance(value, dict):
        raise Problem(f"is {show(value)}; give a mapping from tokens to tiles, e.g. {{64: 64x128}}")
    tiles = []
    for tokens, text in value.items():
        match = TILE.fullmatch(text) if isinstance(text, str) else None
        if not tokens.isdecimal() or int(tokens) < 1 or match is None:
            raise Problem(f"is {show(text)}; write e.g. 64: 64x128 (tokens: rows x columns)", [tokens])
        tiles.append(Tile(int(tokens), int(match[1]), int(match[2])))
    return tuple(sorted(tiles, key=lambda tile: tile.tokens))


class Kernel(Section):
    """How fast a linear of one scheme runs; :func:`parse_device` fills in what the file leaves out."""

    efficiency: Annotated[float, within(0.01, 1, "of the rate")] = 0
    flops_per_s: Rate = Field(0, alias="tflops")
    """Operations a second; a multiplication and an addition count as two."""
    bandwidth: Annotated[float, within(0.01, 1, "of memory_gb_per_s")] = 0
    bytes_per_s: Bandwidth = Field(0, alias="gb_per_s")
    """Bytes of weights, activations and outputs that the kernel moves a second."""
    call_seconds: Overhead = Field(0, alias="call_us")
    tiles: Annotated[tuple[Tile, ...], PlainValidator(_tiles)] = ()
    """Tiles, ascending in tokens; empty for kernels that spread work evenly (split-K, stream-K)."""
    call_in_pass_seconds: float = Field(0, exclude=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_fields_set
        pairs = ("efficiency", "flops_per_s", "tflops"), ("bandwidth", "bytes_per_s", "gb_per_s")
        for fraction, field, key in pairs:
            if (fraction in given) == (field in given):
                found = "has both" if fraction in given else "has neither"
                raise Problem(f"{found} '{fraction}' and '{key}'; give one of the two")
        return self


class Rates(Section):
    """The data sheet's dense rates, by the operands' type; a type that the device lacks has 0."""

    bf16: Rate
    int8: Rate = 0
    fp8: Rate = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, rate in self:
            if 0 < rate < self.bf16 / 10:
                problem = f"is {rate / 1e12:g}, less than a tenth of the bf16 rate {self.bf16 / 1e12:g}"
                advice = "give both in TFLOPS (10^12 operations a second), or leave the type out"
                raise Problem(f"{problem}; {advice} if the device lacks it", [key])
        return self


def _check_schemes(value: object) -> object:
    if not isinstance(value, dict) or "bf16" not in value:
        raise Problem(f"is {show(value)}; give bf16 at least, of {', '.join(RATES)}")
    if unknown := [scheme for scheme in value if scheme not in RATES]:
        raise Problem(f"is an unknown key; the allowed ones here are {', '.join(RATES)}", unknown[:1])
    return value


class Device(Section):
    """A device file, in bytes and seconds."""

    schema_: Annotated[Literal["flexquant.device/v1"], says(f"this FlexQuant reads '{SCHEMA}' only")] = Field(
        alias="schema"
    )
    description: Text
    memory_bytes: Annotated[float, within(0.1, 10_000, "GiB", GIB)] = Field(alias="memory_gib")
    bytes_per_s: Bandwidth = Field(alias="memory_gb_per_s")
    tflops: Rates
    kernels: Annotated[dict[str, Kernel], BeforeValidator(_check_schemes)]
    """Scheme -> kernel, for the schemes that the device can run; bf16 is always one of them."""
    processors: Processors = 1
    attention_flops_per_s: Rate = Field(0, alias="attention_tflops")
    call_seconds: Overhead = Field(0, alias="call_us")
    call_in_pass_seconds: Overhead = Field(0, alias="call_in_pass_us")
    layer_seconds: Overhead = Field(0, alias="layer_us")
    pass_seconds: Overhead = Field(0, alias="pass_us")
    reserve_bytes: Annotated[float, within(0, 10_000, "GiB", GIB)] = Field(0, alias="reserve_gib")
    overlap: Annotated[float, within(1, 10, "1: none")] = 1
    between_bytes_per_s: Bandwidth = Field(inf, alias="between_gb_per_s")
    """Bytes of linears' inputs and outputs that what lies between moves a second; infinite: not counted."""
    int8_from_int4_seconds: Overhead | None = Field(None, alias="int8_from_int4_us")
    """For a million weights of one copy; None: the time of reading INT4 and writing INT8."""
    name: str = Field("", exclude=True)
    """The name or path by which it was loaded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        memory, reserve, bandwidth = self.memory_bytes / GIB, self.reserve_bytes / GIB, self.bytes_per_s / 1e9
        if reserve > memory:
            raise Problem(f"is {reserve:g}; give a number from 0 to {memory:g} (GiB)", ["reserve_gib"])
        for scheme, kernel in self.kernels.items():
            at, speed = ("kernels", scheme), kernel.bytes_per_s / 1e9
            if not kernel.flops_per_s and not self.rate(scheme):
                problem = f"needs the {RATES[scheme]} rate, which 'tflops' lacks"
                raise Problem(f"{problem}; add it, or remove the kernel", at)
            if speed > CACHE * bandwidth:
                allowed = f"1 to {CACHE * bandwidth:g} (GB/s, up to {CACHE} x memory_gb_per_s)"
                raise Problem(f"is {speed:g}; give a number from {allowed}", (*at, "gb_per_s"))
            if kernel.tiles and "processors" not in self.model_fields_set:
                problem = "need to know how many 'processors' the device has; add that key"
                raise Problem(problem, (*at, "tiles"))
        return self

    @property
    def is_gpu(self) -> bool:
        return self.processors > 1

    def rate(self, scheme: str) -> float:
        """Return the data sheet's operations a second for a scheme; 0 if the device lacks the type."""
        rate: float = getattr(self.tflops, RATES[scheme])
        return rate

    def kernel(self, scheme: str) -> Kernel:
        """Return the kernel of a scheme; raise :class:`FlexQuantError` for one that the device cannot run."""
        if scheme == MARLIN and scheme not in self.kernels:
            scheme = "w4a16"
        if scheme not in self.kernels:
            problem = f"device {self.name} has no kernel for {scheme}, only for {', '.join(self.kernels)}"
            added = "give its rate under 'tflops' and its kernel under 'kernels'"
            advice = f"choose another device or a checkpoint in these schemes, or {added}"
            raise FlexQuantError(f"{problem}; {advice}")
        return self.kernels[scheme]


def load_device(name_or_path: str) -> Device:
    """Load a device by name or path; raise FlexQuantError for an unknown name, missing and absurd numbers."""
    content, source = read_named(name_or_path, PACKAGE, "device")
    return parse_device(from_yaml(content, source, "device", ("schema", "memory_gb_per_s")), name_or_path)


def parse_device(document: Document, name: str) -> Device:
    """Validate a device's document; raise FlexQuantError for a bad one."""
    device = read_section(Device, document)
    kernels = {scheme: _filled_in(kernel, scheme, device) for scheme, kernel in device.kernels.items()}
    attention = device.attention_flops_per_s or kernels["bf16"].flops_per_s
    return device.model_copy(update={"name": name, "kernels": kernels, "attention_flops_per_s": attention})


def _filled_in(kernel: Kernel, scheme: str, device: Device) -> Kernel:
    call = (kernel if "call_seconds" in kernel.model_fields_set else device).call_seconds
    in_pass = device.call_in_pass_seconds if "call_in_pass_seconds" in device.model_fields_set else call
    own = {
        "flops_per_s": kernel.flops_per_s or kernel.efficiency * device.rate(scheme),
        "bytes_per_s": kernel.bytes_per_s or kernel.bandwidth * device.bytes_per_s,
        "call_seconds": call,
        "call_in_pass_seconds": in_pass,
    }
    return kernel.model_copy(update=own)
