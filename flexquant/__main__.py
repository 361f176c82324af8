# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
import sys

from flexquant.cli import main

sys.exit(main())
