# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The readers of other people's files: each understands what it is given, or raises FlexQuantError."""

import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexquant.checkpoint.folder import INDEX_FILE, SINGLE_FILE, read_tensors
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.merged_config import CONFIG_FILE, read_merged_config
from flexquant.checkpoint.safetensors_io import DTYPES, read_header
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError
from flexquant.planning.device import parse_device
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import parse_policy, parse_policy_text
from flexquant.policy.schema import PHASES
from flexquant.quantization.recipe import parse_recipe

MOST_BYTES = 1 << 16
"""Most bytes of a tensor; one that claims to have more gets none."""


def write_folder(folder: Path, document: Any) -> None:
    """Write the files that a document describes; whatever is not as it should be is written as it is."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in document.items() if isinstance(document, dict) else ():
        if name == SINGLE_FILE and isinstance(content, dict):
            (folder / name).write_bytes(_safetensors(content))
        elif name in ("config.json", "tokenizer.json", "generation_config.json"):
            (folder / name).write_text(json.dumps(content))


def _safetensors(tensors: dict[str, Any]) -> bytes:
    header, data = {}, b""
    for name, tensor in tensors.items():
        content = _content(name, tensor)
        offsets = [len(data), len(data) + len(content)]
        header[name] = {**tensor, "data_offsets": offsets} if isinstance(tensor, dict) else tensor
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _content(name: str, tensor: Any) -> bytes:
    """Return a tensor's ``values``, if it has any, or moderate numbers that follow from its name."""
    try:
        width = DTYPES[tensor["dtype"]][0] // 8
        if "values" in tensor:
            return b"".join(value.to_bytes(width, "little", signed=True) for value in tensor["values"])
        count = math.prod(tensor["shape"])
        if not 0 <= count * width <= MOST_BYTES:
            return b""
        content = bytearray(random.Random(name).randbytes(count * width))
        if tensor["dtype"].startswith(("F", "BF")):
            content[width - 1 :: width] = b"\x3c" * count  # sets sign and exponent
        return bytes(content)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, ZeroDivisionError):
        return b""


LAYERS, MAX_TOKENS = 6, 96
SHARD = "model-00001-of-00002.safetensors"

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FOLDER = Path(tempfile.mkdtemp(prefix="flexquant-fuzz-", dir=MEMORY))
"""A temporary folder, in memory where the system has a folder for that."""


def sound(target: str) -> list[bytes]:
    """Return the inputs of a target that were written by hand."""
    return [path.read_bytes() for path in sorted((Path(__file__).parent / "sound" / target).iterdir())]


def _write(name: str, content: bytes) -> Path:
    (FOLDER / name).write_bytes(content)
    return FOLDER / name


def policy(data: bytes) -> None:
    """Read a policy file, and compute the routes that it gives."""
    parsed = parse_policy_text(data, "fuzz.yaml", "fuzz")
    again = parse_policy(json.loads(json.dumps(parsed.document)), "stored policy")
    assert again.rules == parsed.rules
    table = build_route_table(parsed, [*parsed.variants], LAYERS, MAX_TOKENS)
    for phase in PHASES:
        rows = table.intervals(phase)
        assert rows[0].min_tokens == 1 and rows[-1].max_tokens == MAX_TOKENS
    assert RouteTable.from_json(json.loads(json.dumps(table.to_json()))).to_json() == table.to_json()


def recipe(data: bytes) -> None:
    """Read a recipe file."""
    parse_recipe(data, "fuzz.yaml", "fuzz")


def device(data: bytes) -> None:
    """Read a device file."""
    parse_device(from_yaml(data, "fuzz.yaml", "device", ()), "fuzz")


def merged_config(data: bytes) -> None:
    """Read the config.json of a merged checkpoint, its stored policy included."""
    _write(CONFIG_FILE, data)
    config, layers = read_merged_config(FOLDER)
    if config.policy is not None:
        parsed = parse_policy(config.policy, "stored policy")
        build_route_table(parsed, config.variants, layers, MAX_TOKENS, mixable=config.mixable_groups)


def safetensors_header(data: bytes) -> None:
    """Read a safetensors file."""
    path = _write("fuzz.safetensors", data)
    refs = read_header(path)
    assert sum(ref.nbytes for ref in refs.values()) <= len(data)


def safetensors_index(data: bytes) -> None:
    """Read the index of a checkpoint in shards, beside two sound shards of it."""
    if not (FOLDER / SHARD).exists():
        header = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
        _write(SHARD, len(header).to_bytes(8, "little") + header + b"\0\0")
        outside = FOLDER.parent / f"{FOLDER.name}-outside"
        outside.write_bytes((FOLDER / SHARD).read_bytes())
    with suppress(FileNotFoundError):
        (FOLDER / SINGLE_FILE).unlink()
    _write(INDEX_FILE, data)
    refs = read_tensors(FOLDER)
    assert all(ref.file.resolve().is_relative_to(FOLDER.resolve()) for ref in refs.values())


def sources(data: bytes) -> None:
    """Merge two variants: one checkpoint twice, and one beside a sound one."""
    from flexquant.merge import merge_checkpoints  # imports torch, which the other targets do without

    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return  # other targets are given files that are no JSON
    whole = json.loads(sound("sources")[0])
    folders = {name: FOLDER / name for name in ("w8a8", "w4a16")}
    write_folder(folders["w4a16"], document)
    for first in (document, whole):
        write_folder(folders["w8a8"], first)
        with suppress(FlexQuantError):
            merge_checkpoints(folders, FOLDER / "merged", overwrite=True)
            MergedCheckpoint.open(FOLDER / "merged")


def yaml_document(data: bytes) -> None:
    """Read any YAML."""
    from_yaml(data, "fuzz.yaml", "document", ("schema",))


Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (policy, recipe, device, merged_config, safetensors_header, safetensors_index)
    + (sources, yaml_document)
}


def try_out(target: Target, data: bytes) -> Any:
    """Run a target; any exception but FlexQuantError is a finding."""
    with suppress(FlexQuantError):
        target(data)
