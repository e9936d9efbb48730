"""Write and read the marks and the comment in a node's line.

Marks, such as ``must_save``, are instructions to passes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat import torch_compat
from remat.errors import ProblemError
from remat.graph.branch_values import PIECE, is_piece
from remat.graph.capture.source import source_line
from remat.graph.joint import UNCHECKED
from remat.graph.policies import REGION, is_region, region_of
from remat.graph.text.syntax import Source, quoted

_POLICIES = {policy.name.lower(): policy for policy in CheckpointPolicy}
#: Metadata key of each mark that has no argument (unlike ``region(0)``), by mark.
_FLAGS = {
    "backward_hook": "has_backward_hook",
    "unchecked": UNCHECKED,
    "continuous": PIECE,
}
#: Arguments of ``part(…)``: whether AOTAutograd traced the nodes below in forward or backward, or whether the
#: nodes must be placed there.
PARTS = ("is_forward", "is_backward", "must_be_in_forward", "must_be_in_backward")

_COMMENT = re.compile(r"(?P<file>.*?):(?P<line>\d{1,9})(?: (?P<code>.*))?")


def number_regions(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Number the checkpointed regions of a graph from 0, and return a dict from ``ac_graph_id`` to number."""
    # AOTAutograd's own numbers count all regions of the process, so the text of a graph would differ between runs.
    ids = {region for n in nodes if type(region := n.meta.get("ac_graph_id")) is int}
    return {region: k for k, region in enumerate(sorted(ids))}


def write_marks(node: fx.Node, regions: Mapping[int, int]) -> list[str]:
    """Return the marks of a node as texts, such as ``must_save`` or ``region(0)``.

    Raises:
        ProblemError: the recompute tag is not a `CheckpointPolicy`.
    """
    meta = node.meta
    marks: list[str] = []
    tag = meta.get("recompute")
    if tag is not None:
        if not isinstance(tag, CheckpointPolicy):
            raise ProblemError(
                f"'{node.name}' has the recompute tag {tag!r}; expected a CheckpointPolicy"
            )
        marks.append(tag.name.lower())
    region = meta.get("ac_graph_id")
    if type(region) is int:
        marks.append(f"region({regions[region]})")
    marks += [
        mark for mark, key in _FLAGS.items() if meta.get(key) or (key is PIECE and is_piece(node))
    ]
    custom = meta.get("custom")
    budget = custom.get(torch_compat.REGION_BUDGET) if isinstance(custom, dict) else None
    if isinstance(budget, (int, float)) and budget >= 0:
        marks.append(f"memory_budget({budget!r})")
    policy = region_of(node)
    if policy is not None:
        marks.append(f"policy({quoted(policy)})")
    return marks


def read_mark(source: Source, node: ast.expr, meta: dict[str, Any]) -> None:
    """Read one mark after a node's call, such as ``must_save``, and store it in metadata.

    Raises:
        ProblemError: the mark is unknown.
    """
    match node:
        case ast.Name(id=flag) if flag in _POLICIES:
            meta["recompute"] = _POLICIES[flag]
        case ast.Name(id=flag) if flag in _FLAGS:
            meta[_FLAGS[flag]] = True
        case ast.Call(func=ast.Name(id="region"), args=[number], keywords=[]):
            meta["ac_graph_id"] = source.integer(number)
        case ast.Call(func=ast.Name(id="memory_budget"), args=[budget], keywords=[]):
            value = source.literal(budget, (int, float), "a number")
            meta.setdefault("custom", {})[torch_compat.REGION_BUDGET] = value
        case ast.Call(func=ast.Name(id="policy"), args=[policy], keywords=[]):
            mark = source.string(policy)
            if not is_region(mark):
                expected = 'policy("save"), "recompute" or "offload", with or without a name'
                raise source.error(node, expected)
            meta.setdefault("custom", {})[REGION] = mark
        case _:
            marks = ", ".join([*_POLICIES, *_FLAGS, "region(…)", "memory_budget(…)", "policy(…)"])
            raise source.error(node, f"one of {marks}", "the mark {}")


def write_comment(node: fx.Node) -> str:
    """Return a node's comment: the user's line that produced it, as ``model.py:12 y = x @ w``, or its modules."""
    text = source_line(node).strip()
    # A control character, such as a line break, could end the comment.
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def read_comment(text: str) -> Mapping[str, Any]:
    """Convert a comment to node metadata (stack trace or modules), from which `write_comment` writes the comment."""
    if not text:
        return {}
    match = _COMMENT.fullmatch(text)
    if match is None:
        kinds = text.split(" / ")
        return {"nn_module_stack": {str(k): ("", kind) for k, kind in enumerate(kinds)}}
    code = f"\n    {match['code']}" if match["code"] else ""
    return {"stack_trace": f'  File "{match["file"]}", line {match["line"]}, in graph{code}'}
