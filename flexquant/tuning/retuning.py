# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune --from-metrics`: propose a policy for the traffic of a live server.

The times that `flexquant tune` measured say how long the server's passes would have taken in another variant.
They are scaled, for every variant and phase, to the server's own times. The proposal comes with the time that
it would have saved on the observed passes.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexquant.errors import FlexQuantError
from flexquant.measuring.comparison import percent
from flexquant.measuring.machine import describe_command
from flexquant.policy.pass_times import Curve, PassTimes, Time
from flexquant.policy.plans import Plan
from flexquant.policy.rules import Policy
from flexquant.tuning.deciding import Decision
from flexquant.tuning.objectives import Goal, meet, optimise
from flexquant.tuning.policy_file import TuningResult, describe_steps, tuned_policy_document
from flexquant.tuning.samples import PHASES, Samples
from flexquant.tuning.traffic import Traffic

WORTH_CHANGING = 0.01
"""Least share of the passes' time that a proposal saves; one that saves less is not worth a change."""


@dataclass(frozen=True)
class Retuning:
    """A live server's traffic, and measured times of passes."""

    traffic: Traffic
    times: PassTimes
    """Times that `flexquant tune` measured."""
    candidates: Mapping[str, Policy]
    """Variant -> policy that runs every pass in it; the most precise variant comes first."""
    num_layers: int

    def __post_init__(self) -> None:
        """Raise FlexQuantError for a server or candidates whose variants have no measured times."""
        served = {v for cell in self.traffic.cells for v in self._layers(cell.plan)}
        if missing := sorted({*served, *self.candidates} - set(self.times.variants)):
            raise FlexQuantError(
                f"there are no measured times of {', '.join(missing)}, only of "
                f"{', '.join(self.times.variants)}; measure them with 'flexquant tune --variants'"
            )

    def _layers(self, plan: str) -> tuple[str, ...]:
        return Plan.from_name(plan, self.num_layers).layers

    def ratios(self) -> dict[tuple[str, str], float]:
        """Return (variant, ``decode`` or ``prefill``) -> live time / measured time.

        The seconds of a plan are divided among its variants in proportion to their measured times. A variant
        that did not run in a phase gets the ratio of all that did, or 1 if none did.
        """
        live: dict[tuple[str, str], float] = defaultdict(float)
        measured: dict[tuple[str, str], float] = defaultdict(float)
        for (plan, phase), seconds in self.traffic.seconds.items():
            layers = self._layers(plan)
            parts: dict[str, float] = defaultdict(float)
            for cell in self.traffic.cells:
                if (cell.plan, cell.phase) == (plan, phase):
                    for variant in set(layers):
                        share = layers.count(variant) / len(layers)
                        one = self.times.seconds((variant,), phase, cell.size)
                        parts[variant] += cell.passes * share * one
            for variant, part in parts.items():
                where = variant, "decode" if phase == "decode" else "prefill"
                live[where] += seconds * part / sum(parts.values())
                measured[where] += part
        ratios = {}
        for phase in PHASES:
            run = [where for where in measured if where[1] == phase]
            of_all = sum(live[w] for w in run) / sum(measured[w] for w in run) if run else 1.0
            for variant in self.times.variants:
                where = variant, phase
                ratios[where] = live[where] / measured[where] if where in measured else of_all
        return ratios

    def scaled(self) -> PassTimes:
        """Return the measured times, scaled to the live ones."""
        ratios = self.ratios()

        def scale(curves: Mapping[str, Curve], phase: str) -> dict[str, Curve]:
            return {
                variant: {
                    size: Time(*(seconds * ratios[variant, phase] for seconds in measured))
                    for size, measured in curve.items()
                }
                for variant, curve in curves.items()
            }

        return replace(
            self.times,
            decode=scale(self.times.decode, "decode"),
            prefill=scale(self.times.prefill, "prefill"),
            context_seconds=self.times.context_seconds * max(ratios.values()),
        )

    def propose(self, goal: Goal, url: str) -> TuningResult:
        """Return the policy for the traffic; raise FlexQuantError if ``goal`` cannot be met."""
        times = self.scaled()
        samples = Samples()
        for phase, curves in (("decode", times.decode), ("prefill", times.prefill)):
            for variant in self.candidates:
                for size, measured in curves[variant].items():
                    samples.add(variant, phase, size, measured.median)
        names = list(self.candidates)
        if goal.slo is not None:
            decision = meet(samples, names, goal.slo)
        else:
            decision = optimise(samples, names, goal.objective, lambda _: 0)
        origin = {
            **self.times.origin,
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["flexquant", *describe_command()[1:]]),
            "scaled_to": f"{self.traffic.passes} passes of {url}",
        }
        times = replace(times, origin=origin)
        document = tuned_policy_document(decision, self.candidates, times, f"{goal}, on live traffic")
        return TuningResult(document, decision, times, self._notes(decision, times, goal, url))

    def gain(self, decision: Decision, times: PassTimes) -> dict[str, tuple[float, float]]:
        """Return phase -> seconds of the observed passes, (as they were served, as proposed)."""
        found: dict[str, tuple[float, float]] = {}
        for cell in self.traffic.cells:
            chosen = decision.variant("decode" if cell.phase == "decode" else "prefill", cell.size)
            layers = self._layers(cell.plan), (chosen,)
            before, after = (cell.passes * times.seconds(of, cell.phase, cell.size) for of in layers)
            so_far = found.get(cell.phase, (0.0, 0.0))
            found[cell.phase] = so_far[0] + before, so_far[1] + after
        return found

    def _notes(self, decision: Decision, times: PassTimes, goal: Goal, url: str) -> list[str]:
        gain = self.gain(decision, times)
        before, after = (sum(seconds[i] for seconds in gain.values()) for i in (0, 1))
        notes = [
            f"Proposed for {goal}, for the traffic of {url}: {self.traffic.passes} passes under "
            f"{self.traffic.policy}.",
            f"The times are measured ones ({self.times.origin.get('date')}), scaled to the live server's: "
            + ", ".join(
                f"{variant} {phase} x {ratio:.2f}" for (variant, phase), ratio in self.ratios().items()
            )
            + ".",
        ]
        for phase, (served, proposed) in gain.items():
            notes.append(f"{phase}: {served:.3g} s in passes as served, {proposed:.3g} s as proposed.")
        notes += [f"{phase}: {describe_steps(phase, ranges)}." for phase, ranges in decision.ranges.items()]
        saved = 1 - after / before
        if saved < WORTH_CHANGING:
            notes.append(
                f"It would save {percent(max(saved, 0.0))} of the time in passes: not worth a change."
            )
        else:
            notes.append(f"It would save {percent(saved)} of the time in passes; nothing has been applied.")
        if unloaded := [v for v in decision.variants if v not in self.traffic.variants]:
            notes.append(f"The server has not loaded {', '.join(unloaded)}: it would have to be restarted.")
        return notes
