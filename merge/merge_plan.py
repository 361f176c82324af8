# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Plan what the merged checkpoint holds, and refuse sources that are not variants of one model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flexquant.checkpoint.built_model import ModelClass, find_model_class, written_or_default
from flexquant.checkpoint.draft_heads import check_draft_heads, drafts
from flexquant.checkpoint.loadable import check_loadable
from flexquant.checkpoint.merged_checkpoint import match_each
from flexquant.checkpoint.merged_config import SHARED_PREFIX, VISION_ARCHITECTURES
from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.module_names import HEAD, LAYER, OF_TOKENS, above, decoder_stacks, holder, tower
from flexquant.checkpoint.safetensors_io import TensorRef, same_bytes
from flexquant.checkpoint.schemes import PACKED_SUFFIX, LinearSchemes, logical_shapes
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import EMBEDDING_WEIGHTS, Source
from flexquant.merge.same_model import cache_scheme, model_differences, with_names
from flexquant.merge.sidecar_plan import NO_CHOICE, SidecarPlan, choice, plan_sidecars

LM_HEAD = "lm_head"
ONE_MODEL = "only variants of one model can be merged"


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
        """The source with most heads that draft (MTP), the first of several; None without any."""

        def count(source: Source) -> int:
            names = logical_shapes(source.tensors)
            return sum(drafts(name, source.architecture, self.num_layers) for name in names)

        counts = {source.name: count(source) for source in self.sources}
        name = max(counts, key=counts.__getitem__)
        return name if counts[name] else None

    @property
    def shared_modules(self) -> tuple[str, ...]:
        """Modules (:func:`holder`) and towers whose tensors are all shared, e.g. ``model.embed_tokens``."""
        shared = {key.removeprefix(SHARED_PREFIX) for key in self.groups.get("shared", {})}
        towers = _find_towers(self.sources)
        kind = self.sources[0].architecture
        names = {name for name in _read_names(self.sources) if not drafts(name, kind, self.num_layers)}
        holders = {name: towers.get(name) or holder(name) for name in names}
        partly = {holder for name, holder in holders.items() if name not in shared}
        modules = {holder for holder in holders.values() if holder is not None} - partly
        modules -= {name for name in modules if HEAD.search(name) and _computes_apart(name, self.sources)}
        if not self.own_heads:
            modules |= {LM_HEAD for name in modules if name.endswith(OF_TOKENS)}
        return tuple(sorted(modules))


def plan_merge(sources: Sequence[Source], choices: Mapping[str, str | None] = NO_CHOICE) -> MergePlan:
    """Compare the sources and return the plan; read headers, small files, and tensors that may be equal.

    ``choices`` are those of :func:`plan_sidecars`. Raises FlexQuantError, naming the file, key, layer or
    tensor, if the sources differ in what a merged model has once, if one lacks a parameter of its class, and
    if a shape does not fit.
    """
    if not sources:
        raise FlexQuantError("nothing to merge: name at least one variant as NAME=FOLDER")
    names = [s.name for s in sources]
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise FlexQuantError(f"variant name '{twice[0]}' is given twice; give every variant its own name")
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
            problem = f"'{source.name}' has no tensors for layer {missing} of {num_layers} ({source.folder})"
            raise FlexQuantError(f"{problem}; download or quantise it again")
        if source is not first:
            _check_same_shapes(first, source, model, is_tied, num_layers)
        check_parameters(source)
    sidecars = plan_sidecars(sources, choices)
    shared = _find_shared(sources)
    if len(sources) > 1:
        for name, module in _find_towers(sources).items():
            if name not in shared:
                problem = f"'{name}' is not equal in all variants, but images are read once for all of them"
                ignored = f"add 're:.*{module.rpartition('.')[2]}.*' to the recipe's 'ignore'"
                raise FlexQuantError(f"{problem}; leave '{module}' out of quantising in each ({ignored})")
    groups = {"shared": {SHARED_PREFIX + name: first.tensors[name] for name in sorted(shared)}}
    for source in sources:
        own = sorted(source.tensors.keys() - shared)
        groups[source.name] = {f"{source.name}.{name}": source.tensors[name] for name in own}
    own_heads = frozenset(s.name for s in sources if not is_tied or _has_own_head(s))
    return MergePlan(tuple(sources), num_layers, {g: t for g, t in groups.items() if t}, sidecars, own_heads)


def check_parameters(source: Source) -> None:
    """Raise FlexQuantError, naming the tensor, unless a source's headers fit its class and its schemes."""
    check_draft_heads(source.config, source.tensors, source.owner)
    packed = [name for name in source.tensors if HEAD.search(name) and name.endswith(PACKED_SUFFIX)]
    if packed and written_or_default(source.config, "tie_word_embeddings"):
        problem = f"{source.owner} has '{packed[0]}', and its config.json ties the lm_head to the embedding"
        advice = "set tie_word_embeddings to false there"
        raise FlexQuantError(f"{problem}, which vLLM then loads in its place; {advice}")
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
        problem = f"'{a.name}' is a {a.architecture} and '{b.name}' a {b.architecture}"
        raise FlexQuantError(f"{problem}; {ONE_MODEL}")
    differences = model_differences(a.config, b.config)
    if differences:
        advice = f"if they are variants of one model, {choice(a, b, '--config-from')}"
        if all(key.rpartition(".")[2] == "dtype" for key, *_ in differences):
            advice = "if they are, choose one with --dtype bfloat16 or --dtype float16"
        listed = "; ".join(f"{key}: {x!r} against {y!r}" for key, x, y in differences[:5])
        problem = f"the base configs of '{a.name}' and '{b.name}' differ ({listed})"
        raise FlexQuantError(f"{problem}; {ONE_MODEL}: {advice}")
    schemes = [cache_scheme(source) for source in (a, b)]
    if schemes[0] != schemes[1]:
        both = f"'{a.name}' has kv_cache_scheme {schemes[0]!r} and '{b.name}' {schemes[1]!r}"
        advice = "quantise both with the same one, or take two checkpoints without it"
        raise FlexQuantError(f"{both}, but the variants share one KV cache; {advice}")


def _check_same_shapes(a: Source, b: Source, model: ModelClass | None, is_tied: bool, layers: int) -> None:
    """Raise FlexQuantError unless both have the same parameters, but for what ``model`` drops or ties."""
    a_shapes, b_shapes = logical_shapes(a.tensors), logical_shapes(b.tensors)
    for name in sorted(a_shapes.keys() | b_shapes.keys()):
        if name not in a_shapes or name not in b_shapes:
            is_dropped = model is not None and model.drops(name)
            if is_dropped or (is_tied and HEAD.search(name)) or drafts(name, a.architecture, layers):
                continue
            has, lacks = (a, b) if name in a_shapes else (b, a)
            problem = f"'{has.name}' has parameter '{name}' and '{lacks.name}' does not"
            raise FlexQuantError(f"{problem}; {ONE_MODEL}")
        if a_shapes[name] != b_shapes[name]:
            shapes = f"{list(a_shapes[name])} in '{a.name}' and {list(b_shapes[name])} in '{b.name}'"
            raise FlexQuantError(f"parameter '{name}' has shape {shapes}; {ONE_MODEL}")


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
    names, model = {name for source in sources for name in source.tensors}, _class_of(sources[0])
    return names if model is None else {name for name in names if not model.drops(name)}
