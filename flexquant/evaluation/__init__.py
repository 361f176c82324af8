# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Start engines, and measure what each policy of a merged checkpoint costs in quality, as vLLM serves it.

    from flexquant.evaluation.evaluating import evaluate
    from flexquant.evaluation.inputs import Settings

    document = evaluate("merged", "text.txt", reference="model", settings=Settings(batch_sizes=(8,)))

README.md says which module does what, in the order of the data.
"""
