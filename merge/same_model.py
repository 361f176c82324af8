# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Find how two configs differ in what a server reads, and give two sources' tensors the same names."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexquant.checkpoint.built_model import find_model_class, known_config
from flexquant.checkpoint.model_config import JsonObject, count_layers, text_config
from flexquant.checkpoint.schemes import LinearSchemes
from flexquant.errors import FlexQuantError, explained
from flexquant.merge.formats import Source
from flexquant.merge.sidecar_plan import named

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READ_KEYS = Path(__file__).with_name("read_keys.json")
"""What vLLM reads of configs (``tests/read_keys.py`` writes it)."""
WRITER = "transformers_version"
TIED = "tie_word_embeddings"
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
"""Keys of which config classes make their ``layer_types``."""
Keys = dict[str, set[object]]
"""Key -> what its readers take for an absent one, where that is a constant."""
Difference = tuple[str, object, object]
"""Dotted key, value in the first, value in the second."""

NOT_READ = {
    "It says where the files come from.": "_commit_hash _from_model_config _name_or_path license "
    "transformers_version unsloth_fixed unsloth_version",
    "It says how transformers' own model runs; vLLM's model runs in its own way.": "_attn_implementation "
    "_attn_implementation_autoset chunk_size_feed_forward output_attentions output_hidden_states "
    "pretraining_tp return_dict tf_legacy_loss torchscript use_bfloat16 use_cache",
    "It acts in training alone.": "attention_dropout attn_pdrop embd_pdrop gradient_checkpointing "
    "hidden_dropout initializer_range output_router_logits resid_pdrop router_aux_loss_coef",
    "It describes another task than writing text.": "classifier_dropout finetuning_task id2label is_decoder "
    "label2id num_labels problem_type pruned_heads task_specific_params",
    "The generation settings are compared by themselves (`sidecar_plan.py`).": "bos_token_id "
    "decoder_start_token_id do_sample eos_token_id max_length min_length pad_token_id repetition_penalty "
    "sep_token_id temperature top_k top_p",
    "The tokenizers are compared by what they do (`same_inputs.py`).": "tokenizer_class",
    "It describes the quantisation, which may differ.": "compression_config quantization_config",
}
"""Reason -> keys of a config that may differ between variants of one model."""
IGNORED = frozenset(key for keys in NOT_READ.values() for key in keys.split())


def with_names(source: Source, names: Collection[str]) -> Source:
    """Return a source whose tensors, and modules in settings, have ``names`` that mean the same to its class.

    Raises FlexQuantError if a pattern of its ``quantization_config`` then fits other modules.
    """
    own, theirs = ({name.rpartition(".")[0] for name in of} for of in (source.tensors, names))
    other = own - theirs
    model = find_model_class(source.config, str(source.folder / "config.json")) if other else None
    if model is None:
        return source
    by_class = {model.name_of(f"{module}.weight"): module for module in theirs - own}
    modules = {old: by_class.get(model.name_of(f"{old}.weight"), old) for old in other}
    section = dict(source.quantization_config)
    section["ignore"] = [modules.get(name, name) for name in section.get("ignore") or ()]
    section["config_groups"] = {
        key: {**group, "targets": [modules.get(name, name) for name in group.get("targets") or ()]}
        for key, group in (section.get("config_groups") or {}).items()
    }
    tensors = {}
    for name, ref in source.tensors.items():
        module, dot, parameter = name.rpartition(".")
        tensors[f"{modules.get(module, module)}{dot}{parameter}"] = ref
    before = LinearSchemes(source.quantization_config, source.owner, source.tensors)
    after = LinearSchemes(section, source.owner, tensors)
    for old, new in modules.items():
        schemes = before.of(old), after.of(new)
        found = [scheme and scheme.model_dump(exclude={"targets"}) for scheme in schemes]
        if found[0] != found[1]:
            problem = f"fits '{old}' by a pattern that does not fit '{new}', as the other variant names it"
            advice = f"list the modules in {source.folder / 'config.json'} by their names"
            raise FlexQuantError(f"the quantization_config of {source.owner} {problem}; {advice}")
    return replace(source, tensors=tensors, quantization_config=section)


def model_differences(a: JsonObject, b: JsonObject) -> list[Difference]:
    """Return every difference that a server would notice; empty for two configs of one model.

    They are compared as transformers' class resolves defaults, old names and old forms, with the keys that
    vLLM's class reads beside its own; as they are, if transformers does not know the model. Raises
    FlexQuantError for a config that transformers refuses.
    """
    x, y = known_config(a, "config.json"), known_config(b, "config.json")
    if x is None or y is None:
        return _differences(a, b)
    read = keys_read(a)
    found = _differences(_resolved(x, read), _resolved(y, read))
    return [difference for difference in found if difference[0] != TIED or _stated_tie(a) != _stated_tie(b)]


def with_config_of(name: str, sources: Sequence[Source]) -> list[Source]:
    """Return the sources with the config of one; raise FlexQuantError if it is none, or of another shape."""
    chosen = named(sources, name, "--config-from")
    found = [(one.architecture, count_layers(one.config)) for one in (chosen, *sources)]
    shape, *others = [f"a {architecture} of {layers} layers" for architecture, layers in found]
    for source, other in zip(sources, others, strict=True):
        if other != shape:
            problem = f"'{source.name}' is {other} and '{name}' {shape}"
            advice = "cannot give them one config; only variants of one model can be merged"
            raise FlexQuantError(f"{problem}, so --config-from {name} {advice}")
    return [replace(source, config=chosen.config | {WRITER: source.config.get(WRITER)}) for source in sources]


def cache_scheme(source: Source) -> JsonObject | None:
    """Return what serving reads of a source's KV cache scheme; raise FlexQuantError if it is refused."""
    from compressed_tensors.quantization import QuantizationArgs

    scheme = source.quantization_config.get("kv_cache_scheme")
    if scheme is None:
        return None
    with explained(f"the kv_cache_scheme in {source.folder} cannot be read", "get the checkpoint again"):
        read = QuantizationArgs.model_validate(scheme)
    unread = {"observer", "observer_kwargs", "zp_dtype"}
    return read.model_dump(mode="json", exclude=unread, exclude_none=True)


def _differences(a: JsonObject, b: JsonObject, path: str = "") -> list[Difference]:
    """Compare nested objects key by key; what is absent counts as null."""
    found: list[Difference] = []
    for key in sorted((a.keys() | b.keys()) - IGNORED):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found += _differences(x, y, f"{path}{key}.")
        elif x != y:
            found.append((path + key, x, y))
    return found


def _stated_tie(config: JsonObject) -> object:
    """Return the tie of head and embedding that a config states at its top or for the language model."""
    return config.get(TIED, text_config(config).get(TIED))


def keys_read(config: JsonObject) -> Keys | None:
    """Return what vLLM's class and that of its language model read; None for a class that is not served."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    of_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text_config(config).get("model_type", ""))
    table = json.loads(READ_KEYS.read_text(encoding="utf-8"))
    files = table["architectures"].get(config["architectures"][0])
    if files is None:
        return None
    keys: Keys = {}
    of_files = [table["files"][name] for name in (*files, *table["architectures"].get(of_text, ()))]
    for part in (table["of all"], *of_files):
        for key, defaults in part.items():
            keys.setdefault(key, set()).update(defaults)
    return keys


def _resolved(config: PretrainedConfig, read: Keys | None) -> JsonObject:
    """Return what counts of a config, under the names of its class; ``read``: see :func:`keys_read`."""
    from transformers import PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    declared = {field.name for field in fields(config)}
    text = config.get_text_config()
    known = {key: [*defaults] for key, defaults in (read or {}).items()}
    values = {key: defaults[0] for key, defaults in known.items() if len(defaults) == 1}
    values |= {k: v for k, v in config.to_dict().items() if read is None or k in read or k in declared}
    rope = values.get("rope_parameters")  # beside it, Phi-3 states some of its keys once more
    repeated = {*(rope if isinstance(rope, dict) else ()), *(PATTERNS if "layer_types" in declared else ())}
    values = {key: value for key, value in values.items() if key not in repeated}
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if isinstance(heads, int) and isinstance(width, int) and not values.get("kv_lora_rank"):
        values["head_dim"] = values.get("head_dim") or width // heads
    if values.get("model_max_length") == values.get("max_position_embeddings"):
        values["model_max_length"] = None
    values["dtype"] = values["dtype"] or text.to_dict()["dtype"]
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig):  # its dtype and tie are overruled
            nested = {key: v for key, v in _resolved(part, read).items() if key not in ("dtype", TIED)}
            usual = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(part.model_type)]
            values[name] = nested | {"architectures": part.architectures or usual}
    return values
