# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a merged checkpoint's README.md, which is its model card."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from flexquant.checkpoint.folder import CARD, confined_file, recipe_name
from flexquant.checkpoint.measured_loss import loss_table, read_losses, too_much
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, folder_label
from flexquant.checkpoint.merged_config import VISION_ARCHITECTURES
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import (
    CheckpointReport,
    describe_kv,
    describe_mixing,
    describe_name,
    describe_nested,
    format_bytes,
)
from flexquant.documents.texts import SELF
from flexquant.documents.yaml_document import from_yaml
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source

TEXT = """\
---
{metadata}
---

# {title}

{count} of one {architecture} ({parameters:,} parameters, {layers} layers) in one checkpoint, for FlexQuant:
a vLLM plugin that keeps them side by side over one KV cache and chooses, for every forward pass, which one
runs each decoder layer.

| variant | scheme | bytes | bits per parameter |
|---|---|---|---|
{rows}

Together {total}, against {full} in 16 bits.{nested}

## Serving

    pip install flexquant
    vllm serve <this folder>

Default policy: {policy}. Another one:

    vllm serve <this folder> --additional-config '{{"flexquant": {{"policy": "<name or file>"}}}}'

Layers of different variants in one plan: {mixing}. KV cache: {kv}.

## How the variants were made

{origins}
{losses}
## Provenance

Merged by FlexQuant {version} from {sources}. `{provenance}` has the SHA-256 of every tensor, which
`flexquant verify` compares. `flexquant split` writes one variant as a plain checkpoint again, with these
tensors bit for bit{served}.
"""
CARRIED = ("license", "license_name", "license_link", "language")
"""Keys of the sources' metadata that the merged model has too, if all that state them agree."""
OUR_RECIPES = "flexquant.recipe/"
NOT_VERSIONS = ("model", "weights_sha256", "calibration_rows_sha256")


def make_card(
    report: CheckpointReport, sources: Sequence[Source], provenance: JsonObject, files: Mapping[str, Path]
) -> str:
    """Return the model card in Markdown; ``files`` maps sidecar names, recipes included, to their paths."""
    rows = [
        [describe_name(f"`{name}`", v), v.scheme, format_bytes(v.own_bytes), f"{v.bits_per_parameter:.2f}"]
        for name, v in report.variants.items()
    ]
    if report.shared_bytes:
        rows.append(["shared by all", "as in the sources", format_bytes(report.shared_bytes), ""])
    merged_from = [f"`{s['folder']}` (`{name}`)" for name, s in provenance["sources"].items()]
    count = len(report.variants)
    return TEXT.format(
        metadata=_metadata(report, sources),
        title=f"{report.base_architecture}: {' + '.join(report.variants)}",
        count="One variant" if count == 1 else f"{count} variants",
        architecture=report.base_architecture,
        parameters=max(v.parameters for v in report.variants.values()),
        layers=report.num_layers,
        rows=_table(rows),
        total=format_bytes(report.total_bytes),
        served=", but nested weights as they are served" if describe_nested(report) else "",
        nested="".join(f"\n\n{line}." for line in describe_nested(report)),
        full=format_bytes(report.bytes_16bit),
        policy=report.policy_text,
        mixing=describe_mixing(report),
        kv=describe_kv(report.kv_compatibility),
        origins=describe_origins(list(report.variants), files),
        losses=describe_losses(list(report.variants), files),
        version=provenance["versions"]["flexquant"],
        sources=", ".join(merged_from),
        provenance=PROVENANCE_FILE,
    )


def _metadata(report: CheckpointReport, sources: Sequence[Source]) -> str:
    """Return the metadata in YAML, with what the sources' cards state of base model, licence and language."""
    cards = [_read_metadata(source) for source in sources]
    metadata: JsonObject = {"library_name": "vllm", "tags": ["flexquant", "compressed-tensors"]}
    reads_images = report.base_architecture in VISION_ARCHITECTURES
    metadata["pipeline_tag"] = "image-text-to-text" if reads_images else "text-generation"
    bases = [base for source, card in zip(sources, cards, strict=True) for base in _base_models(source, card)]
    if bases:
        metadata |= {"base_model": list(dict.fromkeys(bases)), "base_model_relation": "quantized"}
    for key in CARRIED:
        stated = [card[key] for card in cards if card.get(key)]
        texts = (value if isinstance(value, list) else [value] for value in stated)
        is_plain = all(isinstance(text, str) for listed in texts for text in listed)
        if stated and is_plain and all(value == stated[0] for value in stated):
            metadata[key] = stated[0]
    return yaml.safe_dump(metadata, sort_keys=False).strip()


def _read_metadata(source: Source) -> JsonObject:
    """Return the metadata of a source's own card; empty if it has none that can be read."""
    from huggingface_hub import ModelCard

    if not (source.folder / CARD).is_file():
        return {}
    try:
        found: JsonObject = ModelCard.load(confined_file(source.folder, CARD)).data.to_dict()
        return found
    except (FlexQuantError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        return {}


def _base_models(source: Source, card: JsonObject) -> list[str]:
    """Return the models that a source was made from or, if its card names none, its own id on the Hub."""
    stated = card.get("base_model")
    listed = stated if isinstance(stated, list) else [stated]
    if names := [name for name in listed if isinstance(name, str) and name]:
        return names
    label = folder_label(source.folder)
    return [label.partition("@")[0]] if "/" in label else []


def describe_origins(variants: Sequence[str], files: Mapping[str, Path]) -> str:
    """Return a Markdown list with an item per variant; ``files`` maps sidecar names to their paths."""
    lines = []
    for variant in variants:
        line = f"- `{variant}`: its source came without a recipe."
        if (path := files.get(recipe_name(variant))) is not None:
            try:
                document = from_yaml(path.read_bytes(), str(path), "recipe", [OUR_RECIPES]).data
                line = _describe_ours(variant, document)
            except (FlexQuantError, LookupError, TypeError, ValueError, AttributeError):
                line = f"- `{variant}`: by `{recipe_name(variant)}`, as it came with the source."
        lines.append(line)
    return "\n".join(lines)


def describe_losses(variants: Sequence[str], files: Mapping[str, Path]) -> str:
    """Return a section on what quantising lost; empty if no recipe among ``files`` records it."""
    recipes = {name: files[recipe_name(name)] for name in variants if recipe_name(name) in files}
    if not (losses := read_losses(recipes)):
        return ""
    header, *rows = loss_table(losses)
    table = _table([header, ["---"] * len(header), *rows])
    said = f"\n{said}.\n" if (said := too_much(losses)) else ""
    return f"\nLost against the 16-bit model, on texts that no variant was calibrated on:\n\n{table}\n{said}"


def _describe_ours(variant: str, document: JsonObject) -> str:
    """Describe a recipe that FlexQuant wrote for one variant; any other raises LookupError, ValueError ..."""
    if not document["schema"].startswith(OUR_RECIPES):
        raise ValueError
    made, calibration = document["made_with"], document.get("calibration")
    (section,) = document["variants"].values()
    modifiers = []
    for name, value in section.items():
        one = "; ".join(f"{k} {_short(v)}" for k, v in value.items()) if isinstance(value, dict) else value
        modifiers.append(f"  - {name}: {one}")
    data = "without calibration data"
    if calibration:
        source = calibration["data"]
        text: dict[str | None, str] = {None: "Python's language reference"}
        text[SELF] = "text of many kinds, of which the model wrote a part"
        of = "{samples} samples of {length} tokens, seed {seed}".format(**calibration)
        ids = f"token ids with SHA-256 `{made['calibration_rows_sha256']}`"
        data = f"calibrated on {text.get(source, source)}: {of} ({ids})"
    tools = ", ".join(f"{name} {version}" for name, version in made.items() if name not in NOT_VERSIONS)
    made_from = f"from {made['model']} (weights with SHA-256 `{made['weights_sha256']}`)"
    how = f"{made_from}, {data}, by {tools}. In order, and in full in `{recipe_name(variant)}`:"
    return "\n".join([f"- `{variant}`: {how}", *modifiers])


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _short(value: object) -> str:
    """Return a value on one line; a mapping from modules to numbers becomes the range of the numbers."""
    if isinstance(value, dict) and all(isinstance(v, int | float | None) for v in value.values()):
        numbers = [v for v in value.values() if v is not None]
        span = f"{min(numbers)} to {max(numbers)}" if numbers else "none"
        return f"{span}, chosen for each of {len(value)} modules"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
