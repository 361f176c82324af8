# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a merged checkpoint's README.md, which is its model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexquant.checkpoint.contents import CheckpointReport, describe_kv, describe_mixing
from flexquant.checkpoint.layer_ranges import format_bytes
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.provenance import PROVENANCE_FILE
from flexquant.merge.origins import describe_origins

CARD = """\
---
library_name: vllm
tags:
- flexquant
- compressed-tensors
---

# {title}

{count} of one {architecture} ({parameters:,} parameters, {layers} layers) in one checkpoint, for FlexQuant:
a vLLM plugin that keeps them side by side over one KV cache and chooses, for every forward pass, which one
runs each decoder layer.

| variant | scheme | bytes | bits per parameter |
|---|---|---|---|
{rows}

Together {total}, against {full} in 16 bits.

## Serving

    pip install flexquant
    vllm serve <this folder>

Default policy: {policy}. Another one:

    vllm serve <this folder> --additional-config '{{"flexquant": {{"policy": "<name or file>"}}}}'

Layers of different variants in one plan: {mixing}. KV cache: {kv}.

## How the variants were made

{origins}

## Provenance

Merged by FlexQuant {version} from {sources}. `{provenance}` has the SHA-256 of every tensor, which
`flexquant verify` compares. `flexquant split` gives a source checkpoint back, bit for bit.
"""


def make_card(report: CheckpointReport, provenance: JsonObject, files: Mapping[str, Path]) -> str:
    """Return the model card in Markdown; ``files`` maps sidecar names, recipes included, to their paths."""
    rows = [
        f"| `{name}` | {v.scheme} | {format_bytes(v.own_bytes)} | {v.bits_per_parameter:.2f} |"
        for name, v in report.variants.items()
    ]
    if report.shared_bytes:
        rows.append(f"| shared by all | as in the sources | {format_bytes(report.shared_bytes)} | |")
    sources = [f"`{s['folder']}` (`{name}`)" for name, s in provenance["sources"].items()]
    count = len(report.variants)
    return CARD.format(
        title=f"{report.base_architecture}: {' + '.join(report.variants)}",
        count="One quantised variant" if count == 1 else f"{count} quantised variants",
        architecture=report.base_architecture,
        parameters=max(v.parameters for v in report.variants.values()),
        layers=report.num_layers,
        rows="\n".join(rows),
        total=format_bytes(report.total_bytes),
        full=format_bytes(report.bytes_16bit),
        policy=report.policy_text,
        mixing=describe_mixing(report),
        kv=describe_kv(report.kv_compatibility),
        origins=describe_origins(list(report.variants), files),
        version=provenance["versions"]["flexquant"],
        sources=", ".join(sources),
        provenance=PROVENANCE_FILE,
    )
