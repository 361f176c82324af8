# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The report of a proof, written again after every step: a part for every question, and the steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.proof.claims import FIRST_TOKEN, LIVE, TESTS, Found, Verdict, judge
from benchmarks.proof.outcomes import FAILED, NOT_RUN, PASSED, read_outcomes
from benchmarks.proof.steps import read_steps
from benchmarks.result import markdown
from benchmarks.speed.live_policies import table
from benchmarks.speed.results import CELLS, read_cells, read_header

TESTS_FILE, FIRST_TOKENS, LIVE_POLICIES = "tests.jsonl", "first-token.json", "policies.json"
RIVAL_POLICIES = "policies-vllms-choice.json"
"""As LIVE_POLICIES, of a second server, whose W4A16 has the kernel that stock vLLM takes."""
LARGE = "large"
"""Folder of the cells at the shape of a large model."""
DOCTOR, PROOF = "doctor.txt", "proof.md"


def read_found(folder: Path) -> Found:
    """Return what the steps have written so far."""
    first_tokens, live, rival = (
        read_document(folder / name) for name in (FIRST_TOKENS, LIVE_POLICIES, RIVAL_POLICIES)
    )
    return Found(
        read_outcomes(folder / TESTS_FILE),
        read_cells(folder),
        first_tokens,
        live.get("cells", {}),
        rival.get("cells", {}) if shape_of(rival) == shape_of(live) else {},
        read_cells(folder / LARGE) if (folder / LARGE / CELLS).is_file() else (),
    )


def shape_of(live: Mapping[str, Any]) -> str:
    """Return the name of the synthetic model that a live server had; empty if its results do not tell."""
    return str(live.get("model", "")).partition("/")[0]


def read_document(file: Path) -> dict[str, Any]:
    """Return a step's JSON; empty if there is none yet, or if the step was ended while it wrote."""
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def write_proof(folder: Path, limits: Mapping[str, float]) -> Path:
    """Write the report, which is whole at any moment; ``limits`` are the seconds of every step."""
    header, found = read_header(folder), read_found(folder)
    machine, versions = header["machine"], " ".join(f"{k} {v}" for k, v in header["versions"].items())
    where = f"{machine['gpu'] or 'no GPU'}, {machine['cpu']}, {machine['cores']} cores"
    sections = [
        f"# What was shown on {machine['gpu'] or machine['cpu']}: {header['model']}",
        f"- machine: {where}\n- versions: {versions}\n- commit: {header['commit']}\n"
        f"- command: `{' '.join(header['argv'])}`",
        steps_table(folder, limits),
    ]
    for question, verdicts in judge(found).items():
        sections += [f"## {question}", verdict_table(verdicts), *details(question, found)]
    sections.append(
        "Ratios of paired rounds with their 95 % intervals, wider by what two servers of one checkpoint "
        "differ; `python -m benchmarks report` and this folder write all of them into report.md. Outcomes of "
        f"tests: [{TESTS_FILE}]({TESTS_FILE})."
    )
    if doctor := doctor_says(folder / DOCTOR):
        sections.append(f"## What `flexquant doctor` says\n\n```\n{doctor}\n```")
    file = folder / PROOF
    part = file.with_suffix(".part")
    part.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    os.replace(part, file)
    return file


def steps_table(folder: Path, limits: Mapping[str, float]) -> str:
    taken = read_steps(folder)
    rows = []
    for name, limit in limits.items():
        step = taken.get(name, {"state": "not begun", "seconds": 0, "note": ""})
        note = " ".join(step["note"].split())
        rows.append([name, f"{limit:.0f}", f"{step['seconds']:.0f}", step["state"], note[-300:]])
    rows.append(["together", f"{sum(limits.values()):.0f}", "", "", ""])
    return markdown(["step", "has s", "took s", "", "note"], rows)


def verdict_table(verdicts: list[Verdict]) -> str:
    rows = [[verdict.claim, f"**{verdict.verdict}**", verdict.evidence] for verdict in verdicts]
    return markdown(["claim", "verdict", "evidence"], rows)


def details(question: str, found: Found) -> list[str]:
    """Return what a question's verdicts rest on."""
    if question == FIRST_TOKEN and found.first_tokens:
        return [first_token_table(found.first_tokens)]
    if question == LIVE:
        tables = [
            table({name: {p: list(rounds) for p, rounds in by.items()} for name, by in cells.items()})
            for cells in (found.live, found.rival)
            if any(any(policies.values()) for policies in cells.values())
        ]
        between = "A second server, whose W4A16 has the kernel that stock vLLM takes:"
        return tables[:1] + [text for more in tables[1:] for text in (between, more)]
    if question == TESTS:
        outcomes = found.outcomes
        ran = [outcome for outcome in outcomes.values() if outcome["outcome"] != NOT_RUN]
        passed = sum(outcome["outcome"] == PASSED for outcome in ran)
        failures = [(test, o["reason"]) for test, o in outcomes.items() if o["outcome"] == FAILED]
        return [
            f"tests/gpu: {passed} passed of {len(ran)} with an outcome, of {len(outcomes)}.",
            *(f"- `{test}`:\n\n```\n{reason}\n```" for test, reason in failures),
        ]
    return []


def first_token_table(by_runner: Mapping[str, Any]) -> str:
    """Return each mode's median first token, and what it takes beyond vLLM's own call."""
    rows = []
    for runner, prompts in by_runner.items():
        for prompt, run in prompts.items():
            for mode, times in run["modes"].items():
                beyond = times["first"].get("beyond_vllm")
                said = f"{beyond['ms']:+.3f} ({beyond['low']:+.3f} – {beyond['high']:+.3f})" if beyond else ""
                rows.append([runner, prompt, mode, f"{times['first']['median_ms']:.3f}", said])
    return markdown(["runner", "prompt", "mode", "first token ms", "beyond vLLM's own call, ms"], rows)


def doctor_says(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return "\n".join(line for line in lines if line.startswith(("  ", "! ", "X ")))
