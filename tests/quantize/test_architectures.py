# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every architecture that is served is built to the end, or refused before anything is quantised.

The models are small and random, and rounded to nearest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexquant.build import build_checkpoint
from flexquant.checkpoint.folder import read_tensors
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.errors import FlexQuantError
from flexquant.quantization.recipe import load_recipe
from tests.architectures.models import LIKE, random_model, small_config
from tests.architectures.outcomes import RESULTS, SERVED
from tests.checkpoints import saved_tensors, write_checkpoint
from tests.quantize.quantizing import recorder

FOUND = json.loads(RESULTS.read_text())["architectures"]
SOME = (
    *("AfmoeForCausalLM", "FalconForCausalLM", "GPTNeoXForCausalLM", "GptOssForCausalLM"),
    *("MiMoForCausalLM", "OPTForCausalLM"),
)
"""A router in 16 bit, another class of linears, a renamed head, fused experts, and two that are refused."""
UNKNOWN = "names the architecture {}, and transformers computes the model_type '{}' as"
REFUSED = {"OPTForCausalLM": "transformers cannot build the OPTForCausalLM"} | {
    name: UNKNOWN.format(name, FOUND[name]["model_type"])
    for name in (
        *("IQuestCoderForCausalLM", "InternLM3ForCausalLM", "MiMoForCausalLM", "MiMoV2ForCausalLM"),
        *("MiniCPMForCausalLM", "PanguEmbeddedForCausalLM", "SolarForCausalLM", "TeleChat3ForCausalLM"),
        "TeleFLMForCausalLM",
    )
}
"""Architecture -> how it is refused; transformers has no class for the others."""


def write_model(folder: Path, architecture: str) -> Path:
    """Write a small random 16-bit model of an architecture, and return its folder."""
    own = LIKE.get(architecture, ("", {}))[1]
    model = random_model(small_config(FOUND[architecture]["model_type"], **own))
    tensors = saved_tensors(model)
    model.config.architectures = [architecture]
    return write_checkpoint(folder, model.config, tensors, None, set(), [])


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.full)
        for name in sorted(name for name in FOUND if FOUND[name]["outcome"] == SERVED or name in REFUSED)
    ],
)
def test_it_is_built_to_the_end_or_refused_before_quantising(architecture: str, tmp_path: Path) -> None:
    model, titles = write_model(tmp_path / "model", architecture), list[str]()

    def build() -> list[str]:
        built = build_checkpoint(model, tmp_path / "merged", load_recipe("rtn"), stage=recorder(titles))
        assert all(variant.losses for variant in built.variants)
        return [variant.folder for variant in built.variants]

    if architecture in REFUSED:
        with pytest.raises(FlexQuantError, match=REFUSED[architecture]):
            build()
        assert titles == [f"reading {model}"]
        assert not (tmp_path / "merged-variants").exists()
        return
    for folder in build():
        tensors = read_tensors(Path(folder))
        weights = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
        assert weights
        for name in weights:
            assert f"{name}_packed" in tensors or tensors[name].dtype == "I8"
    assert read_merged_config(tmp_path / "merged")[0].base_architecture == architecture
