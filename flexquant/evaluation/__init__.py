# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What each policy of a merged checkpoint costs in quality, measured through vLLM's own serving.

    from flexquant.evaluation.evaluating import evaluate
    from flexquant.evaluation.settings import Settings

    document = evaluate("merged", "text.txt", reference="model", settings=Settings(batch_sizes=(8,)))

The way through, in `evaluating`: `settings` (what is asked for), `subject` (open the checkpoint, check the
reference), `text` (draw rows of token ids, read questions), `candidates` (policies by name), `schedule`
(which policy runs at which batch size, and which numbers can be reused). Then, for each run, `engine`
(vLLM in this process), `forced_decoding` (force each row's continuation and score every step, inside vLLM's
sampler, with `token_scores`), `measure` (batches in, scores out), `passes` (what the trace says really ran),
`answers` (greedy answers to real questions). From scores to results: `summary` (perplexity, KL ...),
`weight_bytes` (bytes per weight), `machine` (measured where), `report` and `plot`.
"""
