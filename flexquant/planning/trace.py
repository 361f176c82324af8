# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read and write request traces: JSONL files with one request a line, in the order of arrival.

    {"arrival": 0.25, "input": 512, "output": 128}

``arrival`` is in seconds from any origin. ``input`` and ``output`` are the numbers of tokens of the prompt
and of the answer; an answer never ends earlier.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from typing import NamedTuple

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.yaml_document import read_named, show
from flexquant.errors import FlexQuantError

PACKAGE = "flexquant.planning.traces"
SUFFIX = ".jsonl"
KEYS = ("arrival", "input", "output")
LATEST = sys.float_info.max


class Request(NamedTuple):
    """One request of a trace."""

    arrival: float
    """Arrival in seconds, from any origin."""
    input: int
    """Tokens of the prompt."""
    output: int
    """Tokens of the answer."""


def read_trace(name_or_path: str) -> list[Request]:
    """Read a built-in trace by name, or a JSONL file by path; blank lines are skipped.

    Raises FlexQuantError, with file and line, for a line that is no request, an arrival before the one above
    it, and a trace without requests.
    """
    content, source = read_named(name_or_path, PACKAGE, "trace", (SUFFIX,))
    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        raise FlexQuantError(f"{source}: not UTF-8 text ({e.reason}); save it as UTF-8") from e
    requests: list[Request] = []
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        request = _read_request(line, place)
        if requests and request.arrival < requests[-1].arrival:
            raise FlexQuantError(
                f"{place}: arrival is {request.arrival:g}, before the {requests[-1].arrival:g} of the "
                "request above it; sort the lines by arrival"
            )
        requests.append(request)
    if not requests:
        raise FlexQuantError(f"{source}: the trace is empty; write one request a line, e.g. {_example()}")
    return requests


def write_trace(requests: Iterable[Request]) -> str:
    """Return the text of a trace, which :func:`read_trace` reads back."""
    return "".join(json.dumps(request._asdict()) + "\n" for request in requests)


def _read_request(line: str, place: str) -> Request:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise FlexQuantError(f"{place}: not valid JSON ({e}); write e.g. {_example()}") from e
    if not isinstance(data, dict):
        raise FlexQuantError(f"{place}: is {show(data)}; write an object such as {_example()}")
    for key in data:
        if key not in KEYS:
            raise FlexQuantError(f"{place}: {key} is an unknown key; the allowed ones are {', '.join(KEYS)}")
    for key in KEYS:
        if key not in data:
            raise FlexQuantError(f"{place}: lacks the key '{key}'; write e.g. {_example()}")
    arrival = data["arrival"]
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival <= LATEST:
        raise FlexQuantError(f"{place}: arrival is {show(arrival)}; give seconds, a number of at least 0")
    return Request(float(arrival), _tokens(data, "input", place), _tokens(data, "output", place))


def _tokens(data: JsonObject, key: str, place: str) -> int:
    tokens = data[key]
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise FlexQuantError(f"{place}: {key} is {show(tokens)}; give tokens, a whole number of at least 1")
    return tokens


def _example() -> str:
    return json.dumps(Request(0.25, 512, 128)._asdict())
