# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Times of single forward passes of an engine in this process, scheduling and sampling included.

Requests come as token ids and leave as token ids, so that tokenisation and HTTP, which another process does
when the model is served, stay out of it.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

MIN_STEPS = 3
MAX_STEPS = 50


class PassTimer:
    """Puts an engine into the state in which each of its steps is one pass of the wanted kind."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._vocabulary = llm.model_config.get_vocab_size()
        self._random = random.Random(0)
        self._decoding: list[str] = []
        self._count = 0

    def prefill(self, tokens: int, seconds: float) -> float:
        """Return the median time, in seconds, of a pass that prefills one prompt of ``tokens`` tokens.

        It is repeated for ``seconds``, at least once.
        """
        times: list[float] = []
        while not times or (sum(times) < seconds and len(times) < MAX_STEPS):
            self._add(tokens, answer=1)
            start = time.perf_counter()
            while self._engine.has_unfinished_requests():
                self._engine.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def begin_decode(self, sequences: int, context: int) -> None:
        """Prefill ``sequences`` prompts of ``context`` tokens, and leave them decoding."""
        self._decoding = [self._add(context) for _ in range(sequences)]
        waiting = set(self._decoding)
        while waiting:
            outputs: list[Any] = self._engine.step()
            waiting -= {output.request_id for output in outputs if output.outputs[0].token_ids}

    def decode(self, sequences: int, seconds: float) -> float:
        """Return the median time, in seconds, of a pass that decodes ``sequences`` sequences.

        They are the first of those that :meth:`begin_decode` began; the others end here. Passes are run for
        ``seconds``, at least MIN_STEPS; one more before them is not counted.
        """
        ended, self._decoding = self._decoding[sequences:], self._decoding[:sequences]
        if ended:
            self._engine.abort_request(ended)
        self._engine.step()
        times: list[float] = []
        while len(times) < MIN_STEPS or (sum(times) < seconds and len(times) < MAX_STEPS):
            start = time.perf_counter()
            self._engine.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def end_decode(self) -> None:
        """End the sequences that are decoding."""
        self._engine.abort_request(self._decoding)
        self._decoding = []
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, tokens: int, answer: int | None = None) -> str:
        """Queue a prompt of random tokens, to be answered with ``answer`` tokens or until it is ended."""
        from vllm import SamplingParams

        self._count += 1
        prompt = self._random.choices(range(self._vocabulary), k=tokens)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)
