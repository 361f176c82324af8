# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""One 16-bit model in, one folder per variant out, through llmcompressor."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.quantization.calibration import calibration_rows, read_documents
from flexquant.merge.folder import read_json
from flexquant.quantization.schemes import (
    SCHEMES,
    build_recipe,
    choose_group_size,
    quantized_linears,
    smoothing_mappings,
)
from flexquant.merge.sidecars import GENERATION_CONFIG, IDENTICAL, NOTICES, find_files
from flexquant.merge.staging import prepare_output, staged_folder
from flexquant.merge.writer import copy_file


@dataclass(frozen=True)
class QuantizedVariant:
    """One folder that :func:`quantize` wrote."""

    scheme: str
    folder: str
    seconds: float
    """Calibrating and writing, without loading the calibration data."""
    num_bytes: int
    """Size of the safetensors files."""
    group_size: int | None
    """Input features that share one weight scale; None: one scale per output channel."""
    smoothed: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def quantize(
    model: str | Path,
    output: str | Path,
    schemes: Sequence[str] = ("w8a8", "w4a16"),
    calibration: str | Path | None = None,
    *,
    samples: int = 128,
    length: int = 512,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> list[QuantizedVariant]:
    """Write ``output``/<scheme> for each scheme: a compressed-tensors checkpoint that vLLM serves.

    ``model`` is a folder or Hugging Face id of a 16-bit model, ``calibration`` what
    :func:`~flexquant.quantization.calibration.read_documents` takes, of which ``samples`` rows of ``length`` tokens
    are used. Equal inputs give equal bytes on one machine. A folder appears only when it is complete.
    ``progress`` receives one line per step.

    Raises FlexQuantError for a model, scheme or calibration data that cannot be used, an output that may not
    be replaced, and when llmcompressor is not installed.
    """
    import torch

    names = _check_schemes(schemes)
    if importlib.util.find_spec("llmcompressor") is None:
        raise FlexQuantError(
            "quantising needs llmcompressor, which is not installed; install flexquant[quantize] in an "
            "environment of its own, since vLLM needs another compressed-tensors"
        )
    source = _model_folder(model, progress)
    folders = {name: Path(output) / name for name in names}
    for folder in folders.values():
        prepare_output(folder, [source], overwrite=overwrite)
    config, tokenizer = _load_config(source), _load_tokenizer(source)
    dtype = config.dtype or torch.bfloat16
    linears = quantized_linears(config)
    groups = {name: choose_group_size(linears) if SCHEMES[name].grouped else None for name in names}
    if calibration is None:
        progress("calibrating on Python's own documentation; text like your users' gives better accuracy")
    rows = calibration_rows(read_documents(calibration), tokenizer, samples=samples, length=length, seed=seed)
    results = []
    for name, folder in folders.items():
        progress(f"{name}: calibrating with {samples} samples of {length} tokens")
        started = time.monotonic()
        mappings = []
        if SCHEMES[name].smoothing_strength is not None:
            mappings = smoothing_mappings(config.model_type)
            if not mappings:
                progress(
                    f"{name}: without SmoothQuant, which norms to smooth in {config.model_type} is unknown"
                )
        recipe = build_recipe(SCHEMES[name], groups[name], mappings)
        quantized = _calibrate(source, dtype, tokenizer, recipe, rows, seed)
        with staged_folder(folder) as stage:
            _save(quantized, dtype, source, stage)
        del quantized
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        seconds = time.monotonic() - started
        results.append(QuantizedVariant(name, str(folder), seconds, size, groups[name], bool(mappings)))
        progress(f"{name}: wrote {folder}")
    return results


def _check_schemes(schemes: Sequence[str]) -> list[str]:
    allowed = ", ".join(SCHEMES)
    for name in schemes:
        if name not in SCHEMES:
            raise FlexQuantError(f"'{name}' is not a quantisation scheme; allowed are {allowed}")
    if not schemes:
        raise FlexQuantError(f"no quantisation scheme is given; choose among {allowed}")
    return list(dict.fromkeys(schemes))


def _model_folder(model: str | Path, progress: Callable[[str], None]) -> Path:
    folder = Path(model).expanduser()
    if not folder.exists():
        from huggingface_hub import snapshot_download

        progress(f"looking for {model} on Hugging Face")
        patterns = ["*.json", "*.safetensors", *IDENTICAL, *NOTICES]
        try:
            folder = Path(snapshot_download(str(model), allow_patterns=patterns))
        except (OSError, ValueError) as e:
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise FlexQuantError(
                f"the model '{model}' is neither a folder nor a Hugging Face model that could be fetched "
                f"({reason})"
            ) from e
    if not (folder / "config.json").is_file():
        raise FlexQuantError(f"{folder} has no config.json; name a model folder in Hugging Face's format")
    if "quantization_config" in read_json(folder / "config.json"):
        raise FlexQuantError(f"{folder} is quantised already; start from the 16-bit model")
    return folder


def _load_config(source: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as e:
        raise FlexQuantError(f"cannot read the configuration of {source} ({e})") from e


def _load_tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as e:
        raise FlexQuantError(f"cannot load a tokenizer from {source} ({e})") from e


def _calibrate(
    source: Path, dtype: Any, tokenizer: Any, recipe: list[Any], rows: list[list[int]], seed: int
) -> Any:
    import torch
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    # Many CPUs multiply 16-bit floats several times slower than 32-bit ones.
    load_dtype = dtype if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(source, dtype=load_dtype)
    ids = [torch.tensor(row) for row in rows]
    batches: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    oneshot(model=model, tokenizer=tokenizer, dataset=DataLoader(batches, batch_size=1), recipe=recipe)
    return model


def _save(model: Any, dtype: Any, source: Path, folder: Path) -> None:
    """Write the compressed model in the source's ``dtype``, with the files that lie beside its weights."""
    quantized = {id(m.weight) for m in model.modules() if hasattr(m, "quantization_scheme")}
    # Quantised weights stay as they are until saving divides them by their scales, rounded here.
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in quantized:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, save_compressed=True)
    for name in find_files(source, (*IDENTICAL, *NOTICES, GENERATION_CONFIG)):
        copy_file(source / name, folder / name)
