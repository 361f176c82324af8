# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes a small checkpoint folder from one document: its JSON files, and dtypes and shapes of its tensors."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

from flexquant.checkpoint.folder import SINGLE_FILE
from flexquant.checkpoint.safetensors_io import DTYPES

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
