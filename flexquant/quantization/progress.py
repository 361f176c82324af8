# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Show the stages of quantising, and discard what llmcompressor, transformers, torch and tqdm print."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

from flexquant.checkpoint.writer import Progress

if TYPE_CHECKING:
    from loguru import Message, Record

MODIFIERS = "llmcompressor.modifiers"
Stage = Callable[..., AbstractContextManager[Progress | None]]
"""Shows a stage to the user, e.g. as a progress bar: called with its title and, if it has one, a ``unit``.

The context lasts as long as the stage, and yields a function of (units done, units in all), or None.
"""


def no_stage(title: str, **unit: str) -> AbstractContextManager[None]:
    return nullcontext()


class _Discard(io.StringIO):
    """A text stream that discards what is written; loggers can keep it, and write to it later."""

    def write(self, text: str, /) -> int:
        return len(text)


@contextmanager
def quiet_libraries(warn: Callable[[str], None]) -> Iterator[None]:
    """Discard the bars, logs and Python warnings of all libraries in the block, but on streams got before.

    ``warn`` receives, once each, warnings of llmcompressor's modifiers, such as GPTQ rounding to nearest.
    """
    discard = _Discard()
    disabled = logging.root.manager.disable
    with redirect_stdout(discard), redirect_stderr(discard), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(disabled, logging.WARNING))
        try:
            # llmcompressor sets up loguru's handler when it is imported; ours replaces it.
            import llmcompressor  # noqa: F401
            from loguru import logger

            said: set[str] = set()

            def pass_on(message: Message) -> None:
                text = message.record["message"]
                if text not in said:
                    said.add(text)
                    warn(text)

            def is_wanted(record: Record) -> bool:
                return str(record["name"]).startswith(MODIFIERS) and record["level"].name != "METRIC"

            logger.remove()
            handler = logger.add(pass_on, level="WARNING", filter=is_wanted, format="{message}")
            try:
                yield
            finally:
                logger.remove(handler)
        finally:
            logging.disable(disabled)
