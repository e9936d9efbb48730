"""Build the rows of tables on the values that a plan keeps or recomputes, one row for each node or storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from remat import torch_compat
from remat.graph import ops, purity
from remat.graph.branch_values import branches_of_forward
from remat.graph.capture.source import source_line
from remat.graph.copying import run_of
from remat.graph.joint import output_node
from remat.graph.memory.host_copies import WAIT_COPIED
from remat.graph.memory.liveness import own_outputs
from remat.graph.memory.storages import Sizes
from remat.graph.memory.writes import aliased_argument
from remat.graph.problems.lowering import must_recompute, must_save
from remat.graph.problems.replays import maker_of
from remat.record import PlanRecord
from remat.report.by_module import Totals, Use
from remat.report.step_view import KeptStorage, OperatorRun
from remat.solvers.graph.problem import GraphProblem
from remat.torch_compat import pytree


def kept_storages(plan: PlanRecord) -> list[KeptStorage]:
    """Return the storages that a plan's forward keeps for backward on the device, without inputs and outputs."""
    forward, problem, sizes = plan.forward, plan.problem, Sizes()
    values = pytree.arg_tree_leaves(*output_node(forward.graph).args)
    own = own_outputs(forward)
    # Inputs and outputs are alive in any case, so forward does not keep them for backward.
    seen = set(sizes.of_all(n for n in forward.graph.nodes if n.op == "placeholder"))
    seen |= set(sizes.of_all(v for v in values[:own] if isinstance(v, fx.Node)))
    index = {name: i for i, name in enumerate(problem.names)}
    saved_values = [_owner(v) for v in values[own:] if isinstance(v, fx.Node)]
    present = {index[name] for name in map(_saved_name, saved_values) if name in index}
    present |= {index[name] for name in plan.recomputed if name in index}
    tags = {
        k: node.meta["recompute"].name
        for node in forward.graph.nodes
        if must_save(node)
        for k in sizes.keys(node)
    }
    graph = branches_of_forward(forward)
    rows: list[KeptStorage] = []
    for node in saved_values:
        if node.target is WAIT_COPIED:  # a copy in host memory takes no memory of the device
            continue
        fresh = [k for k in sizes.keys(node) if k not in seen]
        seen.update(fresh)
        if not fresh:
            continue
        i = index.get(_saved_name(node))
        rows.append(
            KeptStorage(
                name=node.name,
                op=op_name(node),
                source=source_line(node),
                nbytes=sum(sizes.nbytes[k] for k in fresh),
                price=None if i is None else price(problem, present, i),
                tagged=next((tags[k] for k in fresh if k in tags), ""),
                undeclared=_undeclared(node),
                branch=_branch(node, graph) if _runs_once(problem, index, node) else "",
            )
        )
    return rows


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that made the storage of a view; forward may return a view instead of the saved value."""
    while isinstance(base := aliased_argument(node), fx.Node) and base.op == "call_function":
        node = base
    return node


def _runs_once(problem: GraphProblem, index: Mapping[str, int], node: fx.Node) -> bool:
    """Return whether the operator that computes a kept value must not run again."""
    at = index.get(maker_of(node).name)
    return at is not None and not problem.recomputable[at]


def _branch(node: fx.Node, branches: set[fx.Node]) -> str:
    """Return why backward's branches or comparisons need a value that cannot be recomputed; empty if they do not."""
    maker = maker_of(node)
    if maker in branches:
        return "branch value"
    others = (ops.may_have_effects, ops.is_collective, ops.is_mutating, must_save)
    return "" if node.op != "call_function" or any(o(maker) for o in others) else "compared"


def _undeclared(node: fx.Node) -> tuple[str, ...]:
    """Return the names of a node's operators that are not declared pure, which prevents recomputation."""
    return tuple(map(purity.name_of, ops.opaque_operators(maker_of(node))))


def _saved_name(node: fx.Node) -> str:
    """Return the name in the joint graph of a value that forward returns, even if a hook on saved tensors packed it."""
    return str(node.meta.get("packed_from", node.name))


def runs_of(plan: PlanRecord) -> list[OperatorRun]:
    """Return the runs of operators in a plan's forward, followed by the runs in the plan's backward."""
    problem, costs, backward = plan.problem, plan.node_costs, plan.backward
    index = {name: i for i, name in enumerate(problem.names)}
    # Nodes that backward needs, and the inputs of nodes that only backward runs.
    read: set[int] = set()
    stack = list(problem.needed)
    while stack:
        i = stack.pop()
        if i not in read:
            read.add(i)
            stack.extend(() if problem.in_forward[i] else problem.inputs[i])
    twice, ran = set(plan.recomputed), set[str]()
    runs: list[OperatorRun] = []
    for gm in (plan.forward, backward):
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            # If a graph runs a joint-graph node several times, only one run has the name of the joint-graph node.
            name = run_of(node)
            at, again = index.get(name), ""
            if name in twice and name in ran:
                again = "read" if at in read else "on the way"
                again = "tagged" if must_recompute(node) else again
            ran.add(name)
            cost = None if at is None else problem.cost[at]
            runs.append(
                OperatorRun(
                    name=node.name,
                    node=name,
                    op=op_name(node),
                    source=source_line(node),
                    in_backward=gm is backward,
                    again=again,
                    nbytes=0 if at is None else problem.size[at],
                    cost=costs.get(name, 0) if costs else cost,
                )
            )
    return runs


def price(problem: GraphProblem, present: set[int], i: int) -> int | None:
    """Return the cost of recomputing one kept node from the other kept or recomputed values.

    Args:
        problem: the graph problem.
        present: positions in the problem of the nodes that are kept or recomputed.
        i: position in the problem of the kept node.

    Returns:
        The cost in the unit of the problem; None if the node cannot be recomputed. An input of the
        recomputation that cannot be recomputed itself counts as kept and adds no cost.
    """
    if not problem.recomputable[i]:
        return None
    # Each value is recomputed once, however many nodes read it.
    total, seen, stack = 0, {i}, [i]
    while stack:
        v = stack.pop()
        total += problem.cost[v] if problem.in_forward[v] else 0
        for j in problem.inputs[v]:
            # Values of size 0 are alive in backward in any case, so they count as kept.
            free = problem.savable[j] and not problem.size[j]
            if j not in seen and j not in present and not free and problem.recomputable[j]:
                seen.add(j)
                stack.append(j)
    return total


def uses(plan: PlanRecord, keeps: Sequence[KeptStorage], runs: Sequence[OperatorRun]) -> list[Use]:
    """For each operator node of forward, return its recompute cost and the bytes of its kept results."""
    saved = {k.name: k.nbytes for k in keeps}
    offloaded = {value.name: value.nbytes for value in plan.offloads}
    cost = Counter[str]()
    for run in runs:
        if run.again:
            cost[run.node] += run.cost or 0
    return [
        (
            node,
            Totals(
                nodes=1,
                saved_bytes=0 if node.name in offloaded else saved.get(node.name, 0),
                offloaded_bytes=offloaded.get(node.name, 0),
                recompute_cost=cost[node.name],
                runs_again=node.name in cost,
                cost=plan.node_costs.get(node.name, 0),
            ),
        )
        for node in plan.forward.graph.nodes
        if node.op == "call_function"
    ]


def op_name(node: fx.Node) -> str:
    """Return the name of a node's operator; for an element of a tuple, the name of the operator that made the tuple."""
    target = getattr(node.target, "__name__", "")
    if target == "getitem" and isinstance(node.args[0], fx.Node):
        return op_name(node.args[0])
    if isinstance(node.target, torch_compat.OpOverload):
        return str(node.target.overloadpacket).removeprefix("aten.")
    return target or str(node.target)
