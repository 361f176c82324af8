# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Generate with a merged checkpoint, without a server: it is a model like any other.

python examples/02_offline.py MERGED_CHECKPOINT
"""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        sys.argv[1],
        max_model_len=1024,
        enforce_eager=True,
        gpu_memory_utilization=0.4,  # also the share of the memory on a CPU
        additional_config={"flexquant": {"policy": "phase"}},
    )
    prompts = ["The capital of France is", "The largest planet of the solar system is"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(output.prompt + output.outputs[0].text)


if __name__ == "__main__":
    main()
