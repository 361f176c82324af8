# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare processors by what they make of images and videos, whatever release of transformers wrote them."""

from __future__ import annotations

import ast
import inspect
import json
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexquant.checkpoint.folder import confined_file, read_json
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.sidecars import PROCESSOR, find_files
from flexquant.checkpoint.source import Source
from flexquant.errors import explained
from flexquant.merge.same_tokenizer import first_difference, has_same_file

CLASS = "processor_class"
CONFIG = "processor_config.json"
"""The processor's own settings; transformers 5 nests those of its parts there."""
PARTS = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
"""Part of a processor -> the file in which transformers 4 wrote its settings."""
NOT_READ = {
    "It is a setting of a call, which vLLM gives.": (
        "data_format",
        "device",
        "disable_grouping",
        "input_data_format",
        "return_tensors",
    ),
    "It names code, which is not run.": ("auto_map",),
    "It is compared by itself.": (CLASS,),
    "It is compared with the tokenizer.": ("chat_template",),
}
"""Reason -> settings that may differ."""
IGNORED = frozenset(key for keys in NOT_READ.values() for key in keys)
SQUARE = "default_to_square"
"""Setting by which a class reads a ``size`` that is one number; built, it has another form."""
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Setting that transformers 4 wrote -> the key of ``size`` that it stands for."""


def processor_difference(a: Source, b: Source) -> str | None:
    """Return what the processors of two checkpoints do differently, in words; None if nothing was found.

    A part that only one of them has settings for is no difference. No code that a config names is run.
    Raises FlexQuantError for settings that transformers' class refuses.
    """
    names = {name for source in (a, b) for name in find_files(source.folder, PROCESSOR)}
    if all(has_same_file(name, a, b) for name in names):
        return None
    first, second = _resolved(a), _resolved(b)
    for part in sorted(first.keys() & second.keys()):
        if first[part] != second[part]:
            return f"{part}, {first_difference(first[part], second[part])}"
    return None


def processor_parts(source: Source) -> dict[str, JsonObject]:
    """Return the settings that a checkpoint has of a processor and of its parts, as they are written."""

    def read(name: str) -> JsonObject:
        return read_json(confined_file(source.folder, name)) if (source.folder / name).exists() else {}

    own = read(CONFIG)
    parts = {part: own.pop(part, None) or read(file) for part, file in PARTS.items()}
    return {part: settings for part, settings in {"processor": own, **parts}.items() if settings}


def _resolved(source: Source) -> dict[str, JsonObject]:
    """Return the settings of a processor and of its parts, with the defaults of transformers' classes."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    usual = IMAGE_PROCESSOR_MAPPING_NAMES.get(source.config.get("model_type", ""), {}).get("torchvision", "")
    parts = processor_parts(source)
    names = [{CLASS: name} for written in parts.values() if (name := written.get(CLASS))]
    own = parts.pop("processor", {})
    with explained(
        f"the processor in {source.folder} cannot be read",
        "correct its files, or choose another with --processor-from",
        (Exception,),  # a class of transformers can raise anything
    ):
        settings = {part: _of_part(part, stated, usual) for part, stated in parts.items()}
        settings |= {"processor": _of_itself(own)} if own else {}
    return settings | ({"class": names[0]} if names else {})


def _of_part(part: str, settings: JsonObject, usual: str) -> JsonObject:
    """Return what transformers' class makes of a part's settings; ``usual`` is the class of no other name."""
    from transformers import BaseImageProcessor
    from transformers.video_processing_utils import BaseVideoProcessor

    stated, kind = _stated(settings), f"{part}_type"
    name = str(stated.pop(kind, usual)).removesuffix("Fast")
    base = {"image_processor": BaseImageProcessor, "video_processor": BaseVideoProcessor}[part]
    built = (found := _class(name, base)).from_dict(stated)
    keys = built.valid_kwargs.__annotations__.keys() | (
        stated.keys() | vars(found).keys() if found.__module__ == __name__ else set()
    )
    made = built.to_dict()
    values = _stated({key: made.get(key, getattr(built, key, None)) for key in keys - {SQUARE}})
    for old, edge in EDGES.items():
        if old in values:
            values["size"] = values.get("size", {}) | {edge: values.pop(old)}
    content: JsonObject = json.loads(json.dumps(values | {kind: name}))
    return content


def _of_itself(settings: JsonObject) -> JsonObject:
    """Return the settings that a processor's class takes, with defaults; all, if that needs torchvision."""
    from transformers import ProcessorMixin

    stated = _stated(settings)
    of_name = _class(str(settings.get(CLASS)), ProcessorMixin)
    taken = inspect.signature(of_name).parameters.values()
    defaults = {one.name: one.default for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD}
    return _stated({key: stated.get(key, v) for key, v in defaults.items()}) if defaults else stated


def _stated(settings: JsonObject) -> JsonObject:
    absent = (None, inspect.Parameter.empty)
    return {key: value for key, value in settings.items() if key not in IGNORED and value not in absent}


def _class(name: str, base: type) -> Any:
    """Return the class below ``base`` that transformers has by this name.

    In place of one that needs torchvision, or that transformers lacks, stands a class of this module, with
    the plain values among its attributes.
    """
    import transformers

    found: Any = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    with suppress(AttributeError, ImportError):  # past what stands there for one that needs torchvision
        found = getattr(import_module(found.__module__), found.__name__)
    if isinstance(found, type) and issubclass(found, base):
        return found
    attributes: JsonObject = {}
    if found is not None and (spec := find_spec(found.__module__)) and spec.origin:
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            for part in node.body if isinstance(node, ast.ClassDef) and node.name == name else ():
                if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                    with suppress(ValueError):  # computed
                        attributes[part.targets[0].id] = ast.literal_eval(part.value)
    return type(base)(name, (base,), attributes)
