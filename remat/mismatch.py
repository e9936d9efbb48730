"""Why a saved plan does not fit a graph: the one reason, as far as the two tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remat.graph.joint import JointGraph
from remat.planning import Plan


def why_not_for(joint: JointGraph, plans: Sequence[Plan]) -> str:
    """Why none of some plans was made for a graph, and what to do.

    Lowering and PyTorch's version stand in a plan. Other shapes are known by the operators, which
    the graph then has all of them; where some are missing, the model is another one.

    Args:
        joint: a graph whose fingerprint is none of theirs.
        plans: one plan, or those of a set.
    """
    lowers = {p.lower for p in plans}
    if "" not in lowers and joint.lower not in lowers:
        made = sorted(lowers)[0]
        return (
            f"made for the lowering '{made}', and this graph is lowered to '{joint.lower}': use it with "
            f"lower='{made}', or plan a graph captured with lower='{joint.lower}'"
        )
    versions = {p.torch for p in plans}
    if "" not in versions and torch.__version__ not in versions:
        return (
            f"made with PyTorch {sorted(versions)[0]}, and this is {torch.__version__}, which traces other "
            "graphs: plan again"
        )
    present = {node.name for node in joint.graph.nodes}
    if any(present.issuperset((*p.saved, *p.recomputed)) for p in plans):
        why = (
            "the same operators by name, so shapes, dtypes, constants or options of the model have "
            "changed, or what is declared pure"
        )
    else:
        why = "other operators, so it is another model, or the model has changed"
    if "" in lowers or "" in versions:
        why += ", or the lowering or PyTorch, which this plan is too old to tell"
    return f"this graph has {why}: plan again"
