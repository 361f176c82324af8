# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose the files beside the weights, and refuse sources that need different ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from flexquant.checkpoint.built_model import known_config, written_or_default
from flexquant.checkpoint.folder import (
    GENERATION_CONFIG,
    NOTICES,
    PROCESSOR,
    RECIPE,
    TOKENIZER,
    confined_file,
    find_files,
    read_json,
    recipe_name,
)
from flexquant.checkpoint.model_config import JsonObject, reads_more_than_text, text_config
from flexquant.errors import FlexQuantError, explained
from flexquant.merge.formats import Source
from flexquant.merge.same_inputs import (
    TOKENIZER_CONFIG,
    has_chat_template,
    has_same_file,
    processor_difference,
    processor_parts,
    processor_problem,
    stored_json,
    tokenizer_difference,
    tokenizer_problem,
)

SAMPLING: dict[str, tuple[int, ...]] = {
    **{"repetition_penalty": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "temperature": (1,)},
    **{"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "max_new_tokens": ()},
}
"""Keys that vLLM's ``ModelConfig.get_diff_sampling_param`` reads -> values by which nothing changes."""
NO_CHOICE: Mapping[str, str | None] = {}
ENDS = "eos_token_id"
SETTINGS = (*SAMPLING, ENDS)
AUTO_MAP = "auto_map"
"""Key of a config that names the classes to load, in files beside it or of transformers."""
TOKENIZER_CLASS = "tokenizer_class"
"""Key of a config that names the tokenizer's class where the tokenizer's own config does not."""


def generation_settings(source: Source) -> JsonObject:
    """Return the values of SETTINGS that serving starts from; ENDS holds sorted token ids.

    What is not stated has the first value by which nothing changes, or None. Without
    ``generation_config.json`` those of ``config.json`` count. Raises FlexQuantError if ENDS is neither a
    token id nor a list of them.
    """
    path = find_files(source.folder, (GENERATION_CONFIG,)).get(GENERATION_CONFIG)
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
        found = f"{path or source.folder / 'config.json'} has {ENDS} {ends!r}"
        raise FlexQuantError(f"{found}, expected a token id or a list of them; correct it, or fetch it again")
    return settings | {ENDS: sorted(set(listed))}


@dataclass(frozen=True)
class SidecarPlan:
    """The files to copy, and the sources whose tokenizer and generation settings the merged model gets."""

    files: dict[str, Path]
    """Name in the merged checkpoint -> path."""
    tokenizer: Source
    generation: Source

    def complete(self, config: JsonObject) -> JsonObject:
        """Return a source's config with the keys that belong to the chosen tokenizer and settings."""
        belonging = [(TOKENIZER_CLASS, self.tokenizer), *((key, self.generation) for key in SETTINGS)]
        chosen = {key: source.config[key] for key, source in belonging if key in source.config}
        kept = {key: value for key, value in config.items() if key not in dict(belonging)} | chosen
        return kept if _remote_code(kept) else {key: v for key, v in kept.items() if key != AUTO_MAP}


def plan_sidecars(sources: Sequence[Source], choices: Mapping[str, str | None] = NO_CHOICE) -> SidecarPlan:
    """Return the files to copy; compare what the sources have, unless a choice names a source.

    ``choices`` may name the source of the ``tokenizer``, ``generation`` settings and ``processor``. All files
    of the tokenizer, its code included, come from one source, the first that has a chat template if any does;
    those of a processor come from any, or from its choice alone. Raises FlexQuantError, naming the difference
    and the choices, if tokenizers, generation settings, remote code or (of a model that reads images)
    processors differ, and for a choice that names no source.
    """
    with_template = next(filter(has_chat_template, sources), sources[0])
    tokenizer = _choose(sources, with_template, "tokenizer", choices, tokenizer_difference, tokenizer_problem)
    generation = _choose_generation(sources, choices.get("generation"))
    identical = {name for of in sources for name in _code_files(of.folder, _remote_code(of.config))}
    code = set(_code_files(tokenizer.folder, stored_json(tokenizer, TOKENIZER_CONFIG)))
    if choices.get("tokenizer") is None:
        identical |= code
    first = sources[0]
    for name, other in product(sorted(identical), sources[1:]):
        if not has_same_file(name, first, other):
            both = f"'{first.name}' ({first.folder}) and '{other.name}' ({other.folder})"
            advice = "variants of one model need the same code"
            raise FlexQuantError(f"{name} is not the same in {both}; {advice}")
    names = sorted({*identical, *code, *find_files(tokenizer.folder, TOKENIZER)})
    files = {name: confined_file(tokenizer.folder, name) for name in names}
    is_chosen = choices.get("processor") is not None
    if is_chosen or reads_more_than_text(sources[0].config):
        compare = processor_difference, processor_problem
        processor = _choose(sources, sources[0], "processor", choices, *compare)
    with_processor = sorted(sources, key=lambda source: -len(processor_parts(source)))
    for source in [processor] if is_chosen else with_processor:
        for name in find_files(source.folder, PROCESSOR):
            files.setdefault(name, confined_file(source.folder, name))
    files |= find_files(generation.folder, (GENERATION_CONFIG,))
    for source in sources:
        files = find_files(source.folder, NOTICES) | files
        for path in find_files(source.folder, (RECIPE,)).values():
            files[recipe_name(source.name)] = path
    return SidecarPlan(files, tokenizer, generation)


def _choose(
    sources: Sequence[Source],
    first: Source,
    part: str,
    choices: Mapping[str, str | None],
    difference: Callable[[Source, Source], str | None],
    problem: Callable[[Source], str],
) -> Source:
    """Return the chosen source of a part, or ``first`` if all agree; advise none with a ``problem``."""
    option = f"--{part}-from"
    if (name := choices.get(part)) is not None:
        chosen = named(sources, name, option)
        if said := problem(chosen):
            raise FlexQuantError(f"{option} names '{name}', but {said}; name another variant")
        return chosen
    for other in (source for source in sources if source is not first):
        if found := difference(first, other):
            problems = {source.name: said for source in (first, other) if (said := problem(source))}
            able = [f"{option} {source.name}" for source in (first, other) if source.name not in problems]
            advice = f"choose with {' or '.join(able)}" if able else "give one of them another"
            why = "; ".join(problems.values()) or found
            differ = f"the {part}s of '{first.name}' and '{other.name}' differ: {why}"
            raise FlexQuantError(f"{differ}. One model has one; if these are variants of one model, {advice}")
    return first


def _choose_generation(sources: Sequence[Source], name: str | None) -> Source:
    """Return the source that the settings come from: the first with a file, as all have the same effect."""
    if name is not None:
        return named(sources, name, "--generation-from")
    first, *others = sources
    settings = generation_settings(first)
    for other in others:
        theirs = generation_settings(other)
        for key in (key for key in SETTINGS if settings[key] != theirs[key]):
            both = f"the generation settings of '{first.name}' and '{other.name}'"
            found = f"{both} differ in {key}: {settings[key]} against {theirs[key]}"
            advice = choice(first, other, "--generation-from")
            raise FlexQuantError(f"{found}. One checkpoint has one set of defaults: {advice}")
    return next((source for source in sources if find_files(source.folder, (GENERATION_CONFIG,))), first)


def choice(a: Source, b: Source, option: str) -> str:
    return f"choose with {option} {a.name} or {option} {b.name}"


def named(sources: Sequence[Source], name: str, option: str) -> Source:
    """Return the source by this name; raise FlexQuantError if ``option`` names none."""
    by_name = {source.name: source for source in sources}
    if name not in by_name:
        names = ", ".join(by_name)
        raise FlexQuantError(f"{option} names '{name}', but the variants are {names}; name one of them")
    return by_name[name]


def _remote_code(config: JsonObject) -> JsonObject:
    """Return a model's config if it needs code in its folder, as transformers has no class for it."""
    return config if AUTO_MAP in config and known_config(config, "config.json") is None else {}


def _code_files(folder: Path, config: JsonObject) -> Iterator[str]:
    """Yield the names of the Python files that a config's AUTO_MAP loads, with what they import."""
    mapped = config.get(AUTO_MAP)
    values = mapped.values() if isinstance(mapped, dict) else ()
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    classes = [name for name in names if isinstance(name, str)]
    for module in sorted({name.partition(".")[0] for name in classes if "--" not in name}):
        from transformers.dynamic_module_utils import get_relative_import_files

        path = confined_file(folder, f"{module}.py")
        yield path.name
        problem = f"what {path} imports cannot be read"
        with explained(problem, "get the checkpoint again", (OSError, ValueError)):
            imported = [Path(found).name for found in get_relative_import_files(path)]
        yield from imported
