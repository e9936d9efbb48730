"""What packing and offloading a graph's values takes: the step problem with ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from remat.graph.costs.base import node_costs
from remat.graph.index import inputs_of
from remat.graph.joint import output_node
from remat.graph.lowering import Lowered, SavedKind, must_offload, must_recompute
from remat.graph.replays import is_element
from remat.graph.step_lowering import LoweredStep
from remat.graph.storages import Sizes, tensor_bytes
from remat.graph.writes import aliased_argument
from remat.passes.core.state import Costs, State
from remat.passes.hooks.saved_tensor_hooks import HookTraces, may_be_rounded
from remat.passes.hooks.tracing import Traced
from remat.passes.packing.pairs import SavedTensorHooks
from remat.planning.request import PlanRequest
from remat.solvers.ways_problem import Packing, WaysProblem

#: Values that are smaller than this share of all that may be saved are just kept.
_SMALL = 5_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """The time of every operator of a graph, backward's own included.

    Attributes:
        of_name: by nodes of the joint graph.
        cost: the cost model, for operators that the graph does not have.
    """

    of_name: dict[str, int]
    state: State
    request: PlanRequest

    @classmethod
    def of(cls, state: State, request: PlanRequest) -> Times:
        """Asks the cost model.

        Raises:
            ProblemError: it cannot price backward.
        """
        late = [i for i, only_backward in enumerate(state.roles.tangent_closure) if only_backward]
        costs = list(state.get(Costs(request.cost)))
        for i, cost in enumerate(node_costs(state.index, state.storages, request.cost, late)):
            costs[i] += cost
        names = (node.name for node in state.index.nodes)
        return cls(of_name=dict(zip(names, costs, strict=True)), state=state, request=request)

    def of_graph(self, nodes: Sequence[fx.Node]) -> int:
        """Time of operators of another graph, such as those that pack."""
        asked = [
            n
            for n in nodes
            if n.op == "call_function"
            and isinstance(n.meta.get("val"), torch.Tensor)
            and not is_element(n)
            and aliased_argument(n) is None
        ]
        return sum(int(c) for c in self.request.cost.costs(asked))


def ways_problem(
    state: State, lowered: Lowered, step: LoweredStep, times: Times, left_out: frozenset[str]
) -> WaysProblem:
    """The step problem of a graph with the ways that a request allows.

    Args:
        state: the prepared graph.
        lowered: its graph problem.
        step: its step problem.
        times: of its operators.
        left_out: names of values that have no way.
    """
    request, problem = times.request, step.problem
    n = len(problem)
    packings: list[tuple[Packing, ...]] = [()] * n
    send, fetch = [-1] * n, [-1] * n
    known: dict[int, Packing | None] = {}
    total = sum(lowered.problem.size)
    stays = {*problem.to_end, *problem.at_start, *problem.at_boundary}
    for i, nbytes in enumerate(lowered.problem.size):
        name = lowered.problem.names[i]
        at = step.of_value.get(name, -1)
        if not _may_have_ways(state, lowered, i) or at < 0 or at in stays or name in left_out:
            continue
        if state.storages.owner[lowered.position[i]] != lowered.position[i]:
            continue
        if nbytes * _SMALL < total or problem.size[at] != nbytes:
            continue
        node = state.index.nodes[lowered.position[i]]
        found = (packing_of(state, node, hooks, times, known) for hooks in request.pack)
        packings[at] = tuple(p for p in found if p is not None)
        if request.offload is not None:
            send[at] = fetch[at] = request.offload.time_ps(nbytes)
    return WaysProblem(
        step=problem,
        times=tuple(times.of_name.get(name, 0) for name in problem.names),
        packings=tuple(packings),
        send=tuple(send),
        fetch=tuple(fetch),
    )


def _may_have_ways(state: State, lowered: Lowered, i: int) -> bool:
    """Whether a value may be saved at all, is all of its memory, and nobody writes to that."""
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
    """Names and bytes of the values that the user tags for the host's memory and that may go there.

    A tag on a view is one on the memory that it looks at, unless that must be recomputed.
    """
    owner, nodes = state.storages.owner, state.index.nodes
    tagged = {
        i if must_recompute(nodes[owner[i]]) else owner[i]
        for i, node in enumerate(nodes)
        if must_offload(node)
    }
    for i, at in enumerate(lowered.position):
        if at in tagged and _may_have_ways(state, lowered, i):
            yield lowered.problem.names[i], lowered.problem.size[i]


def packing_of(
    state: State,
    node: fx.Node,
    hooks: SavedTensorHooks,
    times: Times,
    known: dict[int, Packing | None],
) -> Packing | None:
    """How a pair packs a value; None where it does not, or is not for it.

    Args:
        state: the prepared graph.
        node: the value.
        hooks: the pair.
        times: of its operators.
        known: what was found for other values of this graph.
    """
    late, position = state.roles.tangent_closure, state.index.position
    if hooks.lossy and not may_be_rounded(node, hooks, lambda u: late[position[u]]):
        return None
    traced = state.get(HookTraces(hooks)).of(node.meta["val"])
    if id(traced) not in known:
        known[id(traced)] = _measured(traced, hooks.name, tensor_bytes(node.meta["val"]), times)
    return known[id(traced)]


def _measured(traced: Traced, name: str, nbytes: int, times: Times) -> Packing | None:
    if traced.unpack is None or traced.eager or traced.packed_bytes >= nbytes:
        return None
    return Packing(
        name=name,
        nbytes=traced.packed_bytes,
        pack=times.of_graph(list(traced.pack.graph.nodes)),
        unpack=times.of_graph(list(traced.unpack.graph.nodes)),
        pack_peak=_peak(traced.pack, given=False),
        unpack_peak=_peak(traced.unpack, given=True),
    )


def _peak(body: fx.GraphModule, *, given: bool) -> int:
    """Most bytes that a traced function has alive at once, what it is given counted or not."""
    sizes, nodes = Sizes(), list(body.graph.nodes)
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for value in (node, *inputs_of(node)):
            for key in sizes.keys(value):
                last[key] = at
    placeholders = [n for n in nodes if n.op == "placeholder"]
    theirs = {key for n in placeholders for key in sizes.keys(n)}
    alive = dict.fromkeys(theirs if given else (), True)
    most = 0
    returned = {k for v in output_node(body.graph).all_input_nodes for k in sizes.keys(v)}
    for at, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        alive |= {k: True for k in sizes.keys(node) if given or k not in theirs}
        most = max(most, sum(sizes.nbytes[k] for k in alive))
        alive = {k: True for k in alive if last[k] > at or k in returned}
    return most
