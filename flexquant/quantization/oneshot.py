# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Running llmcompressor's modifiers over one model and its calibration rows; failures in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils import patch_attr
from llmcompressor import active_session, oneshot
from llmcompressor.pipelines.cache import IntermediatesCache
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from flexquant.errors import FlexQuantError
from flexquant.merge.sidecars import GENERATION_CONFIG, IDENTICAL, NOTICES, find_files
from flexquant.merge.writer import copy_file
from flexquant.quantization.architecture import decoder_layers

CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "out of memory")


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model in ``dtype`` on a GPU, in float32 on a CPU, where 16-bit floats multiply slowly."""
    load_dtype = dtype if torch.cuda.is_available() else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=load_dtype)


def run_modifiers(
    model: Any, tokenizer: Any, modifiers: list[Any], rows: Sequence[torch.Tensor], seed: int
) -> None:
    """Apply llmcompressor's modifiers in place, each in a pass of its own; no rows for calibration-free ones.

    ``rows`` are token ids [tokens]. Raises FlexQuantError, naming the layer, when activations are not finite.
    """
    torch.manual_seed(seed)
    batches: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    data = DataLoader(batches, batch_size=1) if batches else None
    try:
        with _finite_activations(model), _no_pinning_on_a_cpu():
            oneshot(model=model, tokenizer=tokenizer, dataset=data, recipe=modifiers)
    except BaseException:
        active_session().reset()  # else it holds the model
        raise


def save_model(model: Any, dtype: torch.dtype, source: Path, folder: Path) -> None:
    """Write the compressed model in the source's ``dtype``, with the files that lie beside its weights."""
    quantized = {id(m.weight) for m in model.modules() if hasattr(m, "quantization_scheme")}
    # Quantised weights stay as they are until saving divides them by their scales, rounded here.
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in quantized:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, save_compressed=True)
    active_session().reset()  # else it holds the model until the next one is loaded
    for name in find_files(source, (*IDENTICAL, *NOTICES, GENERATION_CONFIG)):
        copy_file(source / name, folder / name)


@contextmanager
def explained_memory(variant: str) -> Iterator[None]:
    """Turn running out of memory, on the GPU or the CPU, into a FlexQuantError."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not _is_out_of_memory(e):
            raise
        raise FlexQuantError(
            f"the memory ran out while quantising '{variant}'; lower --samples or --length, choose a smaller "
            "model, or use a machine with more memory"
        ) from e


def _no_pinning_on_a_cpu() -> AbstractContextManager[None]:
    """Keep llmcompressor 0.14's AWQ from pinning memory where there is no GPU, which torch refuses."""
    if torch.accelerator.is_available():
        return nullcontext()
    return patch_attr(IntermediatesCache, "_pin_intermediate", staticmethod(lambda intermediate: None))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if any(text in str(error).lower() for text in CPU_ALLOCATOR):
        return True
    inner = error.__cause__ or error.__context__
    return inner is not None and _is_out_of_memory(inner)


@contextmanager
def _finite_activations(model: Any) -> Iterator[None]:
    def checker(name: str) -> Any:
        def check(module: torch.nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and not torch.isfinite(hidden).all():
                raise FlexQuantError(
                    f"the activations of {name} have NaN or infinite values on the calibration data, though "
                    "all weights are finite; check the norms' weights, and that the model answers sensibly"
                )

        return check

    with ExitStack() as stack:
        for name in decoder_layers([name for name, _ in model.named_modules()]):
            handle = model.get_submodule(name).register_forward_hook(checker(name))
            stack.callback(handle.remove)
        yield
