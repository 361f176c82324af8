# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Patterns of a checkpoint are matched as vLLM matches them, and within a bound of time and memory."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from flexquant.checkpoint import patterns
from flexquant.checkpoint.model_config import JsonObject
from flexquant.doctor.examining import examine
from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.foreign import write_foreign
from tests.publishers import edits

SLOW = {
    "in re": "(([a-z_0-9]|[.])+)+!",
    "in regex": r"(\w|\w\w|\.)+[!?]",
    "large in regex": "(?:(?:(?:(?:a?){99}){99}){99}){99}",
    "one of many": r"(?=.*\.1\.mlp)(([a-z_0-9]|[.])+)+!",
}
NAMES = ["lm_head", *(f"model.layers.{n}.{of}_proj" for n in (0, 1) for of in ("self_attn.q", "mlp.down"))]


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds, so that reaching them takes a second."""
    monkeypatch.setattr(patterns, "SECONDS", 1)
    monkeypatch.setattr(patterns, "MIB", 128)


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ("^(?!.*lm_head).*", NAMES[1:]),
        (r".*\.1\.", NAMES[3:]),
        ("self_attn", []),
        (r".*(?<=q)_proj$", NAMES[1::2]),
        ("(?i)LM_", NAMES[:1]),
    ],
)
def test_an_expression_fits_from_the_start_of_a_name(expression, fits):
    assert patterns.fitting({"it": expression}, NAMES, "a model") == {"it": set(fits)}


def test_the_first_pattern_counts_also_of_names_that_were_not_announced():
    found = patterns.Patterns(["re:.*down", NAMES[2], "re:.*1", "new"], NAMES[:-1], "a model")
    first = {name: found.first(name) for name in (*NAMES, "new", "new 1", "newer")}
    assert list(first.values()) == [None, None, "re:.*down", "re:.*1", "re:.*down", "new", "re:.*1", None]


@pytest.mark.parametrize("case", SLOW)
def test_an_expression_that_reaches_a_bound_is_named(case, bounds):
    given = {"fast": ".*proj", "slow": SLOW[case], "next": ".*"}
    with pytest.raises(FlexQuantError, match="^a model .* be used: 'slow' takes more than 1 s or 128 MiB"):
        patterns.fitting(given, [name * 2 for name in NAMES], "a model")


def test_one_of_100000_levels_is_no_regular_expression():
    with pytest.raises(FlexQuantError, match=r"^a model has .*: 'deep' is no regular expression \(.*recurs"):
        patterns.fitting({"deep": "(" * 100_000 + ")" * 100_000}, NAMES, "a model")


def pattern_in(section: JsonObject, place: str) -> None:
    """Put a slow pattern into a place of a ``quantization_config``."""
    slow = f"re:{SLOW['in re']}"
    if place == "config_groups":
        section[place]["group_0"]["targets"] = [slow]
    elif place == "transform_config":
        apply = [{"targets": ["Linear"], "location": "weight_input", "ignore": [slow]}]
        section[place] = {"config_groups": {"v": {"type": "hadamard", "apply": apply}}}
    else:
        section[place] = {slow.removeprefix("re:"): {}} if place == "dynamic" else [slow]


@pytest.mark.parametrize("place", ["config_groups", "ignore", "transform_config", "dynamic"])
def test_a_slow_pattern_is_refused_wherever_it_stands(place, w4a16, merged, tmp_path, bounds):
    refused = "cannot be used: '(re:)?\\(\\(.* more than 1 s or 128 MiB to match"
    make = write_foreign if place == "dynamic" else lambda of, to, _: Path(shutil.copytree(of, to))
    source, served = make(w4a16, tmp_path / "source", "gptq"), tmp_path / "merged"
    edits.edit_json("config.json", lambda c: pattern_in(c["quantization_config"], place))(source)
    with pytest.raises(FlexQuantError, match=refused):
        merge_checkpoints({"w4a16": source}, tmp_path / "output")
    assert not (tmp_path / "output").exists()
    if place == "dynamic":
        served = source
    else:
        shutil.copytree(merged, served)
        of_variant = edits.edit_json(
            "config.json",
            lambda c: pattern_in(c["quantization_config"]["variants"]["w4a16"]["quantization_config"], place),
        )
        of_variant(served)
    *_, found = examine(str(served), [])
    assert found.level == "problem" and re.search(refused, found.text)
