# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Write merge/PUBLISHERS.md: python -m tests.publishers"""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.publishers.outcomes import PAGE, outcome_of, page
from tests.publishers.shapes import SHAPES

if __name__ == "__main__":
    outcomes = {}
    for shape in SHAPES:
        with TemporaryDirectory() as folder:
            outcomes[shape.name] = outcome_of(shape, Path(folder))
        print(f"{shape.name}: {outcomes[shape.name]}", flush=True)
    PAGE.write_text(page(outcomes), encoding="utf-8")
