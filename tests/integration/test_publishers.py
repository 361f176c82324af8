# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Pairs of other formats answer under each variant's policy as stock vLLM answers from the source itself."""

from operator import attrgetter
from pathlib import Path

import pytest
import torch

from flexquant.merge import merge_checkpoints
from tests.conftest import rest_full
from tests.foreign import packed
from tests.integration.conftest import assert_alike, generate
from tests.publishers import edits
from tests.publishers.outcomes import MERGED, ONE_VARIANT, read_page
from tests.publishers.shapes import AWQ, SHAPES, Shape

pytestmark = pytest.mark.engine
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
OUTCOMES = read_page()
of_interest = (s for s in SHAPES if s.stock is not None and (s.form or s.options or s.schemes[0] is None))
SERVED = [s for s in of_interest if OUTCOMES[s.name] == MERGED]


def shift_zero_points(tensors: dict[str, torch.Tensor]) -> None:
    """Make 5 of each zero point of 8 in a checkpoint of AWQ's; all weights but the least stay as they are."""
    for key, words in tensors.items():
        if key.endswith(".qzeros"):
            tensors[key] = words - 0x33333333
        elif key.endswith(".qweight"):
            values = (words[..., None] >> torch.arange(0, 32, 4)) & 15
            tensors[key] = packed((values - 3).clamp(min=0).flatten(-2))


ZERO_POINTS = AWQ("AutoAWQ with zero points", edits.tensors(shift_zero_points))


@pytest.mark.parametrize("shape", rest_full((ZERO_POINTS, *SERVED), ZERO_POINTS), ids=attrgetter("name"))
def test_each_variant_answers_as_its_source_does(shape: Shape, tmp_path: Path) -> None:
    sources = shape.write(tmp_path)
    policies = [ONE_VARIANT.replace("w4a16", name) for name in sources]
    (tmp_path / "policy.yaml").write_text(policies[0])
    merge_checkpoints(sources, tmp_path / "merged", policy=str(tmp_path / "policy.yaml"), **shape.options)
    served = generate(tmp_path / "merged", policies, PROMPTS, dtype="bfloat16")
    for found, (name, source) in zip(served, sources.items(), strict=True):
        options = dict(shape.stock or {}) if name == "w4a16" else {}
        (stock,) = generate(source, None, PROMPTS, dtype="bfloat16", **options)
        assert_alike(found.answers[0], stock.answers[0])
