"""Where in the user's code a node comes from, as far as PyTorch recorded it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)')
_TORCH = str(Path(torch.__file__).parent)


def source_line(node: fx.Node) -> str:
    """The line that made a node, as ``"file.py:12 code"``; empty where nothing is recorded.

    The innermost frame outside of PyTorch; the innermost one where all are inside. Where no frame is
    recorded, as for an ``nn.Sequential`` by itself, the modules: ``"Sequential / Linear"``.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return _modules(node)
    found = ""
    lines = trace.splitlines()
    for i in range(len(lines) - 1, -1, -1):
        match = _FRAME.match(lines[i])
        if match is None:
            continue
        code = lines[i + 1].strip() if i + 1 < len(lines) else ""
        name = f"{Path(match['file']).name}:{match['line']}"
        line = f"{name} {code}" if code and not _FRAME.match(lines[i + 1]) else name
        if not match["file"].startswith(_TORCH):
            return line
        found = found or line
    return found


def located(node: fx.Node) -> str:
    """A node for messages: its name, what it calls, and the line that made it."""
    what = node.name if node.op == "placeholder" else f"{node.name} = {node.target}"
    line = source_line(node)
    return f"{what}    # {line}" if line else what


def _modules(node: fx.Node) -> str:
    """The classes of the two innermost modules that a node belongs to."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    kinds = [kind for _, kind in stack.values()][-2:]
    return " / ".join(getattr(k, "__name__", str(k).rpartition(".")[2]) for k in kinds)
