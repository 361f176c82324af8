# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Where a run writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flexquant.errors import UsageError


@dataclass(frozen=True)
class Output:
    """Files side by side."""

    policy: Path
    overwrite: bool = False
    """Whether the policy and the plots may be there already."""

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for files that cannot or must not be written."""
        if self.policy.suffix not in (".yaml", ".yml"):
            raise UsageError(f"the output '{self.policy}' is no policy file; end its name in .yaml")
        for file in (self.policy, *self.plots):
            if file.exists() and not self.overwrite:
                raise UsageError(f"{file} exists; give another --output, or --overwrite to replace it")
        if not self.policy.parent.is_dir():
            raise UsageError(f"the folder of {self.policy} does not exist; make it first")

    @property
    def plots(self) -> list[Path]:
        return [self.policy.with_suffix(ending) for ending in (".png", ".svg")]

    @property
    def samples(self) -> Path:
        """What an unfinished run has measured."""
        return self.policy.with_name(self.policy.name + ".samples.json")
