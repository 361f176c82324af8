# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""FORMAT.md is enough to read a merged checkpoint: its snippet loads one, its tables name every key.

Every link of a page leads to a file that exists, and to a heading that it has.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flexquant.checkpoint import merged_config
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.merge import merge_checkpoints
from tests import programs
from tests.checkpoints import make_pair
from tests.foreign import assert_equal, config_of, tensors_of
from tests.programs import ROOT
from tests.readme import BLOCK

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
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pair(tmp_path_factory.mktemp("sources"), "gemma3")


@pytest.fixture(scope="module")
def merged(sources: dict[str, Path]) -> Path:
    output = sources["w8a8"].with_name("merged")
    merge_checkpoints(sources, output, policy="phase")
    return output


@pytest.mark.parametrize("name", ["w8a8", "w4a16"])
def test_the_snippet_loads_a_variant_without_flexquant(sources, merged, tmp_path, name):
    (tmp_path / "snippet.py").write_text(BLOCKS["python"] + SAVE)
    command = [sys.executable, "snippet.py", str(merged), name, "loaded.safetensors"]
    programs.run(command, timeout=120, folder=tmp_path)
    assert_equal(load_file(tmp_path / "loaded.safetensors"), tensors_of(sources[name]))


def test_the_example_is_a_section_that_flexquant_reads_and_writes_again():
    example = json.loads(BLOCKS["json"])["quantization_config"]
    assert MergedConfig.from_json(example).to_json() == example


def test_every_key_that_is_written_has_a_row(merged):
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
    section = config_of(merged)["quantization_config"]
    provenance = json.loads((merged / PROVENANCE_FILE).read_text())
    assert section.keys() | provenance.keys() <= rows
    named = {word for variant in section["variants"].values() for word in variant}
    named |= {word for source in provenance["sources"].values() for word in source}
    named |= section["kv_compatibility"].keys() | provenance["versions"].keys()
    assert not [word for word in named if f"`{word}`" not in PAGE]


def test_every_written_file_is_in_the_table(merged):
    names = set(re.findall(r"`([^`]+)`", PAGE.partition("## Tensors")[0]))
    for path in merged.iterdir():
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
