# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What each policy of a merged checkpoint costs in quality, measured through vLLM's own serving.

    from flexquant.evaluation.evaluating import evaluate
    from flexquant.evaluation.settings import Settings

    document = evaluate("merged", "text.txt", reference="model", settings=Settings(batch_sizes=(8,)))

The modules, in the order in which `evaluating` uses them:

    settings          how many rows of how many tokens are measured, at which batch sizes
    subject           opens the checkpoint, and checks that a model can be its reference
    text              draws rows of token ids from a text, and reads questions
    schedule          which policy runs at which batch size, and whose numbers can be reused; afterwards, from
                      the trace, which passes really ran
    measure           puts batches through an engine, and returns scores and greedy answers
    forced_decoding   inside vLLM's sampler: forces the text's next token and scores every step
    scores            from logits to the scores of a token, and from those to perplexity, KL divergence ...
    weight_bytes      bytes per weight that a policy holds in memory, and that a decode pass reads
    report, plot      the results as a table, as JSON and as a plot
"""
