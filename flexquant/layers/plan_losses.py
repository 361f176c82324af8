# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Tell from a file of `flexquant sensitivity` what plans lose, measured or as the sum of their layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from flexquant.errors import UsageError
from flexquant.layers.sensitivity import SCHEMA
from flexquant.policy.plans import Layers, all_in, describe_layers, with_layer

ADVICE = "give the sensitivity.json that 'flexquant sensitivity' wrote for this checkpoint"


class PlanLosses:
    """The KL divergence of decoding to a reference, in nats a token, of plans with two variants."""

    def __init__(
        self, file: Path, high: str, lower: Sequence[str], num_layers: int, sizes: Mapping[str, int]
    ) -> None:
        """Read ``file``; of the variants ``lower``, the first that it has stands for all of them.

        ``sizes`` are the bytes of the checkpoint's safetensors files. Raises UsageError for a file of another
        checkpoint, or without layers that leave ``high``.
        """
        self.file = file
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            found = {key: document[key] for key in ("schema", "layers", "files")}
            variants = [*document["variants"]]
            self._means = {plan: fmean(rows) for plan, rows in document["kl"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(f"{file} cannot be read ({e!r}); {ADVICE}") from e
        if found != {"schema": SCHEMA, "layers": num_layers, "files": dict(sizes)}:
            raise UsageError(f"{file} is of another checkpoint, or by another release; {ADVICE}")
        there = [variant for variant in lower if variant in variants]
        if variants[:1] != [high] or not there:
            raise UsageError(
                f"{file} compares {', '.join(variants)}, and here {high} comes first, then "
                f"{' or '.join(lower)}; {ADVICE} and these variants"
            )
        self._high, self._low = high, there[0]
        self._stands_for = {variant: there[0] for variant in lower if variant not in variants}
        whole = all_in(high, num_layers)
        needed = [whole, *(with_layer(whole, layer, self._low) for layer in range(num_layers))]
        if missing := [text for plan in needed if (text := describe_layers(plan)) not in self._means]:
            raise UsageError(f"{file} lacks {len(missing)} plans, such as {missing[0]}; measure to the end")
        self._whole, *alone = (self._means[describe_layers(plan)] for plan in needed)
        self.costs = [mean - self._whole for mean in alone]
        """What is lost if one layer alone leaves the highest precision, by layer."""

    @property
    def note(self) -> str:
        """What the numbers are."""
        which = "".join(f", {low} in place of {v}" for v, low in self._stands_for.items())
        return (
            f"KL: of decoding by the plan for prompts, nats a token, from {self.file.name}{which}; ~ is the "
            "sum of layers that were measured alone."
        )

    def describe(self, plan: Layers) -> str:
        """Return the loss of a plan as text; ``-`` if the file says nothing of its variants."""
        layers = tuple(self._stands_for.get(variant, variant) for variant in plan)
        if (measured := self._means.get(describe_layers(layers))) is not None:
            return f"{measured:.3g}"
        if not set(layers) <= {self._high, self._low}:
            return "-"
        lost = sum(cost for cost, variant in zip(self.costs, layers, strict=True) if variant != self._high)
        return f"~{self._whole + lost:.3g}"
