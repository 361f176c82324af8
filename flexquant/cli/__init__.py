# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The ``flexquant`` command.

Each subcommand has a function that adds its options, and one that runs it. The docstring of the latter, or of
its module if it has none, is what ``--help`` shows, and its first line stands in the list of subcommands.
Results for people go to stdout and progress to stderr; with ``--json`` the dict that was returned is the last
line of stdout.
"""

import argparse
import codecs
import errno
import inspect
import io
import json
import locale
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import flexquant
from flexquant.checkpoint.folder import find_model
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import DISK_FULL
from flexquant.cli import checkpoint, policy, quality, quantize, tune
from flexquant.cli._arguments import add_json
from flexquant.errors import FlexQuantError, UsageError

Configure = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], JsonObject]

SUBCOMMANDS: dict[str, tuple[Configure, Run]] = {
    "build": (quantize.configure_build, quantize.build),
    "quantize": (quantize.configure_quantize, quantize.quantize),
    "convert": (checkpoint.configure_convert, checkpoint.convert),
    "merge": (checkpoint.configure_merge, checkpoint.merge),
    "inspect": (checkpoint.configure_inspect, checkpoint.inspect),
    "doctor": (checkpoint.configure_doctor, checkpoint.doctor),
    "verify": (checkpoint.configure_verify, checkpoint.verify),
    "split": (checkpoint.configure_split, checkpoint.split),
    "policy": (policy.configure, policy.run),
    "eval": (quality.configure_eval, quality.eval_policies),
    "sensitivity": (quality.configure_sensitivity, quality.sensitivity),
    "search": (quality.configure_search, quality.search),
    "tune": (tune.configure_tune, tune.tune),
    "fit": (tune.configure_fit, tune.fit),
    "advise": (tune.configure_advise, tune.advise),
}
MODELS = ("folder", "model", "reference")
"""Arguments for which a model's id on the Hugging Face Hub can stand in the place of its folder."""
PACKAGE = Path(flexquant.__file__).parent
# Error about a path -> what to do about it.
ADVICE = dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), "choose another name") | {
    errno.EACCES: "give a path that you may read and write, or change its permissions",
    errno.EPERM: "give a path that you may read and write, or change its permissions",
    errno.EROFS: "its file system is read-only, so choose another folder",
    errno.ENOENT: "correct the path, or make the folder first",
    errno.ENOTDIR: "a part of the path is a file, so choose another folder",
    errno.EISDIR: "it is a folder, so give the path of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}
FREE_SOME = "free some space, or write to another disk; TMPDIR says where temporary files go"
NO_DOCSTRINGS = "; unset PYTHONOPTIMIZE, since transformers does not work without docstrings"
ONLY_ASCII = "Python reads files as ASCII here, with which PyTorch does not work; set PYTHONUTF8=1"


def build_parser() -> argparse.ArgumentParser:
    purpose = "Merge quantised variants of one model and choose among them while serving."
    parser = argparse.ArgumentParser(prog="flexquant", description=purpose)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (configure, run) in SUBCOMMANDS.items():
        description = inspect.getdoc(run) or inspect.getdoc(inspect.getmodule(run)) or ""
        subparser = subparsers.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_json(subparser)
        configure(subparser)
        subparser.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0 for success, 1 for a failure, or 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    if codecs.lookup(locale.getpreferredencoding()).name == "ascii":
        print(f"flexquant {args.command}: error: {ONLY_ASCII}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the locale cannot write ends nothing
    try:
        for name in MODELS:
            if value := getattr(args, name, None):
                setattr(args, name, type(value)(find_model(value)))
        result = args.run(args)
        if args.json:
            print(json.dumps(result))
        sys.stdout.flush()
        return int(bool(result.get("failed")))
    except FlexQuantError as e:
        advice = NO_DOCSTRINGS if sys.flags.optimize > 1 else ""
        print(f"flexquant {args.command}: error: {e}{advice}", file=sys.stderr)
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


def explain_os_error(error: OSError | RuntimeError) -> str | None:
    """Return a sentence on a file that could not be read or written: the path, what failed, what to do.

    None for an error that no path of the user has caused: one about a file of this package, a connection or
    a process. Some libraries report a full disk in exceptions of their own, such as torch.distributed's.
    """
    if not isinstance(error, OSError):
        return f"the disk is full ({error}); {FREE_SOME}" if os.strerror(errno.ENOSPC) in str(error) else None
    path = None if error.filename is None else os.fsdecode(error.filename)
    if path is not None and Path(path).is_relative_to(PACKAGE):
        return None
    if error.errno in DISK_FULL:
        where = f" while writing {path}" if path else ""
        return f"the disk is full{where} ({error.strerror}); {FREE_SOME}"
    if path is None and "temporary directory" in str(error):
        return f"{error.strerror}; set TMPDIR to a folder that can be written"
    if path is None:
        return None
    advice = ADVICE.get(error.errno or 0, "check the path and its disk")
    return f"cannot use {path}: {error.strerror}; {advice}"
