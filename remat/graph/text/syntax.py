"""Parse text to Python's syntax tree, and report errors with their position.

No code in ``remat/graph/text`` compiles, imports or evaluates the contents of a text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from remat.errors import ProblemError
from remat.graph.collection import paused_collection

#: Largest number of characters in a text. The text of a Llama with 80 layers has about 3 million.
MAX_BYTES = 16 * 2**20
TOO_DEEP = "graph text is nested too deeply to be read"
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def check_size(text: str) -> None:
    """Raise a ProblemError if the text of a graph exceeds `MAX_BYTES` characters, the limit for reading."""
    if len(text) > MAX_BYTES:
        raise ProblemError(
            f"graph text of {len(text)} characters is too large; expected at most {MAX_BYTES}"
        )


class Source:
    """A text and its syntax tree, with methods that read literals and report errors.

    Attributes:
        body: syntax trees of the statements in the text.
    """

    def __init__(self, text: str) -> None:
        """Parse a text.

        Raises:
            ProblemError: the text is too large or is not Python syntax.
        """
        if not isinstance(text, str):
            raise ProblemError(f"graph text is a {type(text).__name__}; expected a str")
        check_size(text)
        self._text = text
        self._lines = text.splitlines() or [""]
        self.body = self._parse(text)

    @paused_collection()  # garbage collection finds nothing to free among a million new tree nodes
    def _parse(self, text: str) -> list[ast.stmt]:
        try:
            return ast.parse(text).body
        except SyntaxError as error:
            line = min(error.lineno or 1, len(self._lines))
            ends = line == len(self._lines) or "never closed" in error.msg
            got = f"what is no Python syntax ({error.msg})"
            expected = f"one statement a line{'; is the text cut off?' if ends else ''}"
            raise _error_at(line, (error.offset or 1) - 1, got, expected) from None
        except ValueError as error:  # null bytes, lone surrogates
            got = f"text that cannot be read ({error})"
            raise _error_at(1, 0, got, "text in UTF-8") from None
        except (RecursionError, MemoryError):  # CPython's parser raises both for deep nesting
            raise ProblemError(TOO_DEEP) from None

    def error(self, at: ast.AST | None, expected: str, got: str = "{}") -> ProblemError:
        """Return an error that states the position of an expression or statement in the text.

        Args:
            at: syntax tree of the invalid part; None means the end of the text.
            expected: description of the valid forms.
            got: description of the invalid part; ``{}`` in it is replaced by the part's own text.
        """
        if at is None:
            return _error_at(len(self._lines), len(self._lines[-1]), got, expected)
        got = got.replace("{}", self._quote(at))
        return _error_at(getattr(at, "lineno", 1), getattr(at, "col_offset", 0), got, expected)

    def _quote(self, at: ast.AST) -> str:
        """Return the first line of a syntax node's text in quotes, shortened to 60 characters."""
        lines = (ast.get_source_segment(self._text, at) or "").splitlines()
        text = lines[0] if lines else ""
        return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}…'"

    def comment(self, statement: ast.stmt) -> str:
        """Return the comment after a statement, without ``#``; empty if there is none."""
        line = self._lines[(statement.end_lineno or 1) - 1]
        offset = statement.end_col_offset or 0  # in bytes of UTF-8
        rest = line[offset:] if line.isascii() else line.encode()[offset:].decode()
        rest = rest.strip()
        return rest[1:].strip() if rest.startswith("#") else ""

    def literal(self, node: ast.expr, kinds: tuple[type[Any], ...], expected: str) -> Any:
        """Return the value of a Python literal; raise a ProblemError for values of other types than ``kinds``."""
        try:
            value = ast.literal_eval(node)
        except (TypeError, ValueError, MemoryError):
            raise self.error(node, expected) from None
        if type(value) not in kinds:
            raise self.error(node, expected)
        return value

    def integer(self, node: ast.expr) -> int:
        """Return the value of an integer literal, which may be negative; raise a ProblemError for others."""
        return self.literal(node, (int,), "an integer")  # type: ignore[no-any-return]

    def string(self, node: ast.expr) -> str:
        """Return the value of a string literal; raise a ProblemError for other expressions."""
        return self.literal(node, (str,), "a string in quotes")  # type: ignore[no-any-return]

    def dotted(self, node: ast.expr) -> str:
        """Return the text of a dotted name such as ``aten.mm.default``; raise a ProblemError for other expressions."""
        parts: list[str] = []
        at = node
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if not parts or not isinstance(at, ast.Name):
            raise self.error(node, "a dotted name, such as aten.mm.default")
        return ".".join(reversed([*parts, at.id]))


def _error_at(line: int, offset: int, got: str, expected: str) -> ProblemError:
    return ProblemError(f"graph text, line {line}, column {offset + 1}: {got}; expected {expected}")


def arguments(node: ast.AST | None, name: str, least: int, most: int) -> list[ast.expr] | None:
    """Return the arguments of a call ``name(…)`` if their number is from ``least`` to ``most``; None for other expressions."""
    if not isinstance(node, ast.Call) or call_name(node) != name or node.keywords:
        return None
    return node.args if least <= len(node.args) <= most else None


def is_dotted(name: str) -> bool:
    """Return whether a text is an ASCII identifier, or several identifiers joined by dots."""
    return all(map(IDENTIFIER.fullmatch, name.split(".")))


def call_name(node: ast.AST | None) -> str | None:
    """Return the name in a call ``name(…)``; None for other expressions."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return None


def written_call(name: str, parts: Iterable[str]) -> str:
    """Return the text of a call, from the texts of its arguments."""
    return f"{name}({', '.join(parts)})"


def quoted(text: str) -> str:
    """Return the Python literal of a string, in double quotes unless the text contains them."""
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in text else written
