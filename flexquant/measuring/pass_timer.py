# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Time forward passes of a running engine from the process that requests them.

The engine core runs in a process of its own, as under `vllm serve`, so the times include scheduling, sampling
and sending tokens between the processes. Requests and answers are token ids, so the times exclude
tokenisation and HTTP.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

MIN_STEPS = 3
MAX_STEPS = 50


class PassRunner:
    """Has an engine run passes of one kind, and leaves it idle."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._vocabulary = llm.model_config.get_vocab_size()
        self._random = random.Random(0)
        self._count = 0

    def prefill(self, tokens: int, seconds: float) -> float:
        """Return the median time, in seconds, of a pass that prefills one prompt of ``tokens`` tokens.

        The pass is repeated for ``seconds``, at least once and at most MAX_STEPS times.
        """
        times: list[float] = []
        while not times or (sum(times) < seconds and len(times) < MAX_STEPS):
            prompt = self._prompt(tokens)
            start = time.perf_counter()
            self._add(prompt, answer=1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def decode(self, sequences: int, context: int, seconds: float) -> float:
        """Return the mean time, in seconds, of successive passes that decode ``sequences`` sequences.

        Each sequence has a prompt of ``context`` tokens. Passes are counted for ``seconds``, at least
        MIN_STEPS and at most MAX_STEPS, from the second pass in which all sequences decode.
        """
        requests = [self._add(self._prompt(context)) for _ in range(sequences)]
        waiting = set(requests)
        while waiting:
            waiting -= {output.request_id for output in self._step() if output.outputs[0].token_ids}
        self._step()
        start = time.perf_counter()
        steps = 0
        while steps < MIN_STEPS or (time.perf_counter() - start < seconds and steps < MAX_STEPS):
            self._step()
            steps += 1
        elapsed = time.perf_counter() - start
        self._engine.abort_request(requests)
        self._engine.reset_prefix_cache()  # returns once the running pass has ended
        return elapsed / steps

    def _step(self) -> list[RequestOutput]:
        """Run the engine until a pass yields outputs, and return them."""
        while not (outputs := self._engine.step()):
            continue
        return cast("list[RequestOutput]", outputs)

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._vocabulary), k=tokens)

    def _add(self, prompt: list[int], answer: int | None = None) -> str:
        """Queue a prompt for an answer of ``answer`` tokens (None: until it is aborted); return its id."""
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)
