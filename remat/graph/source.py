"""Where in the user's code a node comes from, as far as PyTorch recorded it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import FrameSummary

import torch
from torch import fx

#: The model itself in the paths that Dynamo records, ``"L['self'].layers.0"``.
_MODEL = re.compile(r"^L\['\w+'\]\.?")
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+)')
#: What the files of frames that are not the user's begin with: PyTorch, and code that is generated or frozen.
_NOT_USERS = (str(Path(torch.__file__).parent), "<eval_with_key>", "<frozen ")


def user_frame(frames: Iterable[FrameSummary]) -> FrameSummary | None:
    """The user's innermost frame; the innermost one if none is the user's; None if there is no frame.

    Args:
        frames: the frames, innermost first.
    """
    first: FrameSummary | None = None
    for frame in frames:
        if not frame.filename.startswith(_NOT_USERS):
            return frame
        first = first or frame
    return first


def frames_of(trace: str) -> Iterator[FrameSummary]:
    """The frames in the text of a stack trace, innermost first."""
    lines = trace.splitlines()
    code = ""
    for line in reversed(lines):
        match = _FRAME.match(line)
        if match is None:
            code = line.strip()
            continue
        yield FrameSummary(match["file"], int(match["line"]), "", lookup_line=False, line=code)
        code = ""


def source_line(node: fx.Node) -> str:
    """The line that made a node, as ``"file.py:12 code"``; empty if nothing is recorded.

    It is that of `user_frame`. Where no frame is recorded, as for an ``nn.Sequential`` by itself, the modules:
    ``"Sequential / Linear"``.
    """
    trace = node.meta.get("stack_trace")
    if not trace:
        return _modules(node)
    frame = user_frame(frames_of(trace))
    if frame is None:
        return ""
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}".rstrip()


def located(node: fx.Node) -> str:
    """A node for messages: its name, what it calls, and the line that made it."""
    what = node.name if node.op == "placeholder" else f"{node.name} = {node.target}"
    line = source_line(node)
    return f"{what}    # {line}" if line else what


def module_path(node: fx.Node) -> str:
    """The innermost module that a node belongs to, ``"model.layers.0.mlp"``; empty where nothing is recorded."""
    stack = _module_stack(node)
    return _MODEL.sub("", str(stack[-1][0])) if stack else ""


def _module_stack(node: fx.Node) -> list[tuple[str, object]]:
    """Path and class of each module that a node belongs to, the outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return list(stack.values())


def _modules(node: fx.Node) -> str:
    """The classes of the two innermost modules that a node belongs to."""
    kinds = [kind for _, kind in _module_stack(node)][-2:]
    return " / ".join(getattr(k, "__name__", str(k).rpartition(".")[2]) for k in kinds)
