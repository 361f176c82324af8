# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The table and the texts of the comparison of calibration data, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.calibration_table import calibration_table
from benchmarks.calibration_texts import faq, jargon, mix

FAQ = """Chapter 1. Definitions

1.1.\xa0What is this FAQ
long for?

    It answers
    questions.

    All of them.

1.2. Authors

    Many.
"""


def variant(name: str, kl: list[float], group_size: int = 64) -> dict[str, Any]:
    rows = {"nats": [2 + math.log(1.1)] * 2, "kl": kl, "same_top_token": [0.75, 0.85]}
    return {"name": name, "scheme": "w4a16", "group_size": group_size, "rows": {"prose": rows}}


def test_variants_are_compared_row_by_row_with_the_first_of_their_groups() -> None:
    variants = [variant("docs", [0.1, 0.3]), variant("docs", [0.1, 0.1], 32), variant("own", [0.05, 0.2])]
    table = calibration_table({"reference_nats": {"prose": [2.0, 2.0]}, "variants": variants})
    header, _, docs, other, own = table.splitlines()
    assert header == "| calibrated on | prose: perplexity | prose: KL, nats |"
    assert docs == "| docs | +10.0% ± 0.0% | 0.2000 ± 0.1000 |"
    assert other.endswith("| 0.1000 ± 0.0000 |")
    assert own.endswith("| 0.1250 ± 0.0750 (-0.0750 ± 0.0250) |")


def test_questions_and_answers_become_conversations() -> None:
    ((user, assistant),) = faq(FAQ)
    assert user == {"role": "user", "content": "What is this FAQ long for?"}
    assert assistant == {"role": "assistant", "content": "It answers questions.\n\nAll of them."}


def test_prose_is_whole_paragraphs() -> None:
    paragraph = "word " * 50
    assert jargon(f"a heading\n\n{paragraph}\n\n   crlf\n") == paragraph.strip()


def test_the_mix_has_as_much_of_each(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"text": "' + "o" * 3000 + '"}\n')
    pieces = mix("h" * 5000, own)
    assert len(pieces) == 9 and pieces[0] == "h" * 1000 and pieces[2] == "o" * 1000
