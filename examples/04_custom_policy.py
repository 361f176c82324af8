# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write a policy of your own, look at its table, and see which plans its passes took.

python examples/04_custom_policy.py MERGED_CHECKPOINT
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from vllm import LLM, SamplingParams

POLICY = """
schema: flexquant.policy/v1
description: W4A16 for short prompts too, and up to batch size 8 in decode with the outer layers in W8A8
rules:
  - when: {phase: [prefill, mixed], tokens: {max: 16}}
    use: w4a16
  - when: {phase: decode, batch_size: {max: 8}}
    use: {default: w4a16, layers: {"0-1": w8a8, "-1": w8a8}}
  - use: w8a8
"""


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    policy, trace = folder / "mine.yaml", folder / "routes.jsonl"
    policy.write_text(POLICY)
    llm = LLM(
        sys.argv[1],
        max_model_len=1024,
        enforce_eager=True,
        gpu_memory_utilization=0.4,  # also the share of the memory on a CPU
        additional_config={"flexquant": {"policy": str(policy), "trace": str(trace)}},
    )
    llm.generate(["Hello, my name is"], SamplingParams(temperature=0, max_tokens=8))
    llm.generate(["An apple a day"] * 12, SamplingParams(temperature=0, max_tokens=8))
    passes = [json.loads(line) for line in trace.read_text().splitlines()[1:]]
    for (phase, plan), count in Counter((p["phase"], p["plan"]) for p in passes).items():
        print(f"{phase:<8} {plan:<24} {count} passes")


if __name__ == "__main__":
    main()
