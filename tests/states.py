# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Makes small random models with layers that keep a state, and merged checkpoints of them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexquant.merge import merge_checkpoints
from tests.architectures.models import random_model, small_config, split
from tests.checkpoints import write_checkpoint
from tests.policies import rules

FAMILIES: Mapping[str, dict[str, Any]] = {
    # A block of the KV cache holds a state, 128 tokens of attention: prompts of tests fill several.
    "qwen3_next": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_key_value_heads": 4},
        **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    },
    **{"falcon_h1": {}, "granitemoehybrid": {}, "lfm2": {}, "lfm2_moe": {}},
}
"""Model type -> fields of its configuration: gated delta nets, Mamba-2 and short convolutions."""
SECOND = ("{phase: decode}", "{tokens: {max: 40}}")
TWINS = rules(*(f"- {{when: {when}, use: second}}" for when in SECOND), "- use: first")
"""Decodes, and ends prompts, with another variant than the one that begins prompts."""


def make_variants(folder: Path, kind: str, sixteen_bit: Mapping[str, str] | None = None, **own: Any) -> Path:
    """Write w8a8, w4a16 and the 16-bit ``model`` of a family into ``folder`` and return it.

    ``own`` are fields of its configuration. ``sixteen_bit``: variant -> a regular expression of what this
    variant alone keeps in 16 bit.
    """
    model = random_model(small_config(kind, **FAMILIES[kind], **own))
    state, quantised, left_out = split(model)
    model.config.architectures = [type(model).__name__]
    for scheme in ("w8a8", "w4a16"):
        kept = (sixteen_bit or {}).get(scheme)
        apart = {key for key in quantised if kept and re.search(kept, key)}
        ignore = [*left_out, *(key.removesuffix(".weight") for key in sorted(apart))]
        write_checkpoint(folder / scheme, model.config, state, scheme, quantised - apart, ignore)
    write_checkpoint(folder / "model", model.config, state, None, set(), [])
    return folder


def merge_twins(folder: Path) -> Path:
    """Merge w8a8 in ``folder`` with itself under two names; return the merged folder.

    Whatever plans a pass takes, the answers are those of stock vLLM on w8a8: unless one variant does not
    read what the other has written.
    """
    (policy := folder / "twins.yaml").write_text(TWINS)
    sources = dict.fromkeys(("first", "second"), folder / "w8a8")
    merge_checkpoints(sources, folder / "twins", policy=str(policy))
    return folder / "twins"
