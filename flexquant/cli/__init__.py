# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The ``flexquant`` command, with one module per subcommand.

A subcommand's module has its name and defines ``HELP``, ``configure(parser)`` and ``run(args) -> dict``.
``run`` prints results for people on stdout and progress on stderr; with ``--json`` the dict is the last line
of stdout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import sys
from collections.abc import Sequence

from flexquant.cli._os_errors import explain_os_error
from flexquant.errors import FlexQuantError, UsageError

SUBCOMMANDS = (
    "build",
    "quantize",
    "convert",
    "merge",
    "inspect",
    "doctor",
    "verify",
    "split",
    "policy",
    "eval",
    "sensitivity",
    "search",
    "tune",
    "simulate",
    "predict",
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flexquant",
        description="Merge quantised variants of one model and choose among them while serving.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in SUBCOMMANDS:
        module = importlib.import_module(f"flexquant.cli.{name}")
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.add_argument(
            "--json", action="store_true", help="print the result as JSON on the last line of stdout"
        )
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 for success, 1 for a failure, or 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    try:
        result = args.run(args)
        if args.json:
            print(json.dumps(result))
        sys.stdout.flush()
        return int(bool(result.get("failed")))
    except FlexQuantError as e:
        print(f"flexquant {args.command}: error: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    except (OSError, RuntimeError) as e:
        _drop_output()
        if isinstance(e, BrokenPipeError) and _reader_is_gone():
            return 1
        if (problem := explain_os_error(e)) is None:
            raise
        print(f"flexquant {args.command}: error: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"flexquant {args.command}: interrupted", file=sys.stderr)
        return 1


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """Discard Python's buffer of standard output, which would otherwise be written again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
