# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read a checkpoint's generation settings as vLLM does: sampling defaults, and the tokens that end a text."""

from __future__ import annotations

from pathlib import Path

from flexquant.checkpoint.built_model import written_or_default
from flexquant.checkpoint.folder import confined_file, read_json
from flexquant.checkpoint.model_config import JsonObject, text_config
from flexquant.checkpoint.sidecars import GENERATION_CONFIG
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError

SAMPLING: dict[str, tuple[int, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "temperature": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "max_new_tokens": (),
}
"""Keys that vLLM's ``ModelConfig.get_diff_sampling_param`` reads -> values by which nothing changes.

``do_sample`` is none of them.
"""
ENDS = "eos_token_id"
SETTINGS = (*SAMPLING, ENDS)


def generation_settings(source: Source) -> JsonObject:
    """Return the values of SETTINGS that serving starts from; ENDS holds sorted token ids.

    What is not stated has the first value by which nothing changes, or None.

    A checkpoint without ``generation_config.json`` has those of its ``config.json``. Raises FlexQuantError if
    ENDS is neither a token id nor a list of them.
    """
    path = settings_file(source.folder)
    if path:
        stated = read_json(path)
    else:
        nested = text_config(source.config)
        stated = {key: source.config.get(key, nested.get(key)) for key in SAMPLING}
        stated[ENDS] = written_or_default(nested, ENDS) if ENDS not in source.config else source.config[ENDS]
    settings: JsonObject = {}
    for key, none in SAMPLING.items():
        value = stated.get(key)
        settings[key] = next(iter(none), None) if value in (None, *none) else value
    ends = stated.get(ENDS)
    listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(end) is int for end in listed):
        raise FlexQuantError(
            f"{path or source.folder / 'config.json'} has {ENDS} {ends!r}, expected a token id or a list of "
            "them; correct it, or fetch it again"
        )
    return settings | {ENDS: sorted(set(listed))}


def settings_file(folder: Path) -> Path | None:
    """Return a checkpoint's ``generation_config.json``; None if it has none."""
    return confined_file(folder, GENERATION_CONFIG) if (folder / GENERATION_CONFIG).exists() else None
