"""Budgets that the user's code sets with ``torch.autograd.graph.region_activation_memory_budget``.

As in PyTorch, this context manager applies to a whole graph. It must cover the graph's forward and
set one budget ratio. Error messages begin with PyTorch's own text. Regions with different ratios
must be in different graphs. AOTAutograd and Inductor add operators outside of every user's context:
writes to mutated inputs, and seeds of random numbers. PyTorch 2.13 therefore refuses a graph with
batch norm; remat ignores such operators.
"""

from __future__ import annotations

from torch import fx

from remat import torch_compat
from remat.errors import BudgetError
from remat.graph import ops
from remat.graph.capture.source import located
from remat.graph.index import GraphIndex
from remat.graph.joint import JointGraph
from remat.graph.roles import Roles

_WHAT = "torch.autograd.graph.region_activation_memory_budget"
#: Option of PyTorch 2.15 that decides whether a context must cover the whole forward.
_COVERAGE = "activation_memory_budget_require_full_coverage"
#: Largest number of uncovered operators that an error lists.
_SHOWN = 5


def region_budget(joint: JointGraph, index: GraphIndex, roles: Roles) -> float | None:
    """Return the budget ratio that the user's code sets for a graph; None if the code sets none.

    Raises:
        BudgetError: the code sets several ratios. Also if the contexts cover only a part of the
            forward, and PyTorch's configuration requires the whole forward.
    """
    shares: dict[float, fx.Node] = {}
    uncovered: list[fx.Node] = []
    for i, node in enumerate(index.nodes):
        share = _annotated(node)
        if share is not None:
            shares.setdefault(share, node)
        # Operators that AOTAutograd or Inductor adds do not count, because no user can cover them.
        elif roles.required_forward[i] and node.meta.get("partitioner_tag") == "is_forward":
            uncovered += [node] if node.op == "call_function" else []
    nested = (
        inner
        for i, node in enumerate(index.nodes)
        if roles.required_forward[i] and not index.plain[i]
        for inner in ops.nested_nodes(node)
    )
    for node in nested:
        share = _annotated(node)
        if share is not None:
            shares.setdefault(share, node)
        else:
            uncovered.append(node)
    if not shares:
        return None
    if len(shares) > 1:
        lines = [f"  {share!r}: {located(shares[share])}" for share in sorted(shares)]
        raise BudgetError(
            f"{_WHAT}: conflicting budgets within a single joint graph (including nested subgraphs): "
            f"{sorted(shares)}. Use a graph break to separate regions that need different budgets, "
            f"torch._dynamo.graph_break(). Graph '{joint.name}' sets\n" + "\n".join(lines)
        )
    # Versions before PyTorch 2.15 have no option that permits less than full coverage.
    if uncovered and getattr(torch_compat.functorch_config, _COVERAGE, True):
        more = f"\n  and {len(uncovered) - _SHOWN} more" if len(uncovered) > _SHOWN else ""
        allowed = (
            f", or set torch._functorch.config.{_COVERAGE}=False to apply the budget to the entire graph"
            if hasattr(torch_compat.functorch_config, _COVERAGE)
            else ""
        )
        raise BudgetError(
            f"{_WHAT}: must cover the entire forward of a graph (including HOP bodies), but "
            f"{len(uncovered)} forward op(s) are unannotated. Wrap the whole forward in a single region"
            f"{allowed}; use a graph break to scope different budgets to different graphs, "
            f"torch._dynamo.graph_break(). Outside of the budget {next(iter(shares))!r} stand in graph "
            f"'{joint.name}'\n" + "\n".join(f"  {located(n)}" for n in uncovered[:_SHOWN]) + more
        )
    return next(iter(shares))


def _annotated(node: fx.Node) -> float | None:
    """Return the budget ratio that PyTorch recorded on a node; None if there is none."""
    custom = node.meta.get("custom")
    share = custom.get(torch_compat.REGION_BUDGET) if isinstance(custom, dict) else None
    return None if share is None else float(share)
