# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`python -m benchmarks.generation`: what do whole answers lose under each policy?

task           a question, examples of how it is answered, and what an answer has to hold; as a prompt
arithmetic     sums, differences and products worked out in steps, comparisons, counting
instructions   answers in a form that can be checked
long           open questions with long answers
answering      every policy answers, all of a merged checkpoint's on one engine
intervals      of shares, of differences between shares on the same tasks, and of medians
results        from answers to the document that is written, and its tables
"""
