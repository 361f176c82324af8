# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read documents with pydantic models; messages name file and line, what is allowed and what to do.

A mapping of a document is a :class:`Section`, whose fields are the keys. A field gives with :func:`says` the
advice for a wrong value. The same models make the JSON Schema for editors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from flexquant.documents.yaml_document import Document, KeyPath, show


class Problem(ValueError):
    """A validator's error; ``at`` is the path from the validated value to the wrong place."""

    def __init__(self, text: str, at: Sequence[str | int] = ()) -> None:
        super().__init__(text)
        self.at = tuple(at)


def says(advice: str, whole: bool = False) -> WrapValidator:
    """Refuse a wrong value with the message ``is VALUE; ADVICE``.

    A problem inside of a value gets its own message, unless the advice is for the ``whole`` value. Null is
    always wrong, as a key with a default can be left out.
    """

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            if value is not None:
                return handler(value)
        except ValidationError as e:
            own = [error for error in e.errors() if error["type"] == "value_error"]
            if not whole and (own or any(error["loc"] for error in e.errors())):
                raise
        raise Problem(f"is {show(value)}; {advice}")

    return WrapValidator(validate)


POSITIVE = "give a whole number of at least 1"
Positive = Annotated[int, Field(strict=True, ge=1), says(POSITIVE)]
"""A whole number of at least 1."""
OptionalPositive = Annotated[Positive | SkipJsonSchema[None], says(POSITIVE)]
"""The same, for a field whose default is None."""
Number = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True), says("give a number of at least 0")]
"""A number of at least 0."""
Text = Annotated[str, Field(strict=True), says("give text, in quotes if need be")]
KEYS_AS_GIVEN = {"additionalProperties": False}
"""JSON Schema of a mapping whose keys must all match the pattern of its keys."""


class Section(BaseModel):
    """A mapping of a document, with all required keys and no unknown ones; excluded fields are no keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_by_name=True
    )

    refused: ClassVar[Mapping[str, str]] = {}
    """Unknown keys that are refused with a reason of their own, unless they are null."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: object) -> object:
        fields = {field.alias or name: field for name, field in cls.model_fields.items() if not field.exclude}
        required = [key for key, field in fields.items() if field.is_required()]
        allowed = ", ".join([*required, *(key for key in fields if key not in required)])
        if not isinstance(value, dict):
            raise Problem(f"is {show(value)}; give a mapping with the keys {allowed}")
        for key in value.keys() & cls.refused.keys():
            if value[key] is not None:
                raise Problem(f"is refused: {cls.refused[key]}", [key])
        for key in value:
            if key not in fields:
                raise Problem(f"is an unknown key; the allowed ones here are {allowed}", [key])
        for key in required:
            if key not in value:
                raise Problem(f"lacks the key '{key}'; add it (allowed here: {allowed})")
        return value


S = TypeVar("S", bound=Section)


def read_section(section: type[S], document: Document, path: KeyPath = ()) -> S:
    """Return the section at ``path`` of a document; raise FlexQuantError for the first problem in it."""
    value = document.data
    for part in path:
        value = value[part]
    try:
        return section.model_validate(value)
    except ValidationError as e:
        error = e.errors(include_url=False)[0]
        found = error.get("ctx", {}).get("error")
        at = found.at if isinstance(found, Problem) else ()
        document.fail((*path, *_path_in(value, error["loc"]), *at), str(found or error["msg"]))


def _path_in(value: object, loc: Sequence[str | int]) -> KeyPath:
    """Return the keys and indices in a location of pydantic, which also names branches of unions."""
    path: list[str | int] = []
    for part in loc:
        held = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(held, dict) and part in held:
            value = held[part]
            path.append(part)
    return tuple(path)
