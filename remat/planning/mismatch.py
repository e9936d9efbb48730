"""Why a saved plan does not fit a graph: the one reason, as far as the two tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from remat.graph.joint import JointGraph, operators_digest
from remat.planning.plan import Plan


def why_not_for(joint: JointGraph, plans: Sequence[Plan]) -> str:
    """Why none of some plans was made for a graph, and what to do.

    Lowering, PyTorch's version and a digest of the operators stand in a plan. Where the operators are
    the same, it is shapes or constants that differ; else the model is another one. Of a plan from before
    the digest was recorded, no more is said than the names in it tell.

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
    why = "other operators, so it is another model, or the model has changed"
    if operators_digest(joint) in {p.operators for p in plans}:
        why = (
            "the same operators in the same order, so shapes, dtypes, constants or options of the model "
            "have changed, or what is declared pure"
        )
    elif any(not p.operators and _has_nodes_of(joint, p) for p in plans):
        why = (
            "the operators that the plan names, and is not the same: the model, shapes, dtypes, "
            "constants or options have changed, or what is declared pure"
        )
    if "" in lowers or "" in versions:
        why += ", or the lowering or PyTorch, which this plan is too old to tell"
    return f"this graph has {why}: plan again"


def could_be_for(joint: JointGraph, plans: Sequence[Plan]) -> bool:
    """Whether some plan was made under the lowering and the PyTorch of a graph, as far as plans tell."""
    return any(p.lower in ("", joint.lower) and p.torch in ("", torch.__version__) for p in plans)


def _has_nodes_of(joint: JointGraph, plan: Plan) -> bool:
    """Whether a graph has a node of every name in a plan; a larger graph may have them by chance."""
    return {node.name for node in joint.graph.nodes}.issuperset((*plan.saved, *plan.recomputed))
