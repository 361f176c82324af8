# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run a merge: open the sources, compare them, write the shards and describe the result."""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import flexquant
from flexquant.checkpoint.folder import find_model
from flexquant.checkpoint.merged_checkpoint import PROVENANCE_FILE, folder_label
from flexquant.checkpoint.merged_checkpoint import SCHEMA as PROVENANCE_SCHEMA
from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant, served_architecture
from flexquant.checkpoint.model_config import SECTIONS, JsonObject
from flexquant.checkpoint.output import prepare_output
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.checkpoint.weight_bytes import CheckpointReport, report_checkpoint
from flexquant.checkpoint.writer import DEFAULT_SHARD_SIZE, Progress, write_json, writing_checkpoint
from flexquant.documents.results import hash_file
from flexquant.errors import FlexQuantError
from flexquant.merge.card import make_card
from flexquant.merge.formats import Source, open_source
from flexquant.merge.merge_plan import MergePlan, plan_merge
from flexquant.merge.nesting import Nested, NestedVariant, nest
from flexquant.merge.same_model import with_config_of
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import choose_policy, load_policy
from flexquant.policy.schema import SCHEMA

if TYPE_CHECKING:
    from flexquant.merge.kv.compatibility import KVReport


def merge_checkpoints(
    sources: Mapping[str, str | Path] | Sequence[tuple[str, str | Path]],
    output: str | Path,
    *,
    policy: str | None = None,
    config_from: str | None = None,
    tokenizer_from: str | None = None,
    generation_from: str | None = None,
    processor_from: str | None = None,
    dtype: str | None = None,
    nested: Nested | None = None,
    overwrite: bool = False,
    allow_incompatible_kv: bool = False,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Progress | None = None,
    kv_progress: Progress | None = None,
) -> CheckpointReport:
    """Merge checkpoints of one model, in any format of :mod:`flexquant.merge.formats`, into ``output``.

    ``sources`` are (variant name, folder or Hugging Face id). ``policy`` is the default policy to store, a
    built-in name or a file. The ``_from`` arguments name the variant whose config, tokenizer, generation
    settings or processor the merged model gets; None: they must not differ. ``dtype``, ``bfloat16`` or
    ``float16``, casts what is in 16 bit. ``nested`` stores 4 bits for each INT8 weight of a W8A8 variant:
    ``near`` changes integers that 4 bits do not reach, ``exact`` refuses variants with any. While other
    threads write, ``kv_progress`` is called with the layers compared, afterwards ``progress`` with the bytes
    written. ``output`` appears only when it is complete. Returns what was written. Raises FlexQuantError for
    sources that cannot be combined, an output that may not be replaced and a full disk.
    """
    from flexquant.merge.kv.compatibility import check_kv_compatibility  # transformers' models

    output = Path(output)
    named = sources.items() if isinstance(sources, Mapping) else sources
    pairs = [(name, find_model(folder)) for name, folder in named]
    prepare_output(output, [folder for _, folder in pairs], overwrite=overwrite)
    opened = [open_source(name, folder, dtype) for name, folder in pairs]
    if config_from is not None:
        opened = with_config_of(config_from, opened)
    choices = {"tokenizer": tokenizer_from, "generation": generation_from, "processor": processor_from}
    plan, inner = plan_merge(opened, choices), dict[str, NestedVariant]()
    if nested is not None:
        plan, inner = nest(plan, nested)
    names = [source.name for source in opened]
    stored = policy_to_store(policy, names)
    chosen = choose_policy(policy, stored)
    build_route_table(chosen, names, plan.num_layers, sys.maxsize)  # before the weights are compared
    groups, files = list(plan.groups.values()), plan.sidecars.files
    writing = writing_checkpoint(output, groups, files, overwrite=overwrite, max_shard_size=max_shard_size)
    with writing as (stage, finish):
        kv = check_kv_compatibility(plan.sources, kv_progress)
        if not kv.compatible and not allow_incompatible_kv:
            raise FlexQuantError(kv.message)
        build_route_table(chosen, names, plan.num_layers, sys.maxsize, kv.mixable)
        merged = _merged_config(plan, inner, kv, stored)
        digests = finish(progress)
        missed = {name: variant.missed() for name, variant in inner.items()}
        changed = {name: m.changed for name, m in missed.items()}
        added_noise = {name: float(f"{m.added_noise:.4g}") for name, m in missed.items()}
        base = plan.sidecars.complete(plan.sources[0].config)
        config = {key: value for key, value in base.items() if key not in ("_name_or_path", *SECTIONS)}
        config["architectures"] = [served_architecture(merged.base_architecture)]
        config["quantization_config"] = merged.to_json()
        write_json(stage / "config.json", config)
        hashed = ["config.json", *files]
        provenance = _provenance(plan.sources, digests, stage, hashed, dtype=dtype, config_from=config_from)
        if missed:
            provenance |= {"changed_integers": changed, "added_noise": added_noise}
        write_json(stage / PROVENANCE_FILE, provenance)
        tensors = {key: ref for group in groups for key, ref in group.items()}
        report = report_checkpoint(merged, plan.num_layers, tensors, changed, added_noise)
        (stage / "README.md").write_text(make_card(report, plan.sources, provenance, files), encoding="utf-8")
    return report


def _provenance(
    sources: Sequence[Source], digests: Mapping[str, str], folder: Path, files: list[str], **given: str | None
) -> JsonObject:
    """Return the document of :class:`Provenance`; ``files`` in ``folder`` are hashed here."""
    python, torch = platform.python_version(), version("torch")
    return {
        "schema": PROVENANCE_SCHEMA,
        "versions": {"flexquant": flexquant.__version__, "python": python, "torch": torch},
        "sources": {
            s.name: {
                "folder": folder_label(s.folder),
                "config_sha256": hash_file(s.folder / "config.json"),
                "transformers_version": s.config.get("transformers_version"),
            }
            for s in sources
        },
        **{option: value for option, value in given.items() if value},
        "files": {name: hash_file(folder / name) for name in sorted(files)},
        "tensors": dict(digests),
    }


def _merged_config(
    plan: MergePlan, inner: Mapping[str, NestedVariant], kv: KVReport, policy: JsonObject | None
) -> MergedConfig:
    def stored(source: Source) -> StoredVariant:
        name, negative = source.name, _has_negative_scales(source)
        nested_in = inner[name].source if name in inner else None
        own_head = name in plan.own_heads
        return StoredVariant(f"{name}.", source.quantization_config, own_head, negative, nested_in)

    return MergedConfig(
        base_architecture=plan.sources[0].architecture,
        variants={source.name: stored(source) for source in plan.sources},
        shared_modules=plan.shared_modules,
        mixable=tuple(map(tuple, kv.mixable)),
        rescaled=tuple(kv.rescaled),
        policy=policy,
        kv_compatibility=kv.to_json(),
        draft_heads=plan.draft_heads,
    )


def _has_negative_scales(source: Source) -> bool:
    packed = {name.removesuffix("_packed") for name in source.tensors if name.endswith("weight_packed")}
    scales = (ref for name, ref in source.tensors.items() if name.removesuffix("_scale") in packed)
    return any(bool((load_tensor(ref).float() < 0).any()) for ref in scales)


def policy_to_store(requested: str | None, variants: Collection[str]) -> JsonObject | None:
    """Return the policy to store: ``requested``, one variant's, or None; raise if no default fits."""
    if requested is not None:
        return load_policy(requested).document
    if len(variants) == 1:
        (name,) = variants
        description = f"{name} for every forward pass"
        return {"schema": SCHEMA, "description": description, "rules": [{"use": name}]}
    policy = choose_policy()
    missing = [name for name in policy.variants if name not in variants]
    if missing:
        problem = f"the built-in default policy '{policy.name}' needs a variant '{missing[0]}'"
        advice = "name a policy for them with --policy"
        raise FlexQuantError(f"{problem}, but these are {', '.join(variants)}; {advice}")
    return None
