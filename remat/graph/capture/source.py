"""Locate the line of the user's code that produced a node, as far as PyTorch recorded it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

#: Pattern of the prefix that stands for the model in module paths of Dynamo: ``L['self']`` in
#: ``L['self'].layers.0``, or ``G['model']`` for a global variable.
_MODEL = re.compile(r"^[LG]\['\w+'\]\.?")
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)')
#: Path prefixes of frames that are not the user's: PyTorch, generated code and frozen modules.
_NOT_USERS = (str(Path(torch.__file__).parent), "<eval_with_key>", "<frozen ")


def user_frame(frames: Iterable[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame in the user's code, or the innermost of all if none is the user's."""
    first: FrameSummary | None = None
    for frame in frames:
        if not frame.filename.startswith(_NOT_USERS):
            return frame
        first = first or frame
    return first


def frames_of(trace: str) -> Iterator[FrameSummary]:
    """Yield the frames in the text of a stack trace, innermost first."""
    lines = trace.splitlines()
    code = ""
    # A trace lists the innermost frame last, and each frame's code on the line after it.
    for line in reversed(lines):
        match = _FRAME.match(line)
        if match is None:
            code = line.strip()
            continue
        # The trace holds the code, so the file, which may have changed, is not read.
        yield FrameSummary(match["file"], int(match["line"]), "", lookup_line=False, line=code)
        code = ""


def source_line(node: fx.Node) -> str:
    """Return the user's line that produced a node, formatted as ``"file.py:12 code"``.

    If PyTorch recorded no line, the text names the node's innermost modules, such as ``"Sequential / Linear"``.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        # An `nn.Sequential` that is called by itself leaves no user line.
        return _modules(node)
    frame = user_frame(frames_of(trace))
    if frame is None:
        return ""
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}".rstrip()


def located(node: fx.Node) -> str:
    """Describe a node for messages: its name, operator and the user's line that produced it."""
    text = node.name if node.op == "placeholder" else f"{node.name} = {node.target}"
    line = source_line(node)
    return f"{text}    # {line}" if line else text


def module_path(node: fx.Node) -> str:
    """Return the path of a node's innermost module, such as ``"model.layers.0.mlp"``; empty if none is recorded."""
    stack = _module_stack(node)
    return _MODEL.sub("", str(stack[-1][0])) if stack else ""


def enclosing_modules(path: str) -> list[str]:
    """Return the prefixes of a module's path, outermost first: ``layers``, ``layers.0``, ``layers.0.mlp``."""
    parts = path.split(".") if path else []
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def _module_stack(node: fx.Node) -> list[tuple[str, object]]:
    """Return path and class of each module that a node belongs to, outermost first."""
    # AOTAutograd stores the forward module stack on backward nodes under a key of its own.
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return list(stack.values())


def _modules(node: fx.Node) -> str:
    """Return the class names of a node's two innermost modules, joined by `` / ``."""
    kinds = [kind for _, kind in _module_stack(node)][-2:]
    return " / ".join(getattr(k, "__name__", str(k).rpartition(".")[2]) for k in kinds)
