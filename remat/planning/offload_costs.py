"""Run times of operators, and copy times of the values that may be offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from remat.graph.copying import run_of
from remat.graph.costs.base import CostModel
from remat.graph.costs.links import Link
from remat.graph.lowering import Lowered, SavedKind, must_offload, must_recompute
from remat.graph.replays import is_element
from remat.graph.step_lowering import LoweredStep
from remat.graph.storages import tensor_bytes
from remat.graph.writes import aliased_argument
from remat.passes.core.state import State
from remat.planning.prepared import step_costs_of
from remat.solvers.offload_problem import OffloadProblem

#: A value is not offloaded if it has fewer bytes than all values together, divided by this number.
_SMALL = 5_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """Run times of all operators of a graph, including those that only backward runs.

    Attributes:
        of_name: time in the cost model's unit, by name of the joint graph's node.
        cost: the cost model; it also prices operators that passes have added to forward or backward.
    """

    of_name: dict[str, int]
    cost: CostModel

    @classmethod
    def of(cls, state: State, cost: CostModel) -> Times:
        """Price every operator of a prepared graph.

        Raises:
            ProblemError: the cost model cannot price operators of backward.
        """
        costs = step_costs_of(state, cost, required=True)
        names = (node.name for node in state.index.nodes)
        return cls(of_name=dict(zip(names, costs, strict=True)), cost=cost)

    def of_node(self, node: fx.Node) -> int:
        """Return the run time of a node of forward or backward; 0 for a view, and if the result is no tensor."""
        known = self.of_name.get(run_of(node))
        if known is not None:
            return known
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if not is_tensor or is_element(node) or aliased_argument(node) is not None:
            return 0
        return int(self.cost.costs([node])[0])


def offload_problem(
    state: State,
    lowered: Lowered,
    step: LoweredStep,
    times: Times,
    link: Link,
    left_out: frozenset[str],
) -> OffloadProblem:
    """Build the problem of scheduling a step that may offload values: the step problem with copy times.

    Args:
        state: the prepared graph.
        lowered: the graph problem, which asks which nodes of the graph to save.
        step: the step problem, which asks which node of the graph to run when.
        times: run times of the graph's operators.
        link: the link to the host.
        left_out: names of values that must not be offloaded, although they could be.
    """
    problem = step.problem
    copy = [-1] * len(problem)
    total = sum(lowered.problem.size)
    # A value can be away only between the run that computes it and a later use, and not at the end.
    stays = {*problem.to_end, *problem.at_start, *problem.at_boundary}
    for i, nbytes in enumerate(lowered.problem.size):
        name = lowered.problem.names[i]
        at = step.of_value.get(name, -1)
        if not _may_be_offloaded(state, lowered, i) or at < 0 or at in stays or name in left_out:
            continue
        if state.storages.owner[lowered.position[i]] != lowered.position[i]:
            continue
        # Offloading must free exactly the bytes that saving the value takes.
        if nbytes * _SMALL < total or problem.size[at] != nbytes:
            continue
        copy[at] = link.time_ps(nbytes)
    return OffloadProblem(
        step=problem,
        times=tuple(times.of_name.get(name, 0) for name in problem.names),
        send=tuple(copy),
        fetch=tuple(copy),
    )


def _may_be_offloaded(state: State, lowered: Lowered, i: int) -> bool:
    """Return whether node ``i`` of the graph problem is a value that may be offloaded.

    The value must be savable and never written to: a strided tensor of static shape that fills its storage.
    """
    if lowered.kind[i] is not SavedKind.VALUE or not lowered.problem.size[i]:
        return False
    at, storages = lowered.position[i], state.storages
    value = state.index.values[at]
    return (
        lowered.problem.savable[i]
        and isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and tensor_bytes(value) == storages.nbytes[storages.owner[at]]
        and storages.owner[at] not in storages.mutated
        and all(type(s) is int for s in value.shape)
    )


def offloaded_by_tag(state: State, lowered: Lowered) -> Iterator[tuple[str, int]]:
    """Yield name and bytes of each value that the user tags for offloading and that may be offloaded.

    A tag on a view counts for the node that made the storage of the view. If that node is tagged for
    recomputation, the tag counts for the view itself.
    """
    owner, nodes = state.storages.owner, state.index.nodes
    tagged = {
        i if must_recompute(nodes[owner[i]]) else owner[i]
        for i, node in enumerate(nodes)
        if must_offload(node)
    }
    for i, at in enumerate(lowered.position):
        if at in tagged and _may_be_offloaded(state, lowered, i):
            yield lowered.problem.names[i], lowered.problem.size[i]
