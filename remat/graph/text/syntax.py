"""Text into Python's syntax tree, within limits, and refusals that say where.

Nothing here or behind it compiles, imports or evaluates what a text says.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from remat.errors import ProblemError
from remat.graph.collection import without_collection

#: What is read at most. A Llama of 80 layers takes 3 MiB, 19,000 nodes and 800,000 marks.
MAX_BYTES = 16 * 2**20
MAX_NODES = 100_000
#: Signs, spaces and line ends: each can make a kilobyte of syntax tree, however short the text.
MAX_MARKS = 3_000_000
MAX_STRING = 2**16
MAX_DEPTH = 40
MAX_NAME = 256
INTEGERS = range(-(2**63), 2**64)
IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

_MARKS = "\n !%&()*+,-./:;<=>@[^{|~"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")
_TOO_DEEP = "nesting too deep to be read"
_LEVELS = f"at most {MAX_DEPTH} levels"


def check_size(text: str) -> None:
    """Refuses a text that is too large to be read.

    Raises:
        ProblemError: it is.
    """
    marks = sum(map(text.count, _MARKS))
    if len(text) > MAX_BYTES or marks > MAX_MARKS:
        raise ProblemError(
            f"graph text of {len(text)} characters, {marks} of them signs and spaces, is too large; "
            f"expected at most {MAX_BYTES} and {MAX_MARKS}"
        )


class Source:
    """A text with its syntax tree.

    Attributes:
        body: its statements.
    """

    def __init__(self, text: str) -> None:
        """Reads the syntax of a text.

        Raises:
            ProblemError: the text is too large, is no Python syntax, or is nested too deeply.
        """
        if not isinstance(text, str):
            raise ProblemError(f"graph text is a {type(text).__name__}; expected a str")
        text = text.replace("\r\n", "\n")
        check_size(text)
        self._lines = text.split("\n")
        found = _CONTROL.search(text)
        if found is not None:
            before = text[: found.start()].split("\n")
            got = f"the character {found.group()!r}"
            raise _error_at(len(before), len(before[-1]), got, "plain text")
        self.body = self._parse(text)

    @without_collection  # a tree is a million small objects that all stay
    def _parse(self, text: str) -> list[ast.stmt]:
        try:
            return ast.parse(text).body
        except SyntaxError as error:
            line = min(error.lineno or 1, len(self._lines))
            ends = line == len(self._lines) or "never closed" in error.msg
            got = f"what is no Python syntax ({error.msg})"
            expected = f"one statement a line{'; is the text cut off?' if ends else ''}"
            raise _error_at(line, (error.offset or 1) - 1, got, expected) from None
        except ValueError as error:  # lone surrogates
            got = f"text that cannot be read ({error})"
            raise _error_at(1, 0, got, "text in UTF-8") from None
        except (RecursionError, MemoryError):
            raise _error_at(self._deepest(), 0, _TOO_DEEP, _LEVELS) from None

    def _deepest(self) -> int:
        """The first line that is nested too deeply by itself, else 1."""
        for number, line in enumerate(self._lines, 1):
            try:
                ast.parse(line.strip())
            except (SyntaxError, ValueError):
                continue
            except (RecursionError, MemoryError):
                return number
        return 1

    def error(self, at: ast.AST | None, expected: str, got: str = "{}") -> ProblemError:
        """The refusal of what stands at a place of the tree.

        Args:
            at: the place; None is the end of the text.
            expected: what may stand there.
            got: what stands there; ``{}`` is replaced by the text itself.
        """
        if at is None:
            return _error_at(len(self._lines), len(self._lines[-1]), got, expected)
        got = got.replace("{}", self._quote(at))
        return _error_at(getattr(at, "lineno", 1), getattr(at, "col_offset", 0), got, expected)

    def _quote(self, at: ast.AST) -> str:
        """The beginning of what stands at a place of the tree."""
        first, last = getattr(at, "lineno", 1), getattr(at, "end_lineno", None)
        line = self._lines[first - 1].encode(errors="replace")
        end = getattr(at, "end_col_offset", None) if last == first else None
        text = line[getattr(at, "col_offset", 0) : end].decode(errors="replace")
        return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}…'"

    def comment(self, statement: ast.stmt) -> str:
        """The comment behind a statement on its last line, without its mark; empty without one."""
        line = self._lines[(statement.end_lineno or 1) - 1]
        offset = statement.end_col_offset or 0  # in bytes of UTF-8
        rest = line[offset:] if line.isascii() else line.encode()[offset:].decode()
        rest = rest.strip()
        return rest[1:].strip() if rest.startswith("#") else ""

    def constant(self, node: ast.Constant) -> str | int | float | bool | complex | None:
        """A literal of a plain type, within the limits."""
        value = node.value
        if type(value) is int and value not in INTEGERS:
            got = f"an integer of {value.bit_length()} bits"
            raise self.error(node, "a number of 64 bits at most", got)
        if type(value) is str and len(value) > MAX_STRING:
            got = f"a string of {len(value)} characters"
            raise self.error(node, f"{MAX_STRING} characters at most", got)
        if value is None or type(value) in (str, int, float, bool, complex):
            return value  # type: ignore[return-value]
        got = f"a literal of type {type(value).__name__}"
        raise self.error(node, "a string, number or None", got)

    def integer(self, node: ast.expr) -> int:
        """An integer literal, with its sign."""
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, node = -1, node.operand
        if isinstance(node, ast.Constant):
            value = self.constant(node)
            if type(value) is int and sign * value in INTEGERS:
                return sign * value
        raise self.error(node, "an integer")

    def string(self, node: ast.expr) -> str:
        """A string literal."""
        if isinstance(node, ast.Constant):
            value = self.constant(node)
            if type(value) is str:
                return value
        raise self.error(node, "a string in quotes")

    def deeper(self, node: ast.AST, depth: int) -> int:
        """One level more, or a refusal."""
        if depth >= MAX_DEPTH:
            raise self.error(node, _LEVELS, _TOO_DEEP)
        return depth + 1

    def shallow(self, node: ast.expr) -> None:
        """Refuses an expression that is nested too deeply to be gone through by recursion."""
        level: list[ast.AST] = [node]
        for _ in range(MAX_DEPTH):
            level = [child for x in level for child in ast.iter_child_nodes(x)]
            if not level:
                return
        raise self.error(node, _LEVELS, _TOO_DEEP)

    def dotted(self, node: ast.expr) -> str:
        """A dotted name of two to five parts, as written."""
        parts: list[str] = []
        at = node
        while isinstance(at, ast.Attribute) and len(parts) < 4:
            parts.append(at.attr)
            at = at.value
        if not parts or not isinstance(at, ast.Name):
            raise self.error(node, "a dotted name, such as aten.mm.default")
        return ".".join(reversed([*parts, at.id]))


def _error_at(line: int, offset: int, got: str, expected: str) -> ProblemError:
    return ProblemError(f"graph text, line {line}, column {offset + 1}: {got}; expected {expected}")


def arguments(node: ast.AST | None, name: str, least: int, most: int) -> list[ast.expr] | None:
    """The arguments of a call of a bare name, so many of them and all unnamed; None if it is none."""
    if not isinstance(node, ast.Call) or call_name(node) != name or node.keywords:
        return None
    return node.args if least <= len(node.args) <= most else None


def call_name(node: ast.AST | None) -> str | None:
    """``"f"`` for a call ``f(…)`` of a bare name, else None."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return None


def written_call(name: str, parts: Iterable[str]) -> str:
    """The text of a call."""
    return f"{name}({', '.join(parts)})"


def quoted(text: str) -> str:
    """A string literal, in double quotes where it has none inside."""
    written = repr(text)
    return f'"{written[1:-1]}"' if written[0] == "'" and '"' not in text else written
