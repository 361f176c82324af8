# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Checkpoints that others quantised with AWQ or GPTQ, converted so that they can be merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from flexquant.checkpoint.folder import check_folder, confined_file, read_json, read_tensors
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import check_free_space, prepare_output, staged_folder
from flexquant.checkpoint.safetensors_io import TensorRef
from flexquant.errors import FlexQuantError
from flexquant.merge.gptq_format import GPTQConverter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDINGS = ("embed_tokens", "wte", "wpe")


def convert_checkpoint(
    folder: str | Path, output: str | Path, *, dtype: str | None = None, overwrite: bool = False
) -> JsonObject:
    """Write an AWQ (GEMM) or GPTQ checkpoint to ``output`` in the format of compressed-tensors.

    The quantised values stay what they are. ``dtype``, of :data:`DTYPES`, casts scales and all that is not
    quantised, which the variants of a merge have to share; None leaves them.

    Returns what was converted. Raises FlexQuantError for another format, for what compressed-tensors cannot
    hold, an output that may not be replaced and a full disk.
    """
    from compressed_tensors.entrypoints.convert import convert_checkpoint as convert

    folder, output = Path(folder), Path(output)
    check_folder(folder)
    config = read_json(confined_file(folder, "config.json"))
    tensors = read_tensors(folder)
    converter = _converter(folder, config, tensors)
    prepare_output(output, [folder], overwrite=overwrite)
    check_free_space(output, sum(ref.nbytes for ref in tensors.values()))
    with staged_folder(output, overwrite=overwrite) as stage:
        convert(folder, stage, _InDtype(converter, DTYPES[dtype]) if dtype else converter)
        if dtype:
            _set_dtype(stage / "config.json", dtype)
    linears = sum(key.endswith(".qweight") for key in tensors)
    method = config["quantization_config"]["quant_method"]
    return {"output": str(output), "from": method, "linears": linears}


def _converter(folder: Path, config: JsonObject, tensors: dict[str, TensorRef]) -> Any:
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    section = config.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    method = section.get("quant_method")
    if method == "gptq":
        return GPTQConverter(section, _in_16_bit(tensors))
    if method == "awq":
        try:
            return AutoAWQConverter.from_autoawq_config(section)
        except ValueError as e:
            raise FlexQuantError(
                f"{folder} cannot be converted: {e}; take an AWQ checkpoint in the GEMM format"
            ) from e
    if method == "compressed-tensors":
        raise FlexQuantError(f"{folder} is in the format of compressed-tensors already; merge it as it is")
    raise FlexQuantError(
        f"{folder} has quant_method {method!r}; 'awq' and 'gptq' are converted, and others have to be "
        "quantised again, e.g. by 'flexquant quantize'"
    )


def _in_16_bit(tensors: dict[str, TensorRef]) -> list[str]:
    """Return the modules with a matrix that is not quantised: the lm_head, routers, and what was left out."""
    matrices = [key.removesuffix(".weight") for key, ref in tensors.items() if len(ref.shape) == 2]
    return sorted(
        {"lm_head"}
        | {name for name in matrices if f"{name}.weight" in tensors and not name.endswith(EMBEDDINGS)}
    )


class _InDtype:
    """A converter whose 16-bit tensors come out in one dtype."""

    def __init__(self, converter: Any, dtype: torch.dtype) -> None:
        self._converter, self._dtype = converter, dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._converter, name)

    def process(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        done: dict[str, torch.Tensor] = self._converter.process(tensors)
        return {
            key: tensor.to(self._dtype) if tensor.dtype in DTYPES.values() else tensor
            for key, tensor in done.items()
        }


def _set_dtype(config_file: Path, dtype: str) -> None:
    config = json.loads(config_file.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config_file.write_text(json.dumps(config | {key: dtype}, indent=2) + "\n", encoding="utf-8")
