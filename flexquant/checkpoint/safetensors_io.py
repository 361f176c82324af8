# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read safetensors files as byte ranges: a strict header parser, and raw access to a tensor's bytes.

A file has an 8-byte little-endian header length, that many bytes of JSON (name -> dtype, shape, data
offsets), and the tensors' bytes, without gap or overlap (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents import parse_json
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
CHUNK_BYTES = 1 << 20  # stays in a core's cache between reading, writing and hashing

# dtype -> (bits per element, name in torch or None, bits that are all set in NaN and infinite numbers alone)
DTYPES: dict[str, tuple[int, str | None, int]] = {
    "BOOL": (8, "bool", 0),
    "U8": (8, "uint8", 0),
    "I8": (8, "int8", 0),
    "F8_E4M3": (8, "float8_e4m3fn", 0x7F),
    "F8_E5M2": (8, "float8_e5m2", 0x7C),
    "F8_E8M0": (8, "float8_e8m0fnu", 0xFF),
    "F4": (4, None, 0),
    "F6_E2M3": (6, None, 0),
    "F6_E3M2": (6, None, 0),
    "U16": (16, "uint16", 0),
    "I16": (16, "int16", 0),
    "F16": (16, "float16", 0x7C00),
    "BF16": (16, "bfloat16", 0x7F80),
    "U32": (32, "uint32", 0),
    "I32": (32, "int32", 0),
    "F32": (32, "float32", 0x7F800000),
    "U64": (64, "uint64", 0),
    "I64": (64, "int64", 0),
    "F64": (64, "float64", 0x7FF << 52),
    "C64": (64, "complex64", 0),
}
CASTS = {"bfloat16": "BF16", "float16": "F16"}
"""Name of a dtype of 16 bit in torch -> in safetensors."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The place of a tensor's bytes: ``nbytes`` of ``file`` from ``begin`` on."""

    name: str
    dtype: str
    """Key of DTYPES."""
    shape: tuple[int, ...]
    file: Path
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][0] // 8

    @property
    def alignment(self) -> int:
        """Number of bytes of which the tensor's offset must be a multiple, for readers that map the file."""
        return max(1, DTYPES[self.dtype][0] // 8)


Tensors = Mapping[str, TensorRef]
"""Tensors by name."""


@dataclass(frozen=True, slots=True)
class ComputedTensor(TensorRef):
    """A tensor that is computed whenever it is read; ``file`` holds a stored one that it comes from."""

    compute: Callable[[Sequence[range] | None], torch.Tensor]
    """Return the whole tensor for None, or these rows of it, concatenated."""
    stored_dtype: str | None = None
    """Key of DTYPES, where the tensor is cast from it."""


def read_header(path: Path) -> dict[str, TensorRef]:
    """Return the tensors of a safetensors file by name; raise FlexQuantError for what the format forbids."""
    try:
        with open(path, "rb") as f:
            file_bytes = os.fstat(f.fileno()).st_size
            if file_bytes < 8:
                raise _corrupt(path, f"it has {file_bytes} bytes, too few for a header")
            header_bytes = int.from_bytes(f.read(8), "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _corrupt(path, f"its header claims {header_bytes} bytes in a file of {file_bytes}")
            raw = f.read(header_bytes)
    except OSError as e:
        raise FlexQuantError(f"cannot read {path}: {e.strerror}") from e
    try:
        header = parse_json(raw, _no_duplicates)
    except ValueError as e:
        raise _corrupt(path, f"its header is not valid JSON ({e})") from e
    if not isinstance(header, dict):
        raise _corrupt(path, "its header is not a JSON object")
    header.pop(METADATA_KEY, None)
    data_start = 8 + header_bytes
    tensors = {name: _tensor_ref(path, name, entry, data_start) for name, entry in header.items()}

    position = data_start
    for ref in sorted(tensors.values(), key=lambda r: (r.begin, r.nbytes)):
        if ref.begin != position:
            problem = "overlaps the tensor before it" if ref.begin < position else "leaves a gap before it"
            raise _corrupt(path, f"the data of tensor '{ref.name}' {problem}")
        position += ref.nbytes
    if position != file_bytes:
        state = "truncated" if file_bytes < position else "followed by foreign bytes"
        raise _corrupt(path, f"it is {state}: {file_bytes} bytes, but its header describes {position}")
    return tensors


def read_chunks(ref: TensorRef) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks that reuse a buffer; raise FlexQuantError if the file is too short."""
    if isinstance(ref, ComputedTensor):
        yield from _computed_chunks(ref)
        return
    buffer = memoryview(bytearray(min(CHUNK_BYTES, ref.nbytes)))
    with _opened(ref) as f:
        left = ref.nbytes
        while left:
            chunk = buffer[:left]
            _fill(chunk, f, ref)
            yield chunk
            left -= len(chunk)


def read_finite(ref: TensorRef) -> Iterator[memoryview]:
    """Yield what :func:`read_chunks` does; raise FlexQuantError at a number that is NaN or infinite."""
    import numpy as np

    width, _, bits = DTYPES[ref.dtype]
    for chunk in read_chunks(ref):
        if bits and bool((np.frombuffer(chunk, f"<u{width // 8}") & bits == bits).any()):
            problem = f"tensor '{ref.name}' in {ref.file} holds NaN or infinite numbers"
            raise FlexQuantError(f"{problem}; fetch or quantise the model again")
        yield chunk


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no NaN and no infinite number; integers have none."""
    if not tensor.is_floating_point():
        return True
    if tensor.itemsize == 1:
        tensor = tensor.float()
    # The sum is faster to check; it is finite unless a number is not, or the numbers are huge.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def total_bytes(tensors: Tensors) -> int:
    return sum(ref.nbytes for ref in tensors.values())


def same_bytes(a: TensorRef, b: TensorRef) -> bool:
    """Whether two tensors have the same dtype, shape and bytes; reading stops at the first difference."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    # Comparing bytes is a hundred times faster than comparing memoryviews, which goes element by element.
    return all(x.tobytes() == y.tobytes() for x, y in zip(read_chunks(a), read_chunks(b), strict=True))


def load_tensor(ref: TensorRef, rows: Sequence[range] | None = None) -> torch.Tensor:
    """Return the tensor, or ``rows`` of it, on the CPU with its stored dtype, reading only its bytes.

    Raises FlexQuantError for a dtype that torch lacks, and for an unreadable file.
    """
    import torch

    if isinstance(ref, ComputedTensor):
        return ref.compute(rows)
    torch_name = DTYPES[ref.dtype][1]
    if torch_name is None:
        raise FlexQuantError(f"tensor '{ref.name}' in {ref.file} has dtype {ref.dtype}, which torch lacks")
    shape, pieces = ref.shape, [(0, ref.nbytes)]
    if rows is not None:
        row_bytes = ref.nbytes // ref.shape[0]
        shape = (sum(map(len, rows)), *ref.shape[1:])
        pieces = [(part.start * row_bytes, len(part) * row_bytes) for part in rows]
    data = torch.empty(sum(nbytes for _, nbytes in pieces), dtype=torch.uint8)
    buffer, filled = data.numpy().data, 0
    with _opened(ref) as f:
        for offset, nbytes in pieces:
            f.seek(ref.begin + offset)
            _fill(buffer[filled : filled + nbytes], f, ref)
            filled += nbytes
    return data.view(getattr(torch, torch_name)).reshape(shape)


def _computed_chunks(ref: ComputedTensor) -> Iterator[memoryview]:
    """Yield the bytes of a computed tensor; only the rows that a chunk touches are computed at a time."""
    import torch

    if not ref.shape:
        yield ref.compute(None).reshape(1).view(torch.uint8).numpy().data
        return
    row_bytes = max(1, ref.nbytes // max(1, ref.shape[0]))
    touched, data = range(0), memoryview(b"")
    for start in range(0, ref.nbytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, ref.nbytes)
        rows = range(start // row_bytes, -(-stop // row_bytes))
        if rows != touched:
            touched = rows
            data = ref.compute([rows]).contiguous().view(-1).view(torch.uint8).numpy().data
        begin = rows.start * row_bytes
        yield data[start - begin : stop - begin]


@contextmanager
def _opened(ref: TensorRef) -> Iterator[FileIO]:
    """Yield a tensor's file, at the tensor's first byte; raise FlexQuantError if it cannot be read."""
    try:
        with open(ref.file, "rb", buffering=0) as f:
            f.seek(ref.begin)
            yield f
    except OSError as e:
        raise FlexQuantError(f"cannot read {ref.file}: {e.strerror}") from e


def _fill(buffer: memoryview, f: FileIO, ref: TensorRef) -> None:
    """Fill the buffer from the file; raise FlexQuantError if the file ends before."""
    filled = 0
    while filled < len(buffer):
        if not (got := f.readinto(buffer[filled:])):
            raise _corrupt(ref.file, f"it ended inside tensor '{ref.name}' while it was read")
        filled += got


def _tensor_ref(path: Path, name: str, entry: object, data_start: int) -> TensorRef:
    try:
        if not isinstance(entry, dict):
            raise TypeError
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as e:
        raise _corrupt(path, f"tensor '{name}' lacks a dtype, a shape or two data offsets") from e
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(path, f"tensor '{name}' has the unknown dtype {dtype!r}")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise _corrupt(path, f"tensor '{name}' has a shape or data offsets that are not natural numbers")
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits % 8 or end - begin != bits // 8:
        raise _corrupt(path, f"tensor '{name}' ({dtype}, shape {shape}) has {end - begin} bytes of data")
    return TensorRef(name, dtype, tuple(shape), path, data_start + begin)


def _no_duplicates(pairs: list[tuple[str, object]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    "".join(result).encode()  # raises ValueError for a lone surrogate
    return result


def _corrupt(path: Path, problem: str) -> FlexQuantError:
    return FlexQuantError(f"{path} is not a sound safetensors file: {problem}; fetch or write it again")
