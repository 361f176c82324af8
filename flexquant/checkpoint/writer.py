# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write tensors into safetensors shards: plan the files, then stream byte ranges into them.

A few threads each take one tensor at a time, of which a chunk is in memory, or all if it is converted. The
caller can do other work meanwhile, and can cancel.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TypeVar

from flexquant.checkpoint.folder import INDEX_FILE, SINGLE_FILE, check_finite
from flexquant.checkpoint.output import check_free_space, staged_folder
from flexquant.checkpoint.safetensors_io import METADATA_KEY, TensorRef, Tensors, read_finite, total_bytes

Result = TypeVar("Result")

Progress = Callable[[int, int], object]
"""Called with (bytes of tensors done, bytes in all)."""

DEFAULT_SHARD_SIZE = 5_000_000_000
HEADER_ALIGNMENT = 8
MAX_THREADS = 8
# Upper bounds on the bytes of index and provenance for each tensor, and on config and card together.
DOCUMENT_BYTES_PER_TENSOR = 1_000
DOCUMENT_BYTES = 1_000_000


@dataclass(frozen=True)
class Shard:
    """One output file: its header, and each tensor's key, source and offset in the file."""

    file: str
    header: bytes
    tensors: tuple[tuple[str, TensorRef, int], ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(ref.nbytes for _, ref, _ in self.tensors)


def plan_shards(groups: Sequence[Tensors], max_shard_size: int) -> list[Shard]:
    """Return the files for groups of tensors: ``model.safetensors``, or ``model-00001-of-0000n.safetensors``.

    No file has tensors of two groups, or more than ``max_shard_size`` bytes but for a single tensor.
    """
    parts: list[dict[str, TensorRef]] = []
    for group in groups:
        size = 0
        parts.append({})
        for key, ref in sorted(group.items()):
            if parts[-1] and size + ref.nbytes > max_shard_size:
                size = 0
                parts.append({})
            parts[-1][key] = ref
            size += ref.nbytes
    parts = [part for part in parts if part]
    if len(parts) == 1:
        return [_lay_out(SINGLE_FILE, parts[0])]
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    return list(map(_lay_out, names, parts))


Finish = Callable[[Progress | None], dict[str, str]]
"""Waits until all shards are written, writes their index if there are several, and returns the SHA-256 of
every tensor by key. Raises OSError if writing failed, also before its call, and FlexQuantError if a source
cannot be read."""


@contextmanager
def writing_checkpoint(
    output: Path,
    groups: Sequence[Tensors],
    files: Mapping[str, Path],
    *,
    overwrite: bool,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
) -> Iterator[tuple[Path, Finish]]:
    """Begin to write tensors in other threads; yield the folder that becomes ``output``, and Finish.

    Raises FlexQuantError as :func:`staged_folder` does, and for too small a disk.
    """
    shards = plan_shards(groups, max_shard_size)
    documents = DOCUMENT_BYTES + DOCUMENT_BYTES_PER_TENSOR * sum(len(shard.tensors) for shard in shards)
    copied = sum(path.stat().st_size for path in files.values())
    check_free_space(output, sum(shard.nbytes for shard in shards) + copied + documents)
    with staged_folder(output, overwrite=overwrite) as stage, writing_shards(stage, shards) as finish:
        copy_files(files, stage)
        yield stage, finish


@contextmanager
def writing_shards(folder: Path, shards: Sequence[Shard]) -> Iterator[Finish]:
    """Begin to write the shards in other threads; leaving the block cancels what is not written by then."""
    stopped = Event()
    pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
    copies: dict[str, Future[str]] = {}
    try:
        for shard in shards:
            path = folder / shard.file
            with open(path, "xb") as f:
                f.write(shard.header)
                f.truncate(shard.nbytes)
            for key, ref, offset in shard.tensors:
                copies[key] = pool.submit(_copy, ref, path, offset, stopped)

        def finish(progress: Progress | None) -> dict[str, str]:
            written = {key: ref for shard in shards for key, ref, _ in shard.tensors}
            digests = results_of(copies, written, progress)
            if len(shards) > 1:
                weight_map = dict(sorted((key, s.file) for s in shards for key, _, _ in s.tensors))
                index = {"metadata": {"total_size": total_bytes(written)}, "weight_map": weight_map}
                write_json(folder / INDEX_FILE, index)
            return dict(sorted(digests.items()))

        yield finish
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def results_of(
    futures: Mapping[str, Future[Result]], tensors: Tensors, progress: Progress | None
) -> dict[str, Result]:
    """Wait for what is done with each tensor, and return the results by the tensors' names."""
    results: dict[str, Result] = {}
    done, total = 0, total_bytes(tensors)
    for name, future in futures.items():
        results[name] = future.result()
        done += tensors[name].nbytes
        if progress is not None:
            progress(done, total)
    return results


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy the content of confined files, by their names in ``folder``; make its folders if need be."""
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def write_json(path: Path, content: object) -> None:
    check_finite(content)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _lay_out(file: str, tensors: Tensors) -> Shard:
    """Lay out a shard with the widest dtypes first, like the safetensors library, so that all are aligned."""
    placed: list[tuple[str, TensorRef, int]] = []
    header: dict[str, dict[str, object]] = {METADATA_KEY: {"format": "pt"}}
    position = 0
    for key, ref in sorted(tensors.items(), key=lambda item: (-item[1].alignment, item[0])):
        offsets = [position, position + ref.nbytes]
        header[key] = {"dtype": ref.dtype, "shape": list(ref.shape), "data_offsets": offsets}
        placed.append((key, ref, position))
        position += ref.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    raw = len(text).to_bytes(8, "little") + text
    return Shard(file, raw, tuple((key, ref, len(raw) + offset) for key, ref, offset in placed))


def _copy(ref: TensorRef, path: Path, offset: int, stopped: Event) -> str:
    """Copy finite numbers to ``offset`` of a file, until ``stopped`` is set; return their SHA-256."""
    digest, position = hashlib.sha256(), offset
    fd = os.open(path, os.O_WRONLY)
    try:
        for chunk in read_finite(ref):
            if stopped.is_set():
                break
            written = 0
            while written < len(chunk):
                written += os.pwrite(fd, chunk[written:], position + written)
            position += written
            digest.update(chunk)
        # Linux begins to write the bytes to the disk now, so that little is left to sync at the end.
        with suppress(OSError, AttributeError):
            os.posix_fadvise(fd, offset, position - offset, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return digest.hexdigest()
