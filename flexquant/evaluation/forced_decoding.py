# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A vLLM logits processor that scores every step of a request, and forces its next token.

So prompts are prefilled and continuations decoded exactly as in serving, while every policy sees the same
tokens. The request carries its instructions (``SamplingParams.extra_args["flexquant_evaluation"]``, the
fields of :class:`ForcedRow`), and the scores go to a file, so the worker can run in any process. The
interface is that of vLLM's V1 model runner (``vllm/v1/sample/logits_processor/interface.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from vllm import SamplingParams

from flexquant.checkpoint.output import staged_file
from flexquant.evaluation.measure import EXTRA_ARGS_KEY, kl_divergence
from flexquant.serving.vllm_api import AdapterLogitsProcessor


class ForcedDecoding(AdapterLogitsProcessor):
    """Gives each request that asks for it a :class:`ForcedRow`; vLLM's adapter calls it with its logits."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> ForcedRow | None:
        options = (params.extra_args or {}).get(EXTRA_ARGS_KEY)
        return None if options is None else ForcedRow(**options)


class ForcedRow:
    """Scores and forces the continuation of one row token by token; writes the scores when it is complete.

    ``scores`` is the ``.npz`` file to write: ``nll`` [tokens] in nats and, with ``compare_with``, ``kl``
    [tokens] in nats and ``same_top`` [tokens]. ``store_in`` is the ``.npy`` file for the log-probabilities,
    fp32 [tokens, vocabulary]; ``compare_with`` is such a file that the reference has written.
    """

    def __init__(
        self, forced: list[int], scores: str, store_in: str | None = None, compare_with: str | None = None
    ) -> None:
        self._forced = forced
        self._scores = scores
        self._store_in = store_in
        self._stored: np.memmap | None = None
        self._reference = np.load(compare_with, mmap_mode="r") if compare_with is not None else None
        self._steps: list[dict[str, torch.Tensor]] = [{} for _ in forced]

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Score ``logits`` [vocabulary] fp32 of the step after ``output_ids``; force the step's token."""
        position = len(output_ids)
        token = self._forced[position]
        log_probs = logits.float().log_softmax(dim=-1)
        step = {"nll": -log_probs[token]}
        if self._reference is not None:
            reference = torch.from_numpy(np.array(self._reference[position])).to(log_probs.device)
            step["kl"] = kl_divergence(reference, log_probs)
            step["same_top"] = reference.argmax() == log_probs.argmax()
        # Store by position: a request that was preempted or prefilled in chunks reaches a position again.
        self._steps[position] = step
        if self._store_in is not None:
            if self._stored is None:
                shape = len(self._forced), log_probs.shape[0]
                self._stored = np.lib.format.open_memmap(self._store_in, "w+", np.float32, shape)
            self._stored[position] = log_probs.cpu().numpy()
        if position == len(self._forced) - 1:
            self._write_scores()
        logits.fill_(-torch.inf)
        logits[token] = 0
        return logits

    def _write_scores(self) -> None:
        columns = {
            name: torch.stack([step[name] for step in self._steps]).cpu().numpy() for name in self._steps[0]
        }
        with staged_file(Path(self._scores)) as partial, partial.open("wb") as file:
            save: Callable[..., None] = np.savez  # its types would make a column the flag allow_pickle
            save(file, **columns)
