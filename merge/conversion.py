# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a checkpoint of another format in the format of compressed-tensors."""

from __future__ import annotations

from pathlib import Path

from flexquant.checkpoint.folder import check_folder, confined_file, quantization_section, read_json
from flexquant.checkpoint.hub import find_model
from flexquant.checkpoint.loadable import check_loadable
from flexquant.checkpoint.model_config import SECTIONS, JsonObject
from flexquant.checkpoint.output import prepare_output
from flexquant.checkpoint.sidecars import COPIED, find_files
from flexquant.checkpoint.writer import Progress
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import open_source
from flexquant.merge.plain_checkpoint import write_plain_checkpoint


def convert_checkpoint(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> JsonObject:
    """Write a checkpoint to ``output`` as merging reads it: in the format of compressed-tensors.

    Quantised values do not change. ``dtype``, ``bfloat16`` or ``float16``, casts what is in 16 bit; None
    leaves it. Files that no variant needs are not copied.

    Returns what was converted. Raises FlexQuantError as :func:`~flexquant.merge.formats.open_source` does,
    for a checkpoint with nothing to convert, an output that may not be replaced and a full disk.
    """
    folder, output = find_model(folder), Path(output)
    check_folder(folder)
    stored = quantization_section(folder, read_json(confined_file(folder, "config.json")))
    source = open_source("converted", folder, dtype)
    if dtype is None and (stored is None or stored == source.quantization_config):
        found = "is not quantised" if stored is None else "is in the format of compressed-tensors already"
        raise FlexQuantError(f"{folder} {found}; merge it as it is")
    check_loadable(source.quantization_config, source.tensors, str(folder))
    prepare_output(output, [folder], overwrite=overwrite)
    files = {name: confined_file(folder, name) for name in find_files(folder, COPIED)}
    config = {key: value for key, value in source.config.items() if key not in SECTIONS}
    config[SECTIONS[0]] = source.quantization_config
    write_plain_checkpoint(output, source.tensors, config, files, overwrite=overwrite, progress=progress)
    method = "16 bit" if stored is None else stored.get("quant_method")
    linears = sum(name.endswith(".weight_scale") for name in source.tensors)
    return {"output": str(output), "from": method, "linears": linears}
