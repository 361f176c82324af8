# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Load a model, quantise it in memory with llmcompressor's modifiers, save it, and explain failures."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from compressed_tensors.transform.factory.base import TransformBase
from compressed_tensors.utils import patch_attr
from llmcompressor import active_session, oneshot
from llmcompressor.modeling.moe.conversion_mappings import set_save_conversion_mapping
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes, linearize_moe
from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors import SafetensorError
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform
from transformers.models.falcon import modeling_falcon

from flexquant.checkpoint.built_model import nothing_fetched
from flexquant.checkpoint.folder import COPIED, GENERATION_CONFIG, find_files, read_config, read_tensors
from flexquant.checkpoint.module_names import LAYER
from flexquant.checkpoint.nested import Int4Weight
from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor
from flexquant.checkpoint.schemes import FLOAT_DTYPES
from flexquant.checkpoint.writer import Progress, copy_files, write_json
from flexquant.errors import FlexQuantError
from flexquant.quantization.distillation import distill_scales
from flexquant.quantization.modifiers import SearchedSmoothQuant, build_modifiers, smoothing_report
from flexquant.quantization.recipe import VariantRecipe
from flexquant.quantization.report import Report
from flexquant.quantization.resolve import IN_EXPERTS, ResolvedVariant, with_strengths
from flexquant.quantization.source_model import SourceModel

OS_ERROR = re.compile(r"\(os error (\d+)\)")
CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "out of memory")
WEIGHTS = (".weight", ".weight_packed")


class PlainLinear(torch.nn.Linear):
    """Makes a ``torch.nn.Linear``, of which compressed-tensors compresses no subclass."""

    def __new__(cls, *sizes: Any, **options: Any) -> Any:
        return torch.nn.Linear(*sizes, **options)


modeling_falcon.FalconLinear = PlainLinear  # type: ignore[misc, assignment]


def load_model(source: SourceModel) -> PreTrainedModel:
    """Return the model to quantise: its experts are separate linears, saved under their published names."""
    model = _load(source)
    if published := _names_of_experts(model):
        linearize_moe(model)
        set_save_conversion_mapping(model, published)
    return model


def load_whole(source: SourceModel) -> PreTrainedModel:
    """Return the model to compute with as it is, on GPUs if there are any."""
    return _load(source, device_map=_devices())


def _devices() -> str | None:
    return "auto" if torch.cuda.is_available() else None


def _load(source: SourceModel, device_map: str | None = None) -> PreTrainedModel:
    """Return the model, in float32 on a CPU; raise FlexQuantError for parameters that no file has."""
    options = {"config": source.config, "trust_remote_code": False, "device_map": device_map}
    dtype = source.dtype if torch.cuda.is_available() else torch.float32
    with nothing_fetched():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.folder, output_loading_info=True, dtype=dtype, **options
        )
    model: PreTrainedModel
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        lacks = f"{source.folder} lacks {len(missing)} of the parameters of a {type(model).__name__}"
        raise FlexQuantError(f"{lacks}, the first '{missing[0]}'; fetch the model again")
    return model


def load_quantized(folder: Path) -> PreTrainedModel:
    """Return a checkpoint of compressed-tensors, of which the linears quantise their inputs as served."""
    dtype, section = _devices() or torch.float32, CompressedTensorsConfig(run_compressed=False)
    options = {"trust_remote_code": False, "device_map": _devices(), "quantization_config": section}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    if rotations := read_config(folder)["quantization_config"].get("transform_config"):
        _rotate_inputs(model, TransformConfig.model_validate(rotations), read_tensors(folder))
    if not torch.cuda.is_available():  # tensors that transformers renames come in the dtype of the file
        _convert_parameters(model, torch.float32, all_of_them=True)
    return model


def _rotate_inputs(model: PreTrainedModel, config: TransformConfig, stored: Mapping[str, TensorRef]) -> None:
    """Attach the rotations that run with the model, which transformers leaves out, as they are stored."""
    for scheme in config.config_groups.values():
        scheme.apply = [args for args in scheme.apply if args.is_online()]
    apply_transform_config(model, config)
    names = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, TransformBase)}
    model.load_state_dict({name: load_tensor(stored[name]) for name in names & {*stored}}, strict=False)


def _names_of_experts(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the renamings for separate experts in transformers' conversions for fused ones.

    Mixtral's ``experts.0.w1`` becomes gate_proj, ``w3`` up_proj. Empty without experts published one by one.
    """
    names: list[WeightTransform] = []
    conversions = get_model_conversion_mapping(model) if get_non_linearized_moes(model) else []
    published_apart = any("experts.*." in str(conversion.source_patterns) for conversion in conversions)
    for conversion in conversions if published_apart else ():
        if not isinstance(conversion, WeightConverter):
            names.append(conversion)
        elif ".experts." in (target := conversion.target_patterns[0]):
            leaves = ("gate_proj", "up_proj") if target.endswith("gate_up_proj") else ("down_proj",)
            for published, leaf in zip(conversion.source_patterns, leaves, strict=True):
                name = published.removesuffix(".weight").rpartition(".")[2]
                names.append(WeightRenaming(rf"\.experts\.(\d+)\.{name}\.", rf".experts.\1.{leaf}."))
    return names


def separate_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the fused tensors of experts that are published one by one by linears, in an empty model."""
    with torch.device("meta"):
        for name, experts in get_non_linearized_moes(model) if _names_of_experts(model) else ():
            kind = LinearExperts2D.get_linear_experts_cls(type(experts))
            model.set_submodule(name, kind(getattr(experts, "config", model.config)))
    return model


def quantize_in_memory(
    variant: ResolvedVariant,
    source: SourceModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]] | None,
    seed: int,
    show: Progress | None,
    int4: Mapping[str, Int4Weight] | None,
) -> tuple[PreTrainedModel, VariantRecipe, Report]:
    """Quantise a model, calibrated on ``rows`` of token ids; return it, its recipe and search's results."""
    tensors = [torch.tensor(row) for row in rows or ()]
    model = load_model(source)
    modifiers = build_modifiers(variant, sum(map(len, tensors)), int4)
    run_modifiers(model, tokenizer, modifiers, tensors, seed, show)
    findings: Report = {"smoothing": None, "distillation": None}
    recipe = variant.recipe
    for modifier in modifiers:
        if isinstance(modifier, SearchedSmoothQuant):
            recipe = with_strengths(variant, modifier.chosen)
            findings["smoothing"] = smoothing_report(modifier)
    if (distillation := recipe.scale_distillation) is not None:
        with explained_memory(f"training the scales of '{recipe.name}'", "remove scale_distillation"):
            by_epoch = distill_scales(model, load_model(source), tensors, distillation.epochs, seed, show)
        findings["distillation"] = {"kl_by_epoch": by_epoch}
    _convert_parameters(model, source.dtype)  # rounds values as save_model() will
    computed_in = source.dtype if torch.cuda.is_available() else torch.float32
    _convert_parameters(model, computed_in, all_of_them=True)
    return model, recipe, findings


def run_modifiers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    modifiers: list[Modifier],
    rows: Sequence[torch.Tensor],
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Apply the modifiers in place, each in a pass over ``rows`` of token ids; ``progress`` counts layers.

    Raises FlexQuantError, naming the layer, if activations are not finite.
    """
    torch.manual_seed(seed)
    # llmcompressor 0.14's AWQ pins memory, which torch refuses without a GPU.
    on_gpu, pin = torch.accelerator.is_available(), "_pin_intermediate"
    unpinned = nullcontext() if on_gpu else patch_attr(IntermediatesCache, pin, staticmethod(lambda _: None))
    # It would also separate experts that are published in tensors for all experts.
    as_loaded = patch_attr(sys.modules[oneshot.__module__], get_non_linearized_moes.__name__, lambda _: [])
    samples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    data = DataLoader(cast("Dataset[dict[str, torch.Tensor]]", samples), batch_size=1) if rows else None
    try:
        with watched_layers(model, progress), unpinned, as_loaded:
            oneshot(model=model, tokenizer=tokenizer, dataset=data, recipe=modifiers)
    except BaseException:
        active_session().reset()  # else it holds the model
        raise


def _convert_parameters(model: PreTrainedModel, dtype: torch.dtype, all_of_them: bool = False) -> None:
    """Convert scales and unquantised parameters; quantised weights are divided by their scales on saving."""
    quantized = {id(m.weight) for m in model.modules() if hasattr(m, "quantization_scheme")}
    for parameter in model.parameters():
        if parameter.is_floating_point() and (all_of_them or id(parameter) not in quantized):
            parameter.data = parameter.data.to(dtype)


def save_model(model: PreTrainedModel, source: SourceModel, variant: ResolvedVariant, folder: Path) -> None:
    """Write the compressed model in the source's dtype and under its architecture, with the files beside it.

    Raises FlexQuantError unless the weights of all linears of the ``variant`` are compressed.
    """
    _convert_parameters(model, source.dtype)
    settings = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, save_compressed=True)
    except SafetensorError as e:  # it can stand for an error of the system, such as a full disk
        if (found := OS_ERROR.search(str(e))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from e
    if settings is not None:
        settings.to_json_file(folder / GENERATION_CONFIG)
    active_session().reset()  # else it holds the model until the next one is loaded
    config, recipe = read_config(folder), variant.recipe
    config["architectures"] = read_config(source.folder).get("architectures") or config["architectures"]
    if IN_EXPERTS in recipe.modifiers[recipe.quantizer].get("ignore", ()):
        config["quantization_config"]["ignore"].append(IN_EXPERTS)  # llmcompressor lists no fused experts
    write_json(folder / "config.json", config)
    copy_files(find_files(source.folder, COPIED), folder)
    weights = (ref for name, ref in read_tensors(folder).items() if name.endswith(WEIGHTS))
    compressed, asked = sum(ref.dtype not in FLOAT_DTYPES for ref in weights), len(variant.linears)
    if compressed != asked:
        problem = f"llmcompressor compressed {compressed} of the {asked} linears that '{recipe.name}'"
        raise FlexQuantError(f"{problem} quantises; add the others to 'ignore'")


@contextmanager
def explained_memory(doing: str, remedy: str = "lower --samples or --length") -> Iterator[None]:
    """Turn an out-of-memory error, on the GPU or the CPU, into a FlexQuantError."""
    try:
        yield
    except (RuntimeError, MemoryError) as e:
        if not _is_out_of_memory(e):
            raise
        advice = f"{remedy}, choose a smaller model, or use a machine with more memory"
        raise FlexQuantError(f"the memory ran out while {doing}; {advice}") from e


def _is_out_of_memory(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or any(text in str(error).lower() for text in CPU_ALLOCATOR)
        or _is_out_of_memory(error.__cause__ or error.__context__)
    )


@contextmanager
def watched_layers(model: PreTrainedModel, progress: Progress | None) -> Iterator[None]:
    """Report the layer that the data reaches, and raise FlexQuantError if activations are not finite."""
    found = (LAYER.match(name) for name, _ in model.named_modules())
    names = list(dict.fromkeys(match[0].removesuffix(".") for match in found if match))

    def check(number: int, module: torch.nn.Module, args: object, output: object) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor) and not torch.isfinite(hidden).all():
            found = f"the activations of {names[number - 1]} have NaN or infinite values"
            where = "on the calibration data, though all weights are finite"
            advice = "check the norms' weights, and that the model answers sensibly"
            raise FlexQuantError(f"{found} {where}; {advice}")
        if progress is not None:
            progress(number, len(names))

    with ExitStack() as stack:
        for number, name in enumerate(names, 1):
            stack.callback(model.get_submodule(name).register_forward_hook(partial(check, number)).remove)
        yield
