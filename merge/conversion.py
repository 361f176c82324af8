# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Convert AWQ and GPTQ checkpoints to the format of compressed-tensors, so that they can be merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from compressed_tensors.entrypoints.convert import AutoAWQConverter, Converter
from compressed_tensors.entrypoints.convert import convert_checkpoint as convert

from flexquant.checkpoint.folder import INDEX_FILE, check_folder, confined_file, read_json, read_tensors
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import check_free_space, prepare_output, staged_folder
from flexquant.checkpoint.safetensors_io import TensorRef, total_bytes
from flexquant.checkpoint.sidecars import COPIED, find_files
from flexquant.errors import FlexQuantError
from flexquant.merge.gptq_format import GPTQConverter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EMBEDDINGS = ("embed_tokens", "wte", "wpe")
FLOATS = ("F16", "BF16", "F32")


def convert_checkpoint(
    folder: str | Path, output: str | Path, *, dtype: str | None = None, overwrite: bool = False
) -> JsonObject:
    """Write an AWQ (GEMM) or GPTQ checkpoint to ``output`` in the format of compressed-tensors.

    Quantised values do not change. ``dtype``, a key of :data:`DTYPES`, casts scales and unquantised tensors,
    since variants can only be merged if these have one dtype; None leaves them. Files that no variant needs
    are not copied.

    Returns what was converted. Raises FlexQuantError for another format, for settings that
    compressed-tensors cannot hold, for tensors of a wrong shape, an output that may not be replaced and a
    full disk.
    """
    folder, output = Path(folder), Path(output)
    check_folder(folder)
    config = read_json(confined_file(folder, "config.json"))
    tensors = read_tensors(folder)
    section = config.get("quantization_config")
    section = section if isinstance(section, dict) else {}
    converter = _converter(folder, section, tensors)
    linears = _check_linears(folder, section, tensors)
    prepare_output(output, [folder], overwrite=overwrite)
    check_free_space(output, total_bytes(tensors))
    with staged_folder(output, overwrite=overwrite) as stage, _needed_files(folder, tensors) as needed:
        convert(needed, stage, _InDtype(converter, DTYPES[dtype]) if dtype else converter)
        if dtype:
            _set_dtype(stage / "config.json", dtype)
    return {"output": str(output), "from": section["quant_method"], "linears": len(linears)}


@contextmanager
def _needed_files(folder: Path, tensors: Mapping[str, TensorRef]) -> Iterator[Path]:
    """Yield a folder of links to the needed files: compressed-tensors copies every file that it finds."""
    names = {"config.json", *find_files(folder, (*COPIED, INDEX_FILE))}
    names |= {ref.file.relative_to(folder).as_posix() for ref in tensors.values()}
    with TemporaryDirectory() as links:
        for name in names:
            link = Path(links, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(confined_file(folder, name).resolve())
        yield Path(links)


def _converter(folder: Path, section: JsonObject, tensors: Mapping[str, TensorRef]) -> Converter:
    method = section.get("quant_method")
    if method == "gptq":
        return GPTQConverter(section, _in_16_bit(tensors), tensors)
    if method == "awq":
        try:
            converter = AutoAWQConverter.from_autoawq_config(section)
            converter.ignore = _in_16_bit(tensors)  # the config lists parts of names, which may fit others
            return converter
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


def _in_16_bit(tensors: Mapping[str, TensorRef]) -> list[str]:
    """Return the modules whose matrix is not quantised: lm_head, routers, and others that were left out."""
    matrices = [key.removesuffix(".weight") for key, ref in tensors.items() if len(ref.shape) == 2]
    return sorted(
        {"lm_head"}
        | {name for name in matrices if f"{name}.weight" in tensors and not name.endswith(EMBEDDINGS)}
    )


def _check_linears(folder: Path, section: JsonObject, tensors: Mapping[str, TensorRef]) -> list[str]:
    """Return the names of the quantised linears.

    Raises FlexQuantError if there is none, for a quantised lm_head or embedding, and for a tensor whose dtype
    or shape does not fit the config's bits and group size.
    """
    method, size = section["quant_method"], section.get("group_size", 128)
    linears = [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]
    if not linears:
        raise FlexQuantError(
            f"{folder} has no linear in the format of {method} (no tensor is named '*.qweight'); take a "
            "checkpoint that is not packed for one kernel, such as marlin's"
        )
    if not isinstance(size, int) or not (size > 0 or (size == -1 and method == "gptq")):
        raise FlexQuantError(
            f"{folder} has the group_size {size!r} in its quantization_config; only a number of inputs, or "
            "for GPTQ -1, is converted: correct it, or get the checkpoint again"
        )
    has_zeros = method == "gptq" or section.get("zero_point", True)
    needed = ("qweight", "scales", "qzeros") if has_zeros else ("qweight", "scales")
    for name in linears:
        if name.endswith(("lm_head", *EMBEDDINGS)):
            raise FlexQuantError(
                f"{folder} has its {name} quantised, which stays in 16 bit in a merged checkpoint; take a "
                f"{method} checkpoint that leaves it out"
            )
        for part, (dtypes, shape) in _parts(section, tensors[f"{name}.qweight"].shape, size).items():
            if part in needed or f"{name}.{part}" in tensors:
                _check_tensor(f"{name}.{part}", tensors, dtypes, shape)
    return linears


def _parts(
    section: JsonObject, packed: Sequence[int], size: int
) -> dict[str, tuple[Sequence[str], tuple[int, ...]]]:
    """Return the allowed dtypes and the shape of each tensor of a linear whose ``qweight`` is ``packed``."""
    rows, columns = (*packed, 1, 1)[:2]
    values = 32 // section.get("bits", 4)
    is_gptq = section["quant_method"] == "gptq"
    inputs, outputs = (rows * values, columns) if is_gptq else (rows, columns * values)
    groups = -(-inputs // size) if size > 0 else 1
    return {
        "qweight": (("I32",), (rows, columns)),
        "scales": (FLOATS, (groups, outputs)),
        "qzeros": (("I32",), (groups, outputs // values)),
        "g_idx": (("I32", "I64"), (inputs,)),
    }


def _check_tensor(
    key: str, tensors: Mapping[str, TensorRef], dtypes: Sequence[str], shape: tuple[int, ...]
) -> None:
    if key not in tensors:
        raise FlexQuantError(f"{key} is missing; get the checkpoint again")
    ref = tensors[key]
    if ref.dtype not in dtypes or ref.shape != shape:
        raise FlexQuantError(
            f"{key} is {ref.dtype} {list(ref.shape)} instead of {' or '.join(dtypes)} {list(shape)}; correct "
            "bits and group_size in the quantization_config, or get the checkpoint again"
        )


class _InDtype:
    """Wrap a converter and cast its 16-bit tensors to one dtype."""

    def __init__(self, converter: Converter, dtype: torch.dtype) -> None:
        self._converter, self._dtype = converter, dtype

    def __getattr__(self, name: str) -> object:
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
