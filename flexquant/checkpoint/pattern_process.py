# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A program: match names against regular expressions, in bounded processor time and memory.

Its arguments are the bounds, in seconds and bytes. It reads ``[expressions, names]`` as JSON. It writes a
line of JSON for each expression as soon as it is done: the indices of the names that it fits, or an error.
"""

import json
import re
import resource
import sys

import regex


def main() -> None:
    for kind, bound in zip((resource.RLIMIT_CPU, resource.RLIMIT_AS), map(int, sys.argv[1:]), strict=True):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    expressions, names = json.load(sys.stdin)
    for expression in expressions:
        found: object
        try:
            # compressed-tensors matches by the first, vLLM by the second.
            compiled = re.compile(expression), regex.compile(expression)
        except (re.error, regex.error, OverflowError, RecursionError) as e:
            found = str(e) or type(e).__name__
        else:
            found = [[i for i, name in enumerate(names) if by.match(name)] for by in compiled][-1]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
