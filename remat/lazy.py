"""Find the names that a module imports only on first use."""

from __future__ import annotations

import ast


def names_for_types(file: str) -> dict[str, str]:
    """Return ``module:name`` for each name that a file imports in its block ``if TYPE_CHECKING``, as a dict by name."""
    # The names are parsed from source text, so that one list serves type checkers and the imports on first use.
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{line.module}:{alias.name}"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
