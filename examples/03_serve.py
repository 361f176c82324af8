# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Serve a merged checkpoint, and talk to it with the openai client, streaming.

python examples/03_serve.py MERGED_CHECKPOINT
"""

import sys

from openai import OpenAI
from vllm_server import vllm_serve

model = sys.argv[1]
with vllm_serve(model, "--max-model-len", "1024", "--enforce-eager") as url:
    stream = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name three rivers in Europe."}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
