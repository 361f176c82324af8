# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Define the settings of an evaluation: rows of text, tokens of a row, batch sizes, tokens of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from flexquant.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation. Raises :class:`UsageError` for values that cannot be measured."""

    batch_sizes: tuple[int, ...] = (8, 48)
    """Sequences in a decode pass, one number for each run, sorted and distinct."""
    samples: int = 48
    """Rows of text; a multiple of every batch size, so that each batch is full."""
    prompt_tokens: int = 256
    """Tokens of a row that are prefilled."""
    tokens: int = 64
    """Tokens of a row that are forced after the prompt, and scored."""
    seed: int = 0
    """Seed for drawing rows from the text."""
    answer_tokens: int = 64
    """Largest number of tokens in an answer."""

    def __post_init__(self) -> None:
        for name in ("samples", "prompt_tokens", "tokens", "answer_tokens"):
            _check_positive("--" + name.replace("_", "-"), getattr(self, name))
        if not self.batch_sizes:
            raise UsageError("no batch size is given; give at least one, e.g. --batch-sizes 8,48")
        for batch_size in self.batch_sizes:
            _check_positive("a batch size", batch_size)
            if self.samples % batch_size:
                raise UsageError(
                    f"{self.samples} samples are not a multiple of the batch size {batch_size}; every batch "
                    f"must be full: give e.g. --samples {-(-self.samples // batch_size) * batch_size}"
                )
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, prompt and continuation."""
        return self.prompt_tokens + self.tokens


def _check_positive(name: str, number: int) -> None:
    if number < 1:
        raise UsageError(f"{name} is {number}; give a whole number of at least 1")
