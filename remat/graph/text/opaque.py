"""Stand-ins for objects that a text can name but not hold."""

from __future__ import annotations

import ast
import re
from typing import Any, ClassVar

from remat.graph.text.syntax import MAX_NAME, MAX_STRING, Source, arguments, quoted

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")

#: What a class may be called: its name, with its module before it.
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class Opaque:
    """What is left of an object after it was written as text and read back.

    Attributes:
        kind: class of the original, with its module.
        text: its ``repr``; empty where that would not be the same in every process.
    """

    kind: ClassVar[str]

    def __init__(self, text: str = "") -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text or f"<{self.kind} that the text does not hold>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and (other.kind, other.text) == (self.kind, self.text)

    def __hash__(self) -> int:
        return hash((self.kind, self.text))


def write_opaque(value: Any) -> str:
    """An object that has no form of its own, by its class and its text."""
    kind, text = type(value), repr(value)
    if isinstance(value, Opaque):
        name, text = value.kind, value.text
    else:
        parts = f"{kind.__module__}.{kind.__qualname__}".split(".")
        name = ".".join(re.sub(r"\W", "_", part, flags=re.ASCII) for part in parts)
    if _ADDRESS.search(text) or len(text) > MAX_STRING:
        text = ""
    return f'opaque("{name}"{f", {quoted(text)}" if text else ""})'


def read_opaque(source: Source, node: ast.expr) -> Opaque:
    """An object whose class is called as the original's is; no class is looked up."""
    args = arguments(node, "opaque", 1, 2)
    if args is None:
        raise source.error(node, source.quote(node), 'opaque("module.Class", "text")')
    kind, text, *_ = *map(source.string, args), ""
    if len(kind) > MAX_NAME or not _CLASS.fullmatch(kind):
        raise source.error(node, f"the class {kind[:60]!r}", "the dotted name of a class")
    made: Opaque = type(kind.rpartition(".")[2], (Opaque,), {"kind": kind})(text)
    return made
