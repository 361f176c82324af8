# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merge two quantised checkpoints of one model from Python.

python examples/01_merge.py W8A8_FOLDER W4A16_FOLDER OUTPUT
"""

import sys

from flexquant.merge import merge_checkpoints, verify_checkpoint

w8a8, w4a16, output = sys.argv[1:]
merge_checkpoints({"w8a8": w8a8, "w4a16": w4a16}, output)
verify_checkpoint(output, {"w8a8": w8a8, "w4a16": w4a16})
print(f"{output} holds both, bit for bit")
