# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure what each policy of a merged checkpoint costs in quality, as vLLM serves it.

    from flexquant.evaluation.evaluating import evaluate
    from flexquant.evaluation.inputs import Settings

    document = evaluate("merged", "text.txt", reference="model", settings=Settings(batch_sizes=(8,)))

The modules, in the order in which `evaluating` uses them:

    inputs            sets what to measure; opens the checkpoint, and checks that a model can be the
                      reference; draws rows of token ids from a text, and reads questions
    schedule          plans the runs, and skips runs whose results are known; checks with the trace which
                      passes ran
    measure           runs batches on an engine, and returns scores and greedy answers
    forced_decoding   forces the text's next token inside vLLM's sampler, and scores every step
    scores            computes a token's scores from logits, and perplexity, KL divergence ... from scores
    weight_bytes      counts bytes per weight that a policy holds in memory and that a decode pass reads
    report            writes the results as a table, as JSON and as a plot
"""
