# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare tokenizers, and processors of images and videos, by what they do, whoever wrote their files."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.built_model import load_tokenizer
from flexquant.checkpoint.folder import (
    CHAT_TEMPLATES,
    MISTRAL_TOKENIZER,
    PROCESSOR,
    TOKENIZER,
    confined_file,
    find_files,
    read_if_there,
    read_json,
)
from flexquant.checkpoint.model_config import JsonObject, text_config
from flexquant.errors import FlexQuantError, explained
from flexquant.merge.formats import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token")
"""Special tokens by the names under which vLLM asks for them. It pads nothing."""
SHOWN = 120
VOCABULARY = ("tokenizer.json", "*vocab*", "*.model", "*.tiktoken", *MISTRAL_TOKENIZER)
"""Files of which a checkpoint with a tokenizer has one, unless the tokenizer has code of its own."""
HARD_TEXTS = (
    "",
    " ",
    "Hello, world!  Two  spaces, and a trailing one ",
    "\n\n\tdef f(x):\r\n        return x**2  # tab, CR LF and indentation\n",
    "don't can't I'll you've WE'RE it's",
    "3.14159 1,000,000 12345678901234567890 0x1F 1e-9 ½ ² Ⅷ ٣ १२३",
    "naïve café cafe\u0301 Å Å ﬁ ＡＢＣ İstanbul ẞ straße ǅ",
    "Привет, мир. Καλημέρα κόσμε. שָׁלוֹם עולם. مرحبا بالعالم. नमस्ते दुनिया. สวัสดีชาวโลก.",
    "你好，世界。こんにちは世界。カタカナ ｶﾀｶﾅ 안녕하세요 세계 각 Việt Nam",
    "👋🌍 👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ ☺︎ 𝕳𝖊𝖑𝖑𝖔 𓂀",
    "zero\u200bwidth non\u00a0breaking soft\u00adhyphen \ufeffmark \u202ebackwards\u202c \ufffd \x00 \x1b[0m",
    "▁metaspace ĠBPE ##piece </w> <0x0A> [UNK] <unk> <s> </s> <|endoftext|> <|im_start|>user",
    "https://example.org/a_b?c=d&e=%20f user@example.org $x^{2}_{i}$ {{ braces }} `code` ~~ -- ——",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa        ........ ======== \n\n\n\n",
    "CamelCaseIdentifier snake_case_name kebab-case SCREAMING_CASE αβγ_δ",
)
CLASS = "processor_class"
CONFIG = "processor_config.json"
"""The processor's own settings; transformers 5 nests those of its parts there."""
PARTS = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
"""Part of a processor -> the file in which transformers 4 wrote its settings."""
NOT_READ = (
    *("data_format", "device", "disable_grouping", "input_data_format", "return_tensors"),  # vLLM gives them
    "auto_map",  # names code, which is not run
    CLASS,  # compared by itself
    "chat_template",  # compared with the tokenizer
)
"""Settings that may differ."""
SQUARE = "default_to_square"
"""Setting by which a class reads a ``size`` that is one number; built, it has another form."""
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Setting that transformers 4 wrote -> the key of ``size`` that it stands for."""


def tokenizer_difference(a: Source, b: Source) -> str | None:
    """Return what the tokenizers of two checkpoints do differently, in words; None if nothing was found.

    Equal files are not loaded. Of others vocabulary, merges, added and special tokens and chat template have
    to be equal, and both have to treat HARD_TEXTS alike. A chat template that only one of them has is no
    difference. Templates are not run.
    """
    names = {name for source in (a, b) for name in find_files(source.folder, TOKENIZER)}
    differing = sorted(name for name in names if not has_same_file(name, a, b))
    if not differing:
        return None
    mistral = [name for source in (a, b) for name in find_files(source.folder, MISTRAL_TOKENIZER)]
    if read_by_mistral := [name for name in differing if name in mistral]:
        return f"{read_by_mistral[0]} differs or is missing"
    try:
        first, second = load_tokenizer(a.folder), load_tokenizer(b.folder)
    except FlexQuantError as e:
        return f"{differing[0]} differs or is missing, and more cannot be said, as {e}"
    texts = [*HARD_TEXTS, *(f"a{token}b {token} c" for token in first.get_added_vocab())]
    with_template = bool(first.chat_template and second.chat_template)
    try:
        pairs = zip(*(_behaviour(one, texts, with_template) for one in (first, second)), strict=True)
        return next((f"{what}, {first_difference(x, y)}" for (what, x), (_, y) in pairs if x != y), None)
    except BaseException as e:  # the tokenizers library ends a pattern that takes too long by a panic
        if type(e).__name__ != "PanicException":
            raise
        return f"{differing[0]} differs, and more cannot be said, as a text cannot be read ({e})"


def tokenizer_problem(source: Source) -> str:
    """Return why the model cannot have a checkpoint's tokenizer, empty if it can or if that is not known."""
    if not find_files(source.folder, VOCABULARY) and "auto_map" not in stored_json(source, TOKENIZER_CONFIG):
        return f"{source.folder} has no tokenizer, such as a tokenizer.json"
    try:
        tokenizer = load_tokenizer(source.folder)
    except FlexQuantError:
        return ""
    added, rows = tokenizer.get_added_vocab(), text_config(source.config).get("vocab_size")
    ids = {token: number for token, number in tokenizer.get_vocab().items() if token not in added}
    ids |= {token: added[token] for name in SPECIAL if (token := getattr(tokenizer, name)) in added}
    largest = max(ids, key=ids.__getitem__, default="")
    if not isinstance(rows, int) or not ids or ids[largest] < rows:
        return ""
    return f"the tokenizer in {source.folder} has {largest!r} at {ids[largest]}, and the model {rows} tokens"


def processor_problem(source: Source) -> str:
    """Return why the model cannot have a checkpoint's processor; empty if it can."""
    return "" if processor_parts(source) else f"{source.folder} has no processor, such as a {CONFIG}"


def _behaviour(tokenizer: Tokenizer, texts: list[str], with_template: bool) -> Iterator[tuple[str, object]]:
    """Yield what tokenizers are compared by, one after the other: a description, and what this one does."""
    templates = tokenizer.chat_template if with_template else {}
    in_templates = {k: v for k, v in tokenizer.special_tokens_map.items() if k in str(templates)}
    yield "special tokens", {name: getattr(tokenizer, name) for name in SPECIAL} | in_templates
    yield "vocabularies", tokenizer.get_vocab()
    added = tokenizer.added_tokens_decoder.items()
    yield "added tokens", {str(number): repr(token) for number, token in added}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend else {}
    yield "models", {key: value for key, value in model.items() if key != "vocab"}
    named = templates if isinstance(templates, dict) else {"default": templates}
    yield "chat templates", {name: str(text).removesuffix("\n") for name, text in named.items()}
    for text in texts:
        ids = {special: tokenizer.encode(text, add_special_tokens=special) for special in (True, False)}
        found: JsonObject = {"with special tokens": ids[True], "without": ids[False]}
        found["decoded"] = tokenizer.decode(ids[True])
        found["decoded without special tokens"] = tokenizer.decode(ids[True], skip_special_tokens=True)
        yield f"token ids of the text {text!r}", found


def has_same_file(name: str, a: Source, b: Source) -> bool:
    """Whether both checkpoints have the file, with the same content; JSON is compared as data."""
    if not all((source.folder / name).is_file() for source in (a, b)):
        return False
    x, y = confined_file(a.folder, name), confined_file(b.folder, name)
    return read_json(x) == read_json(y) if name.endswith(".json") else x.read_bytes() == y.read_bytes()


def stored_json(source: Source, name: str) -> JsonObject:
    """Return the JSON object in a file of a checkpoint; empty if there is no such file."""
    return read_if_there(source.folder, name) or {}


def has_chat_template(source: Source) -> bool:
    """Whether a checkpoint has a chat template, in a file of its own or in its tokenizer's config."""
    in_config = stored_json(source, TOKENIZER_CONFIG).get("chat_template")
    return bool(in_config or find_files(source.folder, CHAT_TEMPLATES))


def first_difference(x: object, y: object) -> str:
    """Return the first key of nested mappings by which two values differ, and its values, cut to SHOWN."""
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        key = min((key for key in {*x, *y} if x.get(key) != y.get(key)), key=str)
        return f"{key!r}: {first_difference(x.get(key), y.get(key))}"
    shown = (text if len(text) <= SHOWN else f"{text[:SHOWN]}..." for text in (repr(x), repr(y)))
    return " against ".join(shown)


def processor_difference(a: Source, b: Source) -> str | None:
    """Return what two processors do differently, in words; None: nothing, or settings of one alone.

    Runs no code that a config names. Raises FlexQuantError for settings that a class refuses.
    """
    names = {name for source in (a, b) for name in find_files(source.folder, PROCESSOR)}
    if all(has_same_file(name, a, b) for name in names):
        return None
    first, second = _resolved(a), _resolved(b)
    unlike = (part for part in sorted(first.keys() & second.keys()) if first[part] != second[part])
    return next((f"{part}, {first_difference(first[part], second[part])}" for part in unlike), None)


def processor_parts(source: Source) -> dict[str, JsonObject]:
    """Return the settings that a checkpoint has of a processor and of its parts, as they are written."""
    own = stored_json(source, CONFIG)
    parts = {part: own.pop(part, None) or stored_json(source, file) for part, file in PARTS.items()}
    return {part: settings for part, settings in {"processor": own, **parts}.items() if settings}


def _resolved(source: Source) -> dict[str, JsonObject]:
    """Return the settings of a processor and of its parts, with the defaults of transformers' classes."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    usual = IMAGE_PROCESSOR_MAPPING_NAMES.get(source.config.get("model_type", ""), {}).get("torchvision", "")
    parts = processor_parts(source)
    names = [{CLASS: name} for written in parts.values() if (name := written.get(CLASS))]
    own = parts.pop("processor", {})
    with explained(
        f"the processor in {source.folder} cannot be read",
        "correct its files, or choose another with --processor-from",
        (Exception,),  # a class of transformers can raise anything
    ):
        settings = {part: _of_part(part, stated, usual) for part, stated in parts.items()}
        settings |= {"processor": _of_itself(own)} if own else {}
    return settings | ({"class": names[0]} if names else {})


def _of_part(part: str, settings: JsonObject, usual: str) -> JsonObject:
    """Return what transformers' class makes of a part's settings; ``usual`` is the class of no other name."""
    from transformers import BaseImageProcessor
    from transformers.video_processing_utils import BaseVideoProcessor

    stated, kind = _stated(settings), f"{part}_type"
    name = str(stated.pop(kind, usual)).removesuffix("Fast")
    base = {"image_processor": BaseImageProcessor, "video_processor": BaseVideoProcessor}[part]
    built = (found := _class(name, base)).from_dict(stated)
    keys = {*built.valid_kwargs.__annotations__}
    if found.__module__ == __name__:
        keys |= stated.keys() | vars(found).keys()
    made = built.to_dict()
    values = _stated({key: made.get(key, getattr(built, key, None)) for key in keys - {SQUARE}})
    for old, edge in EDGES.items():
        if old in values:
            values["size"] = values.get("size", {}) | {edge: values.pop(old)}
    content: JsonObject = json.loads(json.dumps(values | {kind: name}))
    return content


def _of_itself(settings: JsonObject) -> JsonObject:
    """Return the settings that a processor's class takes, with defaults; all, if that needs torchvision."""
    from transformers import ProcessorMixin

    stated = _stated(settings)
    of_name = _class(str(settings.get(CLASS)), ProcessorMixin)
    taken = inspect.signature(of_name).parameters.values()
    defaults = {one.name: one.default for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD}
    return _stated({key: stated.get(key, v) for key, v in defaults.items()}) if defaults else stated


def _stated(settings: JsonObject) -> JsonObject:
    absent = (None, inspect.Parameter.empty)
    return {key: value for key, value in settings.items() if key not in NOT_READ and value not in absent}


def _class(name: str, base: type) -> Any:
    """Return transformers' class below ``base`` with this name, or else a plain one of this module."""
    import transformers

    found: Any = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name, None)
    with suppress(AttributeError, ImportError):  # past what stands there for one that needs torchvision
        found = getattr(import_module(found.__module__), found.__name__)
    if isinstance(found, type) and issubclass(found, base):
        return found
    attributes: JsonObject = {}
    if found is not None and (spec := find_spec(found.__module__)) and spec.origin:
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            for part in node.body if isinstance(node, ast.ClassDef) and node.name == name else ():
                if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                    with suppress(ValueError):  # computed
                        attributes[part.targets[0].id] = ast.literal_eval(part.value)
    return type(base)(name, (base,), attributes)
