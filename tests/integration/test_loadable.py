# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a merge accepts, vLLM's own loader loads, and what a merge refuses, it does not load."""

import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationScheme

from flexquant.checkpoint.loadable import is_served
from flexquant.doctor.examining import examine
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints, split_checkpoint
from tests.integration.conftest import edited_json
from tests.publishers import edits
from tests.sections import ROUTERS, SCHEMES, Section, random_section
from tests.stock import one_rank, refusal_of_stock

pytestmark = pytest.mark.engine

LINEAR = ("Linear",)
EIGHT, FOUR = (LINEAR, "w8a8"), (LINEAR, "w4a16")
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
QKV = [f"model.layers.{n}.self_attn.{x}_proj" for n in (0, 1) for x in "qkv"]
MIXTURE = {"architecture": "qwen2_moe", "stored": {r"\.gate$|expert_gate$": None}}
LATENT = {"ignore": ("lm_head", "re:.*kv_b_proj"), "architecture": "deepseek_v2"}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
SPARSE = {"format": "sparse-24-bitmask", "targets": ["Linear"]}
IN_FP8 = {"kv_cache_scheme": CACHE}


def of_cache(name: str) -> dict[str, tuple[int]]:
    """Return a scale for K and one for V of both layers; ``name`` has ``k`` in the place of either."""
    names = (name.replace("k", part, 2) for part in "kv")
    return {f"model.layers.{n}.self_attn.{part}": (1,) for part in names for n in (0, 1)}


def mixture(*groups: tuple[Sequence[str], str], left_out: str = ROUTERS, **options: Any) -> Section:
    return Section(groups, **MIXTURE | {"ignore": ("lm_head", ROUTERS, left_out)} | options)


def instead(group: tuple[Sequence[str], str], name: str, shape: tuple[int, ...]) -> Section:
    """Return a section with a tensor of another shape."""
    return Section([group], without=name, added={name: shape})


SECTIONS = {
    "INT8": Section([EIGHT]),
    "INT4": Section([FOUR]),
    "INT4 with zero points": Section([(LINEAR, "w4a16 with zero points")]),
    "INT4 by channel": Section([(LINEAR, "w4a16 by channel")]),
    "FP8": Section([(LINEAR, "fp8")]),
    "INT8 by tensor": Section([(LINEAR, "w8a8 by tensor")]),
    "INT8, static activations": Section([(LINEAR, "w8a8 static")]),
    "INT8, static activations with zero points": Section([(LINEAR, "w8a8 static with zero points")]),
    "INT8 without activations": Section([(LINEAR, "w8 alone, not packed")]),
    "INT8 with zero points": Section([(LINEAR, "w8a8 with zero points")]),
    "INT8 by tensor, packed": Section([(LINEAR, "w8a16 by tensor")]),
    "INT4 that is not packed": Section([(LINEAR, "w4a16, not packed")]),
    "groups that do not divide the inputs": Section([(LINEAR, "w4a16 in 48")]),
    "a part of qkv left out by name": Section([FOUR], ["lm_head", "model.layers.0.self_attn.q_proj"]),
    "a part of qkv left out by expression": Section([FOUR], ["lm_head", "re:.*q_proj"]),
    "a part of gate_up left out": Section([FOUR], ["lm_head", "re:.*gate_proj"]),
    "all of qkv left out": Section([FOUR], ["lm_head", "re:.*[qkv]_proj"]),
    "qkv left out by vLLM's name": Section([FOUR], ["lm_head", "re:.*qkv_proj"], stored={"[qkv]_proj": None}),
    "an expression that fits vLLM's name and one part": Section([FOUR], ["lm_head", "re:.*q.*_proj"]),
    "layers left out": Section([FOUR], ["lm_head", "re:.*layers\\.0\\."]),
    "left out by class": Section([FOUR], ["lm_head", "Linear"]),
    "left out, and stored quantised": Section([FOUR], ["lm_head", "re:.*o_proj"], stored={"o_proj": "w4a16"}),
    "not left out, and stored in 16 bit": Section([FOUR], stored={"o_proj": None}),
    "no target": Section([(["re:.*nothing"], "w4a16")]),
    "no group": Section([]),
    "8 bit for a part of gate_up": Section([(["re:.*gate_proj"], "w8a8"), FOUR]),
    "8 bit for a part of qkv": Section([(["re:.*q_proj"], "w8a8"), FOUR]),
    "8 bit for a part of qkv, after the class": Section([FOUR, (["re:.*q_proj"], "w8a8")]),
    "8 bit for down_proj": Section([(["re:.*down_proj"], "w8a8"), FOUR]),
    "an expression, and a name that it fits": Section(
        [(["re:.*down_proj"], "w8a8"), (["model.layers.0.mlp.down_proj"], "w4a16"), EIGHT]
    ),
    "8 bit for a layer": Section([(["re:.*layers\\.1\\."], "w8a8"), FOUR]),
    "8 bit for qkv by full names": Section([(QKV, "w8a8"), FOUR]),
    "8 bit for qkv by vLLM's name": Section(
        [(["re:.*qkv_proj"], "w8a8"), FOUR], stored={"[qkv]_proj": "w8a8"}
    ),
    "two groups with one scheme for parts of qkv": Section([(["re:.*q_proj"], "w4a16"), FOUR]),
    "other groups for a part of gate_up": Section([(["re:.*up_proj"], "w4a16 in 32"), FOUR]),
    "zero points for a part of qkv": Section([(["re:.*v_proj"], "w4a16 with zero points"), FOUR]),
    "static activations for a part of qkv": Section([(["re:.*k_proj"], "w8a8 static"), EIGHT]),
    "INT8 by tensor for a part of qkv": Section([(["re:.*k_proj"], "w8a8 by tensor"), EIGHT]),
    "a target twice": Section([FOUR, EIGHT]),
    "a target of compressed-tensors and one in small letters": Section([(["linear"], "w8a8")]),
    "attention's group": Section([(["Qwen2Attention"], "w8a8"), FOUR]),
    "a tensor for activations too much": Section([EIGHT], added={f"{UP}.input_scale": (1,)}),
    "a tensor for activations too little": Section([(LINEAR, "w8a8 static")], without=f"{DOWN}.input_scale"),
    "a zero point too much": Section([EIGHT], added={f"{UP}.weight_zero_point": (256, 1)}),
    "a scale too little": Section([EIGHT], without=f"{DOWN}.weight_scale"),
    "an order of inputs": Section([FOUR], added={f"{UP}.weight_g_idx": (128,)}),
    "scales of another shape": instead(EIGHT, f"{DOWN}.weight_scale", (128,)),
    "one scale of another shape": instead((LINEAR, "w8a8 by tensor"), f"{UP}.weight_scale", (1, 1)),
    "one scale without a shape": instead((LINEAR, "w8a8 by tensor"), f"{UP}.weight_scale", ()),
    "a head in INT8 by its class": Section([EIGHT], [], stored={"lm_head": "w8a8"}, model=UNTIED),
    "a head in INT8 that is ignored": Section([EIGHT], stored={"lm_head": "w8a8"}, model=UNTIED),
    **{
        f"a head in {scheme}": Section([(["re:.*lm_head"], scheme), EIGHT], [], model=UNTIED)
        for scheme in SCHEMES
    },
    "a head in INT4 with zero points, of 330 rows": Section(
        [(["re:.*lm_head"], "w4a16 with zero points"), EIGHT], [], model={**UNTIED, "vocab_size": 330}
    ),
    "a head in 16 bit, and its name a target": Section(
        [(["Linear", "lm_head"], "w4a16")], [], stored={"lm_head": None}, model=UNTIED
    ),
    "a head in 16 bit that nothing leaves out": Section([FOUR], [], stored={"lm_head": None}, model=UNTIED),
    "a tied head that nothing leaves out": Section([FOUR], [], model=TIED),
    "a tied head, its name a target": Section([(["Linear", "re:.*lm_head"], "w4a16")], [], model=TIED),
    "an embedding in INT4": Section([(["Linear", "re:.*embed_tokens"], "w4a16")], model=UNTIED),
    "sparse by a format": Section([EIGHT], keys={"sparsity_config": {"format": "sparse-24-bitmask"}}),
    "sparse with targets": Section([EIGHT], keys={"sparsity_config": SPARSE}),
    "dense": Section([EIGHT], keys={"sparsity_config": {"format": "dense", "targets": ["Linear"]}}),
    "dense without targets": Section([EIGHT], keys={"sparsity_config": {"format": "dense"}}),
    "no sparsity": Section([EIGHT], keys={"sparsity_config": None}),
    "a cache in FP8": Section([EIGHT], keys=IN_FP8, added=of_cache("k_scale")),
    "a cache in FP8, and queries": Section(
        [EIGHT],
        keys=IN_FP8,
        added=of_cache("k_scale") | {f"model.layers.{n}.self_attn.q_scale": (1,) for n in (0, 1)},
    ),
    "a cache's scales beside K and V": Section([EIGHT], keys=IN_FP8, added=of_cache("k_proj.k_scale")),
    "a cache's scales by an old name": Section([EIGHT], keys=IN_FP8, added=of_cache("k_proj.output_scale")),
    "a cache's scales by an old name, without settings": Section(
        [EIGHT], added=of_cache("k_proj.output_scale")
    ),
    "a cache's scales and zero points by old names": Section(
        [EIGHT], keys=IN_FP8, added=of_cache("k_proj.output_scale") | of_cache("k_proj.output_zero_point")
    ),
    "a cache in INT8": Section([EIGHT], keys={"kv_cache_scheme": CACHE | {"type": "int"}}),
    "a cache with zero points": Section([EIGHT], keys={"kv_cache_scheme": CACHE | {"symmetric": False}}),
    "a cache by channel": Section([EIGHT], keys={"kv_cache_scheme": CACHE | {"strategy": "channel"}}),
    "experts in INT8": mixture(EIGHT),
    "experts in INT4": mixture(FOUR),
    "experts in 16 bit": mixture(EIGHT, left_out="re:.*experts\\."),
    "one expert in 16 bit": mixture(EIGHT, left_out="re:.*experts\\.2\\."),
    "the first expert in 16 bit": mixture(EIGHT, left_out="re:.*experts\\.0\\."),
    "one expert's down_proj in 16 bit": mixture(EIGHT, left_out="re:.*experts\\.3\\.down_proj"),
    "experts by name, all else by class": mixture((["re:.*experts\\."], "w8a8"), FOUR),
    "one expert in INT4": mixture((["re:.*experts\\.1\\."], "w4a16"), EIGHT),
    "experts' down_proj in INT4": mixture((["re:.*experts\\..*down_proj"], "w4a16"), EIGHT),
    "experts with static activations": mixture((["re:.*experts\\."], "w8a8 static"), EIGHT),
    "experts by tensor": mixture((["re:.*experts\\."], "w8a8 by tensor"), EIGHT),
    "shared experts in INT4": mixture((["re:.*shared_expert\\."], "w4a16"), EIGHT),
    "a part of shared experts in INT4": mixture((["re:.*shared_expert.up_proj"], "w4a16"), EIGHT),
    "routers that nothing leaves out": mixture(EIGHT, ignore=("lm_head",)),
    "routers in INT8": mixture(EIGHT, ignore=("lm_head",), stored={}),
    "Mixtral": mixture(EIGHT, architecture="mixtral"),
    "Mixtral, w1 in INT4": mixture((["re:.*w1$"], "w4a16"), EIGHT, architecture="mixtral"),
    "latent attention": Section([EIGHT], **LATENT),
    "latent attention, a part of its input in INT4": Section([(["re:.*q_a_proj"], "w4a16"), EIGHT], **LATENT),
    "latent attention, a part of its input left out": Section(
        [EIGHT], **LATENT | {"ignore": ("lm_head", "re:.*kv_b_proj", "re:.*kv_a_proj_with_mqa")}
    ),
}
RANDOM = {f"random {seed}": random_section(seed) for seed in range(60)}
ON_GPUS = "vLLM's embeddings look rows of integers up by Triton, which no test here has"
AS_ANOTHER = "vLLM reads a part of qkv as it reads the others, which leaves it without scale or zero point"
LIMITS = {
    "an embedding in INT4": ON_GPUS,
    "zero points for a part of qkv": AS_ANOTHER,
    "random 42": AS_ANOTHER,
    "sparse by a format": "a sparse checkpoint has other tensors than the test's",
}
"""Sections that are refused though vLLM loads them."""
TAKEN = (
    "a cache in FP8, and queries",
    "a cache's scales beside K and V",
    "a cache's scales by an old name",
    "a cache's scales and zero points by old names",
)
"""Some of the sections that are loaded as they are merged, though not as they are published."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
DEVICE = (
    *("Failed to find a kernel", "Forced NVFP4 kernel", "WNA16 MoE backend", "FP8 MoE backend"),
    *("Int8 MoE backend", "static_scaled_fp8_quant()"),
)
"""What vLLM says where this CPU has no kernel for a scheme that it has."""


def arguments(kind: str, bits: int, strategy: str, **others: bool) -> dict[str, Any]:
    """Return settings of numbers; a group's size stands behind ``strategy``."""
    name, _, size = strategy.partition(" ")
    return {"type": kind, "num_bits": bits, "strategy": name, "group_size": int(size or 0) or None, **others}


def refusal_of_merge(source: Path, output: Path) -> str | None:
    try:
        merge_checkpoints({"only": source}, output)
    except FlexQuantError as e:
        assert not output.exists()
        return str(e)
    return None


def verdicts(folder: Path, section: Section) -> tuple[str | None, str | None]:
    """Return why a merge refuses a section's checkpoint, and why vLLM does not load what is stored of it."""
    stored = section.write(folder / "source")
    refusal = refusal_of_merge(stored, folder / "merged")
    if refusal is None:
        stored = folder / "stored"
        split_checkpoint(folder / "merged", "only", stored)
    return refusal, refusal_of_stock(stored)


def test_a_merge_takes_what_vllm_loads(tmp_path: Path) -> None:
    outcomes, apart, taken = Counter[str](), {}, set()
    with one_rank(tmp_path):
        for name, section in (SECTIONS | RANDOM).items():
            (folder := tmp_path / "checkpoints").mkdir()
            refusal, of_vllm = verdicts(folder, section)
            shutil.rmtree(folder)
            if of_vllm and any(said in of_vllm for said in DEVICE):
                outcomes["no kernel"] += 1
            elif (refusal is None) is (of_vllm is None):
                outcomes["taken" if refusal is None else "refused"] += 1
                taken |= {name} if refusal is None else set()
            else:
                apart[name] = f"merge: {refusal}; vLLM: {of_vllm}"
    print(outcomes)
    assert {name: said for name, said in apart.items() if name not in LIMITS} == {}
    assert apart.keys() == LIMITS.keys() and taken >= {*TAKEN}
    assert outcomes["taken"] >= 35 and outcomes["refused"] >= 70 and outcomes["no kernel"] <= 30, outcomes


def test_schemes_are_those_that_vllm_has_a_class_for(tmp_path: Path) -> None:
    """Weights and activations are of one type; what this CPU has no kernel for counts as served.

    Packed FP8 is left out: vLLM reads it as INT8.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    strategies = ("tensor", "channel", "token", "group 32", "group 128", "tensor_group 16")
    config = EngineArgs(str(SECTIONS["INT8"].write(tmp_path / "any"))).create_engine_config()
    served = Counter[bool]()
    for kind, form, bits, strategy in product(("int", "float"), FORMATS, (3, 4, 8), strategies):
        for symmetric, inputs in product((True, False), (None, *product((4, 8), strategies, (True, False)))):
            weights = arguments(kind, bits, strategy, symmetric=symmetric or kind == "float")
            activations = inputs and arguments(kind, *inputs[:2], dynamic=inputs[2])
            group = {"targets": ["x"], "weights": weights, "input_activations": activations}
            if kind == "float" and form == "pack-quantized":
                continue
            try:
                scheme = QuantizationScheme(**group)
            except (ValueError, NotImplementedError):  # compressed-tensors has no such scheme
                continue
            try:
                with set_current_vllm_config(config):
                    whole = {"config_groups": {"any": group}, "format": form}
                    theirs = compressed_tensors.CompressedTensorsConfig.from_config(whole)
                    parts = scheme.weights, scheme.input_activations, None, form, "x"
                    stock = theirs._get_scheme_from_parts(*parts)
            except (AssertionError, AttributeError, NotImplementedError, ValueError) as e:
                stock = any(said in str(e) for said in DEVICE)
            assert is_served(scheme, form, is_expert=False) is bool(stock), (group, form)
            served[bool(stock)] += 1
    assert served[True] > 100 and served[False] > 1000, served


def test_a_model_without_the_head_that_it_needs_is_refused(tmp_path: Path) -> None:
    source = Section([EIGHT], model=UNTIED, without="lm_head").write(tmp_path / "source")
    assert "lm_head" in (refusal_of_merge(source, tmp_path / "merged") or "")


@pytest.mark.parametrize(
    "settings",
    [
        {"ignore": ["lm_head", "re:.*q_proj"]},
        {"sparsity_config": SPARSE},
        {"kv_cache_scheme": CACHE | {"type": "int"}},
        {"config_groups": {"group_0": {"targets": ["re:.*mlp"], "weights": {"num_bits": 8}}}},
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}},
    ],
)
def test_the_doctor_says_what_a_merge_says(settings: dict[str, Any], tmp_path: Path) -> None:
    source = SECTIONS["INT8"].write(tmp_path / "source")
    assert refusal_of_merge(source, tmp_path / "merged") is None
    edits.section(**settings)(source)
    with edited_json(tmp_path / "merged" / "config.json") as config:
        config["quantization_config"]["variants"]["only"]["quantization_config"].update(settings)
    *_, last = examine(str(tmp_path / "merged"), [])
    assert (last.level, last.text) == ("problem", refusal_of_merge(source, tmp_path / "again"))
