"""AOTAutograd's descriptors of inputs and outputs, as calls of their classes."""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import Any

from remat import torch_compat
from remat.graph.text.opaque import read_opaque, write_opaque
from remat.graph.text.syntax import Source, call_name, quoted


@functools.cache
def _classes() -> dict[str, type[Any]]:
    """Every kind of descriptor, by the name of its class."""
    roots = (torch_compat.descriptors.AOTInput, torch_compat.descriptors.AOTOutput)
    return {
        name: kind
        for name, kind in sorted(vars(torch_compat.descriptors).items())
        if isinstance(kind, type) and issubclass(kind, roots) and dataclasses.is_dataclass(kind)
    }


def write_descriptor(desc: Any) -> str:
    """A descriptor as a call; a class of somebody else's as an opaque object."""
    if isinstance(desc, (int, str)):
        return quoted(desc) if isinstance(desc, str) else str(desc)
    kind = type(desc)
    if _classes().get(kind.__name__) is not kind:
        return write_opaque(desc)
    values = (getattr(desc, f.name) for f in dataclasses.fields(kind))
    return f"{kind.__name__}({', '.join(map(write_descriptor, values))})"


def read_descriptor(source: Source, node: ast.expr, depth: int = 0) -> Any:
    """A descriptor, built from literals and other descriptors only."""
    depth = source.deeper(node, depth)
    if call_name(node) == "opaque":
        return read_opaque(source, node)
    kind = _classes().get(call_name(node) or "")
    if kind is None or not isinstance(node, ast.Call) or node.keywords:
        raise source.error(
            node, source.quote(node), "a descriptor of AOTAutograd, such as PlainAOTInput(0)"
        )
    fields = dataclasses.fields(kind)
    if len(node.args) != len(fields):
        raise source.error(
            node,
            f"{len(node.args)} values for {kind.__name__}",
            f"{len(fields)}: {', '.join(f.name for f in fields) or 'none'}",
        )
    values: list[Any] = []
    for field, value in zip(fields, node.args, strict=True):
        if field.type in (int, "int"):
            values.append(source.integer(value))
        elif field.type in (str, "str"):
            values.append(source.string(value))
        else:
            values.append(read_descriptor(source, value, depth))
    try:
        return kind(*values)
    except AssertionError as error:  # the classes check what they are given
        raise source.error(node, f"{kind.__name__} of what it cannot be of", str(error)) from error
