# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plan what the merged checkpoint holds, and refuse sources that are not variants of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexquant.checkpoint.built_model import ModelClass, find_model_class, written_or_default
from flexquant.checkpoint.draft_heads import check_draft_heads, drafts
from flexquant.checkpoint.loadable import check_loadable
from flexquant.checkpoint.merged_checkpoint import match_each
from flexquant.checkpoint.merged_config import SHARED_PREFIX, VISION_ARCHITECTURES
from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.module_names import (
    EXPERTS,
    HEAD,
    LATENT_UP,
    LAYER,
    OF_TOKENS,
    above,
    decoder_stacks,
    tower,
)
from flexquant.checkpoint.safetensors_io import TensorRef, same_bytes
from flexquant.checkpoint.schemes import PACKED_SUFFIX, LinearSchemes, logical_shapes
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import EMBEDDING_WEIGHTS, Source
from flexquant.merge.same_model import cache_scheme, model_differences, with_names
from flexquant.merge.sidecar_plan import NO_CHOICE, SidecarPlan, choice, plan_sidecars

LM_HEAD = "lm_head"


@dataclass(frozen=True)
class MergePlan:
    """The tensors to write, in groups of whole files that an engine can skip, and the files to copy."""

    sources: tuple[Source, ...]
    num_layers: int
    groups: dict[str, dict[str, TensorRef]]
    """Group (``shared`` first, then the variants) -> merged key -> reference to the tensor's bytes."""
    sidecars: SidecarPlan
    own_heads: frozenset[str]
    """Names of the sources whose lm_head differs from their embedding."""

    @property
    def draft_heads(self) -> str | None:
        """The source whose heads that predict further tokens (MTP) a server drafts with; None without any.

        It is the first that has as many of their tensors as any other.
        """
        counts = {
            source.name: sum(
                drafts(name, source.architecture, self.num_layers) for name in logical_shapes(source.tensors)
            )
            for source in self.sources
        }
        name = max(counts, key=counts.__getitem__)
        return name if counts[name] else None

    @property
    def shared_modules(self) -> tuple[str, ...]:
        """The modules, among those that `_holder` allows, whose tensors are all shared.

        E.g. ``model.norm`` and ``model.layers.0.mlp.experts``. A tower of a vision model counts as a whole.
        """
        shared = {key.removeprefix(SHARED_PREFIX) for key in self.groups.get("shared", {})}
        towers = _find_towers(self.sources)
        kind = self.sources[0].architecture
        names = {name for name in _read_names(self.sources) if not drafts(name, kind, self.num_layers)}
        holders = {name: towers.get(name) or _holder(name) for name in names}
        partly = {holder for name, holder in holders.items() if name not in shared}
        modules = {holder for holder in holders.values() if holder is not None} - partly
        modules -= {name for name in modules if HEAD.search(name) and _computes_apart(name, self.sources)}
        if not self.own_heads:
            modules |= {LM_HEAD for name in modules if name.endswith(OF_TOKENS)}
        return tuple(sorted(modules))

    @property
    def tensors(self) -> dict[str, TensorRef]:
        """Tensors of all groups, keyed by merged key."""
        return {key: ref for group in self.groups.values() for key, ref in group.items()}


def plan_merge(sources: Sequence[Source], choices: Mapping[str, str | None] = NO_CHOICE) -> MergePlan:
    """Compare the sources and return the plan; read headers, small files, and tensors that may be equal.

    ``choices`` are those of :func:`plan_sidecars`. Raises FlexQuantError, naming the file, key, layer or
    tensor, if the sources differ in something that a merged model can have only once, if one lacks a
    parameter of its class, and if a shape does not fit the model or the quantisation scheme.
    """
    if not sources:
        raise FlexQuantError("nothing to merge: name at least one variant as NAME=FOLDER")
    names = [s.name for s in sources]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise FlexQuantError(f"variant name '{name}' is given twice; give every variant its own name")
    first = sources[0]
    for other in sources[1:]:
        _check_same_model(first, other)
    sources = [first, *(with_names(source, first.tensors.keys()) for source in sources[1:])]
    num_layers = count_layers(first.config)
    model = _class_of(first)
    is_tied = bool(written_or_default(first.config, "tie_word_embeddings"))
    for source in sources:
        present = {int(m["index"]) for name in source.tensors if (m := LAYER.search(name))}
        for missing in sorted(set(range(num_layers)) - present):
            raise FlexQuantError(
                f"'{source.name}' has no tensors for layer {missing} of {num_layers} ({source.folder}); "
                "download or quantise it again"
            )
        if source is not first:
            _check_same_shapes(first, source, model, is_tied, num_layers)
        check_parameters(source)
    sidecars = plan_sidecars(sources, choices)
    shared = _find_shared(sources)
    if len(sources) > 1:
        for name, module in _find_towers(sources).items():
            if name not in shared:
                raise FlexQuantError(
                    f"'{name}' is not equal in all variants, but images are read once for all of them; leave "
                    f"'{module}' out of quantising in each (add 're:.*{module.rpartition('.')[2]}.*' to the "
                    "recipe's 'ignore')"
                )
    groups = {"shared": {SHARED_PREFIX + name: first.tensors[name] for name in sorted(shared)}}
    for source in sources:
        own = sorted(source.tensors.keys() - shared)
        groups[source.name] = {f"{source.name}.{name}": source.tensors[name] for name in own}
    own_heads = frozenset(s.name for s in sources if not is_tied or _has_own_head(s))
    return MergePlan(tuple(sources), num_layers, {g: t for g, t in groups.items() if t}, sidecars, own_heads)


def check_parameters(source: Source) -> None:
    """Raise FlexQuantError, naming the tensor, unless a source's tensors fit its class and its schemes.

    Only headers are read.
    """
    check_draft_heads(source.config, source.tensors, source.owner)
    packed = [name for name in source.tensors if HEAD.search(name) and name.endswith(PACKED_SUFFIX)]
    if packed and written_or_default(source.config, "tie_word_embeddings"):
        raise FlexQuantError(
            f"{source.owner} has '{packed[0]}', and its config.json ties the lm_head to the embedding, which "
            "vLLM then loads in its place; set tie_word_embeddings to false there"
        )
    check_loadable(source.quantization_config, source.tensors, source.owner)
    if (model := _class_of(source)) is not None:
        model.check(logical_shapes(source.tensors), f"{source.owner} ({source.folder})")


def _class_of(source: Source) -> ModelClass | None:
    return find_model_class(source.config, str(source.folder / "config.json"))


def _has_own_head(source: Source) -> bool:
    """Whether the files of a tied model hold an lm_head that differs from its embedding."""
    heads = [ref for name, ref in source.tensors.items() if HEAD.search(name)]
    embeddings = [ref for name, ref in source.tensors.items() if name.endswith(EMBEDDING_WEIGHTS)]
    return any(not any(same_bytes(ref, embedding) for embedding in embeddings) for ref in heads)


def _check_same_model(a: Source, b: Source) -> None:
    if a.architecture != b.architecture:
        raise FlexQuantError(
            f"'{a.name}' is a {a.architecture} and '{b.name}' a {b.architecture}; "
            "only variants of one model can be merged"
        )
    differences = model_differences(a.config, b.config)
    if differences:
        advice = f"if they are variants of one model, {choice(a, b, '--config-from')}"
        if all(key.rpartition(".")[2] == "dtype" for key, *_ in differences):
            advice = "if they are, choose one with --dtype bfloat16 or --dtype float16"
        listed = "; ".join(f"{key}: {x!r} against {y!r}" for key, x, y in differences[:5])
        raise FlexQuantError(
            f"the base configs of '{a.name}' and '{b.name}' differ ({listed}); only variants of one model "
            f"can be merged: {advice}"
        )
    schemes = [cache_scheme(source) for source in (a, b)]
    if schemes[0] != schemes[1]:
        raise FlexQuantError(
            f"'{a.name}' has kv_cache_scheme {schemes[0]!r} and '{b.name}' {schemes[1]!r}, but the variants "
            "share one KV cache; quantise both with the same one, or take two checkpoints without it"
        )


def _check_same_shapes(
    a: Source, b: Source, model: ModelClass | None, is_tied: bool, num_layers: int
) -> None:
    """Raise FlexQuantError unless both have the same parameters.

    Either may lack what ``model``, their class, drops, heads that draft, and the lm_head of a tied model.
    """
    a_shapes, b_shapes = logical_shapes(a.tensors), logical_shapes(b.tensors)
    for name in sorted(a_shapes.keys() | b_shapes.keys()):
        if name not in a_shapes or name not in b_shapes:
            if (is_tied and HEAD.search(name)) or drafts(name, a.architecture, num_layers):
                continue
            if model is not None and model.drops(name):
                continue
            has, lacks = (a, b) if name in a_shapes else (b, a)
            raise FlexQuantError(
                f"'{has.name}' has parameter '{name}' and '{lacks.name}' does not; "
                "only variants of one model can be merged"
            )
        if a_shapes[name] != b_shapes[name]:
            raise FlexQuantError(
                f"parameter '{name}' has shape {list(a_shapes[name])} in '{a.name}' and "
                f"{list(b_shapes[name])} in '{b.name}'; only variants of one model can be merged"
            )


def _computes_apart(module: str, sources: Sequence[Source]) -> bool:
    """Whether the sources compute in different ways with the same tensors of a module."""
    found = []
    for source in sources:
        schemes = LinearSchemes(source.quantization_config, source.owner, source.tensors)
        scheme = schemes.of(module)
        found.append(scheme and (scheme.weights, scheme.input_activations, schemes.format_of(scheme)))
    return any(one != found[0] for one in found)


def _find_shared(sources: Sequence[Source]) -> set[str]:
    """Return the names of the tensors that are bit-identical in all sources; empty for a single source."""
    first, *others = sources

    def is_shared(name: str, ref: TensorRef) -> bool:
        return all(name in s.tensors and same_bytes(ref, s.tensors[name]) for s in others)

    found = match_each(first.tensors, is_shared, None) if others else {}
    return {name for name, shared in found.items() if shared}


def _find_towers(sources: Sequence[Source]) -> dict[str, str]:
    """Return, by tensor, the vision model's module that holds it; empty for a text model."""
    if sources[0].architecture not in VISION_ARCHITECTURES:
        return {}
    names = _read_names(sources)
    roots = {above(stack) for stack in decoder_stacks(names)}
    return {name: found for name in sorted(names) if (found := tower(name, roots))}


def _read_names(sources: Sequence[Source]) -> set[str]:
    """Return the names of the tensors that the sources' class reads."""
    names, model = {name for source in sources for name in source.tensors}, _class_of(sources[0])
    return names if model is None else {name for name in names if not model.drops(name)}


def _holder(tensor_name: str) -> str | None:
    """Return the module of a tensor if one instance can serve all variants, else None.

    In a decoder layer, only experts and the projection that expands the latent KV cache can.
    """
    if inside := EXPERTS.match(tensor_name) or LATENT_UP.match(tensor_name):
        return inside[0]
    return None if LAYER.search(tensor_name) else tensor_name.rpartition(".")[0]
