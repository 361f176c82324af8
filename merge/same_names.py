# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Give a source's tensors the names that another source has for them, where their class reads both as one.

Releases of transformers write the same vision model as ``language_model.model.layers...`` or as
``model.language_model.layers...``, and read either.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from flexquant.checkpoint.model_class import find_model_class
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError


def with_names(source: Source, names: Collection[str]) -> Source:
    """Return a source whose tensors have those of ``names`` that mean the same to the source's class.

    The modules that its ``quantization_config`` names are renamed with them. Raises FlexQuantError if a
    pattern there then fits other modules.
    """
    own, theirs = ({name.rpartition(".")[0] for name in of} for of in (source.tensors, names))
    other = own - theirs
    model = find_model_class(source.config, str(source.folder / "config.json")) if other else None
    if model is None:
        return source
    by_class = {model.name_of(f"{module}.weight"): module for module in theirs - own}
    modules = {old: by_class.get(model.name_of(f"{old}.weight"), old) for old in other}
    section = dict(source.quantization_config)
    section["ignore"] = [modules.get(name, name) for name in section.get("ignore") or ()]
    section["config_groups"] = {
        key: {**group, "targets": [modules.get(name, name) for name in group["targets"]]}
        for key, group in section["config_groups"].items()
    }
    tensors = {}
    for name, ref in source.tensors.items():
        module, dot, parameter = name.rpartition(".")
        tensors[f"{modules.get(module, module)}{dot}{parameter}"] = ref
    before = LinearSchemes(source.quantization_config, source.owner, source.tensors)
    after = LinearSchemes(section, source.owner, tensors)
    for old, new in modules.items():
        found = [
            scheme and scheme.model_dump(exclude={"targets"}) for scheme in (before.of(old), after.of(new))
        ]
        if found[0] != found[1]:
            raise FlexQuantError(
                f"the quantization_config of {source.owner} fits '{old}' by a pattern that does not fit "
                f"'{new}', as the other variant names it; list the modules in "
                f"{source.folder / 'config.json'} by their names"
            )
    return replace(source, tensors=tensors, quantization_config=section)
