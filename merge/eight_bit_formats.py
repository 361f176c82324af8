# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read checkpoints in FP8 and INT8 of other formats as compressed-tensors names their tensors.

Block FP8, as DeepSeek and Qwen publish it and AutoRound exports it: a linear has ``weight`` float8_e4m3fn
[out, in] and ``weight_scale_inv`` [out / rows, in / columns], by which its weights are multiplied.
Activations are quantised as they arrive, in groups as wide as a block.

INT8 of AMD's Quark: ``weight`` int8 [out, in] and ``weight_scale``, one number or [out]. Static activations
have ``input_scale`` and ``input_zero_point``. Quark writes zero points of 0 for what is symmetric. The first
pattern of ``layer_quant_config`` that fits a linear's name decides its settings, else ``global_quant_config``
does.
"""

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from flexquant.checkpoint.model_config import ConfigGroup, JsonObject, QuantizedNumbers, wrong_setting
from flexquant.checkpoint.safetensors_io import TensorRef, Tensors, load_tensor
from flexquant.errors import FlexQuantError
from flexquant.merge.packed_formats import AUTO_ROUND, Read

BLOCK_FP8 = "fp8"
SCALE = ".weight_scale_inv"
FP8_TYPES = ("fp", "fp8")
AUTO_ROUND_BLOCKS: JsonObject = {
    "packing_format": "auto_round:fp8",
    "bits": 8,
    "sym": True,
    "act_bits": 8,
    "act_data_type": "fp",
    "act_sym": True,
    "act_dynamic": True,
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
"""AutoRound's settings of block FP8, as vLLM asks for them; what is not written has these values."""
FP8: QuantizedNumbers = {"num_bits": 8, "type": "float", "symmetric": True}
INT8: QuantizedNumbers = {"num_bits": 8, "type": "int"}

QUARK = "quark"
FOR_ALL, BY_LAYER = "global_quant_config", "layer_quant_config"
NOT_READ = ("layer_type_quant_config", "kv_cache_quant_config")
"""Keys of settings that vLLM passes over."""
PER_TENSOR, PER_CHANNEL = "per_tensor", "per_channel"


def is_fp8(section: JsonObject) -> bool:
    """Whether the settings are those of FP8, in blocks or not, or of AutoRound's."""
    method = section.get("quant_method")
    in_fp8 = "fp8" in str(section.get("packing_format")) or section.get("data_type") in FP8_TYPES
    return method == BLOCK_FP8 or (method in AUTO_ROUND and in_fp8)


def _auto_round_block(folder: Path, section: JsonObject) -> object:
    """Return the size of AutoRound's blocks; raise FlexQuantError for FP8 that vLLM does not serve."""
    block, extra = section.get("group_size"), section.get("extra_config") or {}
    wrong = [key for key, value in AUTO_ROUND_BLOCKS.items() if section.get(key, value) != value]
    if section.get("data_type") not in FP8_TYPES:
        wrong.append("data_type")
    if not isinstance(block, list) or len(block) != 2:
        wrong.append("group_size")
    elif section.get("act_group_size", block[0]) != block[0]:
        wrong.append("act_group_size")
    layers = extra.values() if isinstance(extra, dict) else [extra]
    if not all(isinstance(layer, dict) and layer.get("bits") == 16 for layer in layers):
        wrong.append("extra_config")
    if wrong:
        listed = ", ".join(f"{key} {section.get(key)!r}" for key in wrong)
        read = "of its FP8 only blocks with dynamic activations and one setting for all layers are read"
        advice = "export it with the scheme FP8_BLOCK as auto_round:fp8, or as llm_compressor"
        raise FlexQuantError(f"{folder} was exported by AutoRound in FP8 with {listed}; {read}: {advice}")
    return block


def from_fp8(folder: Path, section: JsonObject, tensors: Tensors) -> Read:
    """Read block FP8 of either kind; raise FlexQuantError for other FP8, and weights with no scale or two."""
    if section["quant_method"] != BLOCK_FP8:
        section = {"weight_block_size": _auto_round_block(folder, section)}
    block = section.get("weight_block_size")
    sizes = block if isinstance(block, list) else []
    is_block = len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes)
    if not is_block or section.get("activation_scheme", "dynamic") != "dynamic":
        stated = f"weight_block_size {block!r} and activation_scheme {section.get('activation_scheme')!r}"
        advice = "quantise the model again, e.g. by 'flexquant quantize' with a recipe for FP8"
        problem = f"{folder} is in FP8 with {stated}; only blocks with dynamic activations are read"
        raise FlexQuantError(f"{problem}: {advice}")
    for name, ref in tensors.items():
        if name.endswith(".weight") and ref.dtype == "F8_E4M3" and f"{name}_scale_inv" not in tensors:
            raise FlexQuantError(f"{name}_scale_inv is missing in {folder}; get the checkpoint again")
        if _renamed(name) != name and _renamed(name) in tensors:
            problem = f"{folder} has both {name} and {_renamed(name)}"
            raise FlexQuantError(f"{problem}; a weight has one scale: get the checkpoint again")
    # scale_fmt ue8m0 is left out: it has vLLM scale activations by powers of two where DeepGEMM multiplies,
    # which vLLM does by default for every checkpoint in block FP8.
    renamed = {_renamed(name): ref for name, ref in tensors.items()}
    scheme: ConfigGroup = {
        "weights": {**FP8, "strategy": "block", "block_structure": sizes, "dynamic": False},
        "input_activations": {**FP8, "strategy": "group", "group_size": sizes[1], "dynamic": True},
        "format": "float-quantized",
    }
    return {name.removesuffix(SCALE): scheme for name in tensors if name.endswith(SCALE)}, renamed


def _renamed(name: str) -> str:
    return f"{name.removesuffix(SCALE)}.weight_scale" if name.endswith(SCALE) else name


def from_quark(folder: Path, section: JsonObject, tensors: Tensors) -> Read:
    """Read Quark's INT8; raise FlexQuantError for unserved settings, missing scales and zero points."""
    _check_not_read(folder, section)
    int8 = (name for name, ref in tensors.items() if name.endswith(".weight") and ref.dtype == "I8")
    if not (quantised := sorted(name.removesuffix(".weight") for name in int8)):
        problem = f"{folder} has no linear in INT8 (no tensor '*.weight' is I8)"
        raise FlexQuantError(f"{problem}; export it with weight_format real_quantized")
    schemes = _schemes(folder, section, quantised)
    found = dict(tensors)
    for module, scheme in schemes.items():
        _check_linear(module, scheme, found)
    return schemes, found


def _check_linear(module: str, scheme: ConfigGroup, tensors: dict[str, TensorRef]) -> None:
    """Check a linear's scales, and take zero points that say nothing out of ``tensors``."""
    inputs = scheme["input_activations"]
    assert inputs is not None
    needed, without = ["weight_scale"], ["weight_zero_point"]
    if inputs["strategy"] == "tensor":
        needed.append("input_scale")
    if inputs["symmetric"]:
        without.append("input_zero_point")
    elif not inputs["dynamic"]:
        needed.append("input_zero_point")
    for part in needed:
        if f"{module}.{part}" not in tensors:
            raise FlexQuantError(f"{module}.{part} is missing; get the checkpoint again")
    for name in (f"{module}.{part}" for part in without):
        if (zeros := tensors.pop(name, None)) is not None and bool(load_tensor(zeros).any()):
            raise FlexQuantError(f"{name} is not 0, but its settings say symmetric; get the checkpoint again")
    scale = tensors[f"{module}.weight_scale"]
    if scheme["weights"]["strategy"] == "channel" and len(scale.shape) == 1:
        tensors[scale.name] = replace(scale, shape=(*scale.shape, 1))


def _check_not_read(folder: Path, section: JsonObject) -> None:
    export = section.get("export")
    cache = export.get("kv_cache_group") if isinstance(export, dict) else None
    for key, value in ({key: section.get(key) for key in NOT_READ} | {"kv_cache_group": cache}).items():
        if value:
            advice = f"quantise with settings for all linears or by name ({BY_LAYER}), and without its cache"
            problem = f"{folder} was quantised by Quark with {key} {value!r}, which is not read"
            raise FlexQuantError(f"{problem}; {advice}")


def _schemes(folder: Path, section: JsonObject, linears: Iterable[str]) -> dict[str, ConfigGroup]:
    """Return the scheme of each linear, as vLLM finds its settings by its name."""
    by_pattern = section.get(BY_LAYER) or {}
    if not isinstance(by_pattern, dict):
        raise wrong_setting(folder, BY_LAYER, by_pattern, "an object of settings by pattern")
    stored = {f"{BY_LAYER} {pattern!r}": own for pattern, own in by_pattern.items() if own is not None}
    stored[FOR_ALL] = section.get(FOR_ALL)
    places = {module: _place(module, by_pattern) for module in linears}
    read = {place: _scheme(folder, place, stored[place]) for place in sorted(set(places.values()))}
    return {module: read[place] for module, place in places.items()}


def _place(module: str, by_pattern: JsonObject) -> str:
    """Return where a linear's settings are: the first pattern that fits its name, or those for all."""
    for pattern, own in by_pattern.items():
        if fnmatch(module, pattern) if "*" in pattern else module in pattern:
            return FOR_ALL if own is None else f"{BY_LAYER} {pattern!r}"
    return FOR_ALL


def _scheme(folder: Path, place: str, linears: object) -> ConfigGroup:
    """Return what settings say; raise FlexQuantError, naming setting and place, for what vLLM refuses."""
    if not isinstance(linears, dict):
        raise _refusal(folder, f"{place} {linears!r}")
    for key in ("output_tensors", "bias"):
        if linears.get(key):
            raise _refusal(folder, f"{key} {linears[key]!r} in {place}")
    weight, inputs = (_of_tensor(folder, place, linears, key) for key in ("weight", "input_tensors"))
    by_channel, static = weight["qscheme"] == PER_CHANNEL, not inputs["is_dynamic"]
    is_int8 = weight["dtype"] == "int8" and weight["qscheme"] in (PER_TENSOR, PER_CHANNEL)
    if not is_int8 or weight["symmetric"] is not True or weight["is_dynamic"]:
        raise _refusal(folder, f"{_described('weight', weight)} in {place}")
    if by_channel and weight["ch_axis"] not in (0, None):
        raise _refusal(folder, f"weight ch_axis {weight['ch_axis']!r} in {place}")
    if inputs["dtype"] != "int8" or inputs["qscheme"] != (PER_TENSOR if static else PER_CHANNEL):
        raise _refusal(folder, f"{_described('input_tensors', inputs)} in {place}")
    weights: QuantizedNumbers = {**INT8, "symmetric": True, "strategy": "channel" if by_channel else "tensor"}
    activations: QuantizedNumbers = {**INT8, "symmetric": inputs["symmetric"] is True}
    activations["strategy"] = "tensor" if static else "token"
    weights["dynamic"], activations["dynamic"] = False, not static
    return {"weights": weights, "input_activations": activations, "format": "int-quantized"}


def _of_tensor(folder: Path, place: str, linears: JsonObject, key: str) -> JsonObject:
    """Return the settings of one tensor, which Quark's releases write by themselves or as a list of one."""
    found = linears.get(key)
    one = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(one, dict):
        raise _refusal(folder, f"{key} {found!r} in {place}")
    return {name: one.get(name) for name in ("dtype", "qscheme", "ch_axis", "symmetric", "is_dynamic")}


def _described(key: str, tensor: JsonObject) -> str:
    kinds = ["dynamic" if tensor["is_dynamic"] else "static"]
    kinds += [] if tensor["symmetric"] is True else ["with zero points"]
    return f"{key} {tensor['dtype']} {tensor['qscheme']} {' '.join(kinds)}"


def _refusal(folder: Path, found: str) -> FlexQuantError:
    weights = "symmetric INT8 weights (one scale, or one an output: ch_axis 0)"
    read = f"{weights} with INT8 activations (static per tensor, or dynamic per token) are read"
    advice = "quantise the model so, or by 'flexquant quantize'"
    return FlexQuantError(f"{folder} was quantised by Quark with {found}; of Quark, {read}: {advice}")
