# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""FORMAT.md is enough to read a merged model; each key of it is read or refused; links lead somewhere."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flexquant.checkpoint import merged_config
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, MergedCheckpoint
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.merge import merge_checkpoints
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.serving.worker.weights import VariantLoader, mark, unwritten
from tests import programs
from tests.checkpoints import make_pair
from tests.foreign import assert_equal, config_of, tensors_of
from tests.programs import ROOT
from tests.readme import BLOCK
from tests.refusals import refused

PAGE = Path(merged_config.__file__).with_name("FORMAT.md").read_text()
BLOCKS = dict(BLOCK.findall(PAGE))
SAVE = """
import sys
from safetensors.torch import save_file
tensors, section = load_variant(sys.argv[1], sys.argv[2])
assert section["quant_method"] == "compressed-tensors"
assert "flexquant" not in sys.modules
save_file(tensors, sys.argv[3])
"""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pair(tmp_path_factory.mktemp("sources"), "gemma3")


@pytest.fixture(scope="module")
def merged_gemma(gemma: dict[str, Path]) -> Path:
    output = gemma["w8a8"].with_name("merged")
    merge_checkpoints(gemma, output, policy="phase")
    return output


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_the_snippet_loads_a_variant_without_flexquant(gemma, merged_gemma, tmp_path, name):
    (tmp_path / "snippet.py").write_text(BLOCKS["python"] + SAVE)
    command = [sys.executable, "snippet.py", str(merged_gemma), name, "loaded.safetensors"]
    programs.run(command, timeout=120, folder=tmp_path)
    assert_equal(load_file(tmp_path / "loaded.safetensors"), tensors_of(gemma[name]))


def test_the_example_is_a_section_that_flexquant_reads_and_writes_again():
    example = json.loads(BLOCKS["json"])["quantization_config"]
    assert MergedConfig.from_json(example).to_json() == example


def test_every_key_and_every_file_that_is_written_has_a_row(merged_gemma):
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
    section = config_of(merged_gemma)["quantization_config"]
    provenance = json.loads((merged_gemma / PROVENANCE_FILE).read_text())
    assert section.keys() | provenance.keys() <= rows
    named = {word for variant in section["variants"].values() for word in variant}
    named |= {word for source in provenance["sources"].values() for word in source}
    named |= section["kv_compatibility"].keys() | provenance["versions"].keys()
    assert not [word for word in named if f"`{word}`" not in PAGE]
    names = set(re.findall(r"`([^`]+)`", PAGE.partition("## Tensors")[0]))
    for path in merged_gemma.iterdir():
        assert any(path.match(name.replace("0000i", "*").replace("0000n", "*")) for name in names), path.name


PAGES = sorted([*ROOT.glob("*.md"), *(page for top in ROOT.glob("[a-z]*/") for page in top.rglob("*.md"))])
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert not broken


GONE = object()
SECTION = "quantization_config"
W8A8 = "variants.w8a8"
MIXABLE = "has mixable .* each of w8a8, w4a16 once"
MLP = "model.layers.0.mlp"
SETTINGS = f"{W8A8}.quantization_config"


def edited(section: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a section in which the value at a path of keys is another one, or gone."""
    copied = json.loads(json.dumps(section))
    *places, last = path.split(".")
    place = copied
    for key in places:
        place = place[key]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return copied


@pytest.mark.parametrize(
    ("path", "values", "problem"),
    [
        ("schema_version", [GONE, 3, "1", True, 1.0], "this FlexQuant reads versions 1 and 2; upgrade"),
        ("base_architecture", [GONE, 3], "wrong 'base_architecture'"),
        ("base_architecture", ["FlexQuantForCausalLM"], "expected the class of a published model"),
        ("shared_prefix", ["common.", "", None], "has shared_prefix .* expected 'shared.'"),
        ("variants", [GONE, {}, []], "wrong 'variants'"),
        (f"{W8A8}.prefix", ["w8a8", "w4a16.", "shared.", ""], "'w8a8' has prefix .* expected 'w8a8.'"),
        (SETTINGS, [GONE, None, []], rf"wrong '{SETTINGS}'"),
        (f"{SETTINGS}.quant_method", [GONE, "awq", "flexquant"], "'w8a8' has quantization_config"),
        (f"{SETTINGS}.config_groups", [None, [], {"g": 1}, {"g": {"weights": "int8"}}], "'w8a8' has quant"),
        (f"{W8A8}.own_head", [GONE, "false", 0], rf"wrong '{W8A8}.own_head'"),
        (f"{W8A8}.negative_scales", [GONE, "false", 0], rf"wrong '{W8A8}.negative_scales'"),
        (f"{W8A8}.nested_in", [3], rf"wrong '{W8A8}.nested_in'"),
        ("shared_modules", [None, "lm_head", [1]], "wrong 'shared_modules"),
        ("mixable", [GONE, None, "all", {}, [[]], [["w8a8"]], ["w8a8", "w4a16"]], MIXABLE),
        ("mixable", [[["w8a8", "w4a16"], ["w8a8"]], [["w8a8", "fp8"]], [["w8a8", {}]]], MIXABLE),
        ("rescaled", [None, "w4a16", [1]], "wrong 'rescaled"),
        ("rescaled", [["fp8"]], "has rescaled .* expected some of w8a8, w4a16"),
        ("kv_compatibility", [None, []], "wrong 'kv_compatibility'"),
        ("kv_compatibility", [{}, {"compatible": "false"}, {"compatible": 0}], "'compatible' in it, true or"),
        ("draft_heads", [3, "fp8"], "draft_heads"),
        ("policy", ["phase", []], "wrong 'policy'"),
    ],
)
def test_a_value_that_is_wrong_is_refused(merged, path, values, problem):
    section = config_of(merged)[SECTION]
    for value in values:
        with refused(f"^the merged checkpoint.*{problem}.*merge"):
            MergedConfig.from_json(edited(section, path, value))


@pytest.mark.parametrize("name", ["shared", "W8A8", "w8.a8", ""])
def test_a_variant_has_a_name_that_a_merge_gives(merged, name):
    section = config_of(merged)[SECTION]
    variants = {name: section["variants"]["w8a8"], "w4a16": section["variants"]["w4a16"]}
    with refused(f"^'{name}' is not a variant name: use lower-case letters"):
        MergedConfig.from_json(section | {"variants": variants, "mixable": [[*variants]]})


def test_what_is_missing_is_taken_for_the_worst(merged):
    section = config_of(merged)[SECTION]
    for key in ("kv_compatibility", "rescaled", "shared_modules", "shared_prefix", "layered_plans", "policy"):
        section.pop(key, None)
    read = MergedConfig.from_json(section | {"a key of a later release": 1})
    assert (read.rescaled, read.shared_modules, read.policy, read.draft_heads) == (("w4a16",), (), None, None)
    assert read.may_share_cache(["w8a8"]) and not read.may_share_cache(["w8a8", "w4a16"])


@pytest.mark.parametrize(
    ("compatible", "mixable", "may"),
    [(True, [["a"], ["b"], ["c"]], ["ab", "bc"]), (False, [["a", "b"], ["c"]], ["ab"])]
    + [(False, [["a"], ["b"], ["c"]], []), (False, [["a", "b", "c"]], [])],
)
def test_variants_share_a_cache_as_far_as_the_merge_compared_them(merged, compatible, mixable, may):
    section = config_of(merged)[SECTION]
    variants = {name: section["variants"]["w8a8"] | {"prefix": f"{name}."} for name in "abc"}
    known = {"variants": variants, "mixable": mixable, "kv_compatibility": {"compatible": compatible}}
    read = MergedConfig.from_json(section | known | {"rescaled": []})
    assert [both for both in ("ab", "bc") if read.may_share_cache(both)] == may
    assert all(read.may_share_cache(name) for name in "abc")


@pytest.mark.parametrize(
    ("file", "path", "value", "problem"),
    [
        ("config.json", f"{SECTION}.shared_modules", [MLP], f"'w8a8.{MLP}.* of one variant, though"),
        ("config.json", f"{SECTION}.{W8A8}.nested_in", "w4a16", "has nested_in 'w4a16', but no differences"),
        (PROVENANCE_FILE, "schema", "flexquant.provenance/v2", "a wrong 'schema'.*provenance/v1"),
    ],
)
def test_what_the_tensors_contradict_is_refused(merged, tmp_path, file, path, value, problem):
    folder = shutil.copytree(merged, tmp_path / "merged")
    (folder / file).write_text(json.dumps(edited(json.loads((folder / file).read_text()), path, value)))
    with refused(problem):
        MergedCheckpoint.open(folder).variant_tensors("w8a8")


def test_a_worker_loads_no_tensor_of_one_variant_into_a_shared_module(merged):
    read = MergedConfig.from_json(config_of(merged)[SECTION] | {"shared_modules": ["model.layers.0.mlp"]})
    routes = build_route_table(load_policy("phase"), read.variants, num_layers=2, max_tokens=64)
    loader = VariantLoader({name: torch.nn.Module() for name in read.variants}, read, routes)
    with refused("which is of one variant, though shared_modules has its module"):
        loader.load([("w4a16.model.layers.0.mlp.up_proj.weight_scale", torch.ones(1))])


def test_the_page_says_of_every_key_what_reads_it(merged):
    rows = set(re.findall(r"^\| `([\w.<>]+)` \|", PAGE.partition("## What reads a key")[2], re.MULTILINE))
    section = config_of(merged)[SECTION]
    variant = {f"variants.<name>.{key}" for key in (*section["variants"]["w8a8"], "nested_in")}
    verdict = {"kv_compatibility.compatible", "kv_compatibility.message"}
    keys = {*section, "draft_heads", "policy", *variant, *verdict} - {"variants", "kv_compatibility"}
    assert keys <= rows, keys - rows
    recorded = json.loads((merged / PROVENANCE_FILE).read_text())
    assert recorded.keys() | {"dtype", "config_from", "changed_integers", "added_noise"} <= rows


ROWS = slice(16, None)
PARTS = {
    "rows": ((32, 32), ROWS),
    "columns": ((32, 32), (slice(None), ROWS)),  # AWQ and GPTQ have a linear's outputs there
    "an expert": ((4, 32, 32), 3),
    "half of each expert": ((4, 32, 32), (slice(None), ROWS)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_never_written_is_found(part: str, dtype: torch.dtype) -> None:
    shape, place = PARTS[part]
    parameters = {"linear.weight": torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)}
    mark(parameters)
    (data,) = (parameter.data for parameter in parameters.values())
    left = data[place].clone()
    data.fill_(1)
    assert unwritten(parameters) == []
    data[place] = left
    assert unwritten(parameters) == ["linear.weight"]
