# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The imports of a file, for tests of what may import what."""

import ast
from collections.abc import Iterator


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every absolute import, at the top or inside; a module has no name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
