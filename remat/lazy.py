"""Names that a module imports on first use."""

from __future__ import annotations

import ast


def names_for_types(file: str) -> dict[str, str]:
    """Return the names that a source file imports under ``if TYPE_CHECKING``, each as ``module:name``.

    The names are read from the source, so that each is written once, for type checkers and for the
    import on first use.

    Args:
        file: path of the source file, whose first ``if`` is ``if TYPE_CHECKING``.
    """
    with open(file, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{line.module}:{alias.name}"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
