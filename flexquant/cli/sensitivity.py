# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Measure what each decoder layer costs in a lower precision, and gains in a higher one.

Every layer runs alone in a lower precision while all others are in the highest, and alone in a higher one
while all others are in the lowest, on one engine. Prompts are prefilled in the highest precision; their
continuations are forced token by token and decoded by the plan. The results are KL divergences to
--reference, or without it to the most precise variant. An interrupted run resumes if it is started again with
the same arguments. 'flexquant search' makes a policy from the results.

example:
  flexquant sensitivity model-merged --text text.txt --variants w8a8,w4a8,w4a16 --samples 16 --output results
"""

from __future__ import annotations

import argparse
import os
from functools import partial

from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_study, save_plot, study_of, tell


def configure(parser: argparse.ArgumentParser) -> None:
    add_study(parser, "sensitivity.json, sensitivity.md and sensitivity.png")


def run(args: argparse.Namespace) -> JsonObject:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from flexquant.checkpoint.output import write_text
    from flexquant.evaluation.report import writable_folder
    from flexquant.layers.report import draw_sensitivity, format_sensitivity_table

    study = study_of(args)
    with writable_folder(args.output, "--output") as folder:
        document = study.measure(folder / "sensitivity.json", overwrite=args.overwrite, progress=tell)
    table = format_sensitivity_table(document)
    print(table)
    write_text(folder / "sensitivity.md", table + "\n")
    save_plot(folder / "sensitivity.png", partial(draw_sensitivity, document))
    return {**document}
