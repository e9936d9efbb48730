"""Read budgets that the user's code sets with ``torch.autograd.graph.region_activation_memory_budget``.

As in PyTorch, such a budget is a ratio and applies to a whole graph: the context must cover all of the graph's
forward. Error messages about budgets begin with PyTorch's own text. Regions with different ratios must be in
different graphs. AOTAutograd and Inductor add operators outside of every user's context: writes to mutated inputs,
and seeds of random numbers. PyTorch 2.13 therefore refuses a graph with batch norm, but remat ignores operators
outside of every user's context.
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
    nodes: list[tuple[fx.Node, bool]] = []  # with whether a context must cover the node
    for i, node in enumerate(index.nodes):
        # Operators that AOTAutograd or Inductor adds do not count, because no user can cover them.
        is_users = node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward"
        nodes.append((node, is_users and roles.required_forward[i]))
        if roles.required_forward[i] and not index.plain[i]:
            nodes += [(inner, True) for inner in ops.nested_nodes(node)]
    ratios: dict[float, fx.Node] = {}
    uncovered: list[fx.Node] = []
    for node, must_be_covered in nodes:
        ratio = _annotated(node)
        if ratio is not None:
            ratios.setdefault(ratio, node)
        elif must_be_covered:
            uncovered.append(node)
    if not ratios:
        return None
    if len(ratios) > 1:
        lines = [f"  {ratio!r}: {located(ratios[ratio])}" for ratio in sorted(ratios)]
        raise BudgetError(
            f"{_WHAT}: conflicting budgets within a single joint graph (including nested subgraphs): "
            f"{sorted(ratios)}. Use a graph break to separate regions that need different budgets, "
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
            f"torch._dynamo.graph_break(). Outside of the budget {next(iter(ratios))!r} stand in graph "
            f"'{joint.name}'\n" + "\n".join(f"  {located(n)}" for n in uncovered[:_SHOWN]) + more
        )
    return next(iter(ratios))


def _annotated(node: fx.Node) -> float | None:
    """Return the budget ratio that PyTorch recorded on a node; None if there is none."""
    custom = node.meta.get("custom")
    ratio = custom.get(torch_compat.REGION_BUDGET) if isinstance(custom, dict) else None
    return None if ratio is None else float(ratio)
