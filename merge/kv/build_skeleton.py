# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Build the skeleton of the sources' model, or of a similar one if transformers lacks the model."""

from __future__ import annotations

import re

from flexquant.checkpoint.module_names import decoder_layer
from flexquant.checkpoint.source import Source
from flexquant.errors import FlexQuantError
from flexquant.merge.kv.skeleton import Skeleton

ALIKE = ("llama", "qwen3", "phi3")
"""transformers models that can stand in for a missing one: plain, with norms of Q and K, fused matrices."""
WITH_BIASES = {"attention_bias": True, "mlp_bias": True}
WEIGHT = re.compile(r"\.weight(_packed)?$")


def build_skeleton(source: Source) -> Skeleton:
    """Return the skeleton of a source's model.

    If transformers cannot build or run the model, the first model of ``ALIKE`` whose layers have the same
    matrices takes its place, marked ``stands_in``. Raises FlexQuantError if there is none.
    """
    try:
        return Skeleton(source.config)
    except Exception as e:  # the code of a model in transformers can raise anything
        reason = f"{type(e).__name__}: {e}"
    names = {
        WEIGHT.sub("", name[found.end() :])
        for name in source.tensors
        if (found := decoder_layer(name)) is not None and found["index"] == "0" and WEIGHT.search(name)
    }
    for kind in ALIKE:
        try:
            skeleton = Skeleton({**source.config, **WITH_BIASES, "model_type": kind}, stands_in=True)
        except Exception:  # as above
            continue
        if skeleton.matrices(0).keys() <= names:
            return skeleton
    raise FlexQuantError(
        f"transformers cannot build the {source.architecture} of variant '{source.name}' ({reason}), and its "
        f"layers are not those of {', '.join(ALIKE)} either, so its KV cache cannot be compared; update "
        "transformers"
    )
