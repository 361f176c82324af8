# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Which questions is a 16-bit model sure of, and what does the merged one answer to all of them?

    python -m benchmarks.demo_questions MODEL MERGED --output benchmarks/results/demo-questions.json

Greedy answers of at most 28 tokens. ``margin`` is the smallest lead, in nats, of a token over the next likely
one among the first twelve of the 16-bit answer. `examples/demo.py` asks some with a large one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.origin import origin
from examples.demo import first_sentence
from flexquant.measuring.engine import engine

TOKENS, FIRST = 28, 12
QUESTIONS = """
What is the capital of France?
Which city is the capital of France? Answer in one sentence.
What is the capital of Japan?
What is the capital of Italy?
What is the capital of Germany?
How many days are there in a week?
Which gas do plants take in from the air?
Which ocean lies between Europe and America?
Which language is spoken in Brazil?
Who was the first person to walk on the Moon?
What is photosynthesis? Answer in one sentence.
What does the heart do?
What is the largest planet in the solar system?
Who wrote Romeo and Juliet?
At what temperature does water boil?
What is water made of?
Name the three primary colours.
Why is the sky blue? Answer in one sentence.
What do bees make?
How do you say "good morning" in French?
What is the opposite of hot?
How many legs does a spider have?
What is gravity? Answer in one sentence.
Name three fruits.
What is the fastest animal on land?
Who painted the Mona Lisa?
What is the chemical symbol for water?
What is the chemical formula of water?
How many continents are there?
What is the largest ocean on Earth?
What is the tallest mountain in the world?
Who discovered gravity?
What is the boiling point of water in degrees Celsius?
What is 2 + 2?
What planet do we live on?
What is the closest star to the Earth?
Which planet is known as the Red Planet?
What is the currency of Japan?
Who developed the theory of relativity?
What is the largest mammal?
What do cows drink?
What is the color of the sky?
What is the main ingredient of bread?
Which organ pumps blood through the body?
What is DNA?
What is a noun?
What is the freezing point of water?
Who was the first president of the United States?
In which country is the Eiffel Tower?
In which city is the Eiffel Tower?
What is the longest river in the world?
Which country has the largest population?
What is the capital of China?
What is the capital of Russia?
What is the capital of Spain?
What is the capital of Canada?
What is the capital of Australia?
What is the capital of Egypt?
What is the capital of India?
What is the capital of England?
What is the capital of Brazil?
What is the capital of Mexico?
What is the capital of Greece?
How many hours are there in a day?
How many months are there in a year?
How many minutes are there in an hour?
How many seconds are there in a minute?
What is the chemical formula of table salt?
What is the chemical symbol of gold?
What is the chemical formula of carbon dioxide?
Who invented the telephone?
Who invented the light bulb?
Who wrote Hamlet?
Who was Albert Einstein?
What is the speed of light?
What is the largest country in the world?
What is the largest continent?
What is the smallest planet in the solar system?
What is the hardest natural substance?
What is the largest desert in the world?
Which language is spoken in Germany?
Which language is spoken in Japan?
In which year did World War II end?
What is the study of living things called?
What is the process by which plants make food?
What is the center of an atom called?
What is the currency of the United States?
What is the currency of the United Kingdom?
What is the square root of 16?
What is ice made of?
What is the name of our galaxy?
"""
"""The questions, one a line."""


def ask(folder: Path, **options: Any) -> list[tuple[str, float]]:
    """Return the first sentence of each answer, and its margin."""
    from vllm import SamplingParams

    conversations: list[Any] = [[{"role": "user", "content": q}] for q in QUESTIONS.split("\n") if q]
    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2)
    answers = []
    with engine(folder, max_model_len=512, **options) as llm:
        for reply in llm.chat(conversations, parameters, use_tqdm=False):
            output = reply.outputs[0]
            leads = []
            for step in output.logprobs or []:
                best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
                leads.append(best - second)
            answers.append((first_sentence(output.text), min(leads[:FIRST])))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the 16-bit model")
    parser.add_argument("merged", type=Path, help="its merged checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--dtype", default="float32", help="of the 16-bit model's engine (%(default)s)")
    args = parser.parse_args()
    reference = ask(args.model, dtype=args.dtype)
    merged = ask(args.merged, flexquant={"policy": "phase"})
    answers = [
        {"question": question, "margin": round(margin, 3), "16 bit": text, "merged": other}
        for question, (text, margin), (other, _) in zip(
            (q for q in QUESTIONS.split("\n") if q), reference, merged, strict=True
        )
    ]
    result = {
        **origin("benchmarks.demo_questions"),
        "answers": sorted(answers, key=lambda answer: -float(answer["margin"])),
    }
    args.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
