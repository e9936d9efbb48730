"""Compute the lifetimes of storages over all graphs of one step.

A step has several graphs if its model has graph breaks. Forwards run from the first graph to the
last, backwards from the last to the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from torch import fx

from remat.graph.joint import Role, outputs_of, primals_of, role_of, split_outputs
from remat.graph.memory.fused_liveness import FusedWalk
from remat.graph.memory.liveness import StepWalk, sums_of
from remat.graph.rules.facts import Split


def highest_of_graphs(graphs: Sequence[Split]) -> tuple[tuple[int, int], ...]:
    """Return, for each graph of a step, the most bytes alive while its forward runs and while its backward runs.

    Parameters, inputs, gradients of parameters, outputs that no later graph receives, and the step's
    outputs live to the end of the step. Gradients of the step's outputs exist from the start of
    backward. Memory of operators that run between the graphs is not counted.

    Args:
        graphs: the split graphs in the order of their forwards; a graph that runs several times is
            listed once, and its result is the maximum over its runs.
    """
    runs = _in_turns(graphs)
    step = _Step([graph for _, graph in runs])
    alive = sums_of(step.spans(), step.end + 1)
    highest = [(0, 0)] * len(graphs)
    for (k, _), walk, f, b in zip(runs, step.walks, step.forward_at, step.backward_at, strict=True):
        forward = max(alive[f : f + walk.boundary])
        backward = max(alive[b : b + len(walk.program_points) - walk.boundary])
        highest[k] = (max(highest[k][0], forward), max(highest[k][1], backward))
    return tuple(highest)


def _in_turns(graphs: Sequence[Split]) -> list[tuple[int, Split]]:
    """Return all graph runs of a step in their order, as pairs (index in ``graphs``, graph)."""
    turns = [(turn, k) for k, graph in enumerate(graphs) for turn in graph.joint.turns]
    if not turns:
        return list(enumerate(graphs))
    runs = []
    for turn, k in sorted(turns):
        ran = {name: value for name, value in turn._asdict().items() if name != "at"}
        # The fields of the joint graph then describe the values that this run receives and returns.
        joint = replace(graphs[k].joint, **ran)
        runs.append((k, replace(graphs[k], joint=joint)))
    return runs


class _Step:
    """Simulation of the memory that all graph runs of a step take.

    Args:
        graphs: the graph of each run, in the order of their forwards.
    """

    def __init__(self, graphs: Sequence[Split]) -> None:
        self._graphs = graphs
        # By forward module, because all runs of a graph share one simulation.
        walk_of: dict[fx.GraphModule, StepWalk] = {}
        for g in graphs:
            if g.forward not in walk_of:
                walk = FusedWalk if g.joint.lower == "inductor" else StepWalk
                walk_of[g.forward] = walk(
                    g.forward, g.backward, g.joint.num_fwd_outputs, g.joint.memories
                )
        self.walks = [walk_of[g.forward] for g in graphs]
        lengths = [w.boundary for w in self.walks]
        lengths += [len(w.program_points) - w.boundary for w in reversed(self.walks)]
        starts = [0, *accumulate(lengths)]
        n = len(graphs)
        #: Program point of the step at which each forward, and each backward, begins.
        #: Backwards run in the opposite order of forwards.
        self.forward_at, self.backward_at = starts[:n], starts[n : 2 * n][::-1]
        self.end = starts[-1] - 1

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield each storage of the step as (bytes, first program point, last program point)."""
        lifetimes_of = {walk: list(walk.lifetimes()) for walk in {*self.walks}}
        passed = self._passed()
        for k, (graph, walk) in enumerate(zip(self._graphs, self.walks, strict=True)):
            elsewhere = {p for p, _, _ in (*graph.joint.received, *graph.joint.shared)}
            primals = [node.name for node in primals_of(graph.joint)]
            not_mine = {primals[p] for p in elsewhere if p < len(primals)}
            outside = self._from_outside(k)
            ends = dict.fromkeys(walk.outputs, self.end) | self._gradients(k) | passed[k]
            for key, node, nbytes, first, last in lifetimes_of[walk]:
                start, until = self._at(k, first), self._at(k, last)
                if key in walk.inputs:
                    # The run that returned this storage, or received it first, yields it.
                    if node.name in not_mine:
                        continue
                    start, until = 0, self.end
                elif key in walk.tangents and walk.tangents[key].name in outside:
                    start = self.backward_at[-1]
                else:
                    until = ends.get(key, until)
                yield nbytes, start, max(start, until)

    def _at(self, k: int, program_point: int) -> int:
        """Convert a program point within graph run ``k`` to a program point of the whole step."""
        boundary = self.walks[k].boundary
        if program_point < boundary:
            return self.forward_at[k] + program_point
        return self.backward_at[k] + program_point - boundary

    def _read_until(self, k: int, node: fx.Node) -> int:
        """Return the last program point of the step at which graph run ``k`` may read a node's value."""
        walk = self.walks[k]
        # A value that is not saved is read in the run's forward at the latest.
        reads = (walk.last_read[key] for key in walk.sizes.keys(node) if key in walk.last_read)
        return self._at(k, max(reads, default=walk.boundary - 1))

    def _passed(self) -> list[dict[int, int]]:
        """Return, for each run, the last program point of outputs that a later run receives or that nobody holds."""
        passed: list[dict[int, int]] = [{} for _ in self._graphs]
        for k, graph in enumerate(self._graphs):
            inputs = {n.name: n for n in graph.forward.graph.nodes if n.op == "placeholder"}
            primals = [node.name for node in primals_of(graph.joint)]
            for position, producer, output in graph.joint.received:
                if producer >= k or position >= len(primals):
                    continue
                values = outputs_of(self._graphs[producer].forward.graph)[output]
                node = inputs.get(primals[position])
                if not isinstance(values, fx.Node) or node is None:
                    continue
                until = self.backward_at[-1] - 1  # end of the last forward
                # The model's Python frames hold a value passed from graph to graph, and either graph may have saved
                # it for backward.
                until = max(until, self._read_until(k, node), self._read_until(producer, values))
                if output in self._graphs[producer].joint.returned:
                    until = self.end
                for key in self.walks[producer].sizes.keys(values):
                    passed[producer][key] = max(passed[producer].get(key, 0), until)
            values = outputs_of(graph.forward.graph)[: graph.joint.num_fwd_outputs]
            keys = [self.walks[k].sizes.keys(v) if isinstance(v, fx.Node) else () for v in values]
            for output in graph.joint.dropped:
                until = max(self.backward_at[k] - 1, self._read_until(k, values[output]))
                others = {
                    key for j, of in enumerate(keys) if j not in graph.joint.dropped for key in of
                }
                passed[k] |= {key: until for key in keys[output] if key not in others}
        return passed

    def _from_outside(self, k: int) -> set[str]:
        """Return the names of the tangents that graph run ``k`` gets from the step's caller, not from a later run."""
        received = {o for g in self._graphs for _, j, o in g.joint.received if j == k}
        joint = self._graphs[k].joint
        # The caller gives gradients for outputs that no later graph receives, and for those that it received too.
        inner = received - {*joint.returned}
        _, _, descs, _ = split_outputs(joint)
        handed_on = {descs[o] for o in inner if o < len(descs)}
        return {
            node.name
            for node in joint.graph.find_nodes(op="placeholder")
            if role_of(node) is Role.TANGENT
            and getattr(node.meta.get("desc"), "output", None) not in handed_on
        }

    def _gradients(self, k: int) -> dict[int, int]:
        """Return the last program point of each gradient storage of graph run ``k``, by storage key."""
        graph, walk = self._graphs[k], self.walks[k]
        waits = {p: producer for p, producer, _ in graph.joint.received if producer < k}
        added = {p for g in self._graphs[k + 1 :] for _, first, p in g.joint.shared if first == k}
        until: dict[int, int] = defaultdict(int)
        for position, value in enumerate(outputs_of(graph.backward.graph)):
            if not isinstance(value, fx.Node):
                continue
            ends = self.end
            if position in waits:
                # A gradient for an output of an earlier graph lives until the backward of that graph starts.
                ends = self.backward_at[waits[position]] - 1
            elif position in added:
                # PyTorch adds a gradient for a tensor that a later graph receives too to the one that the later
                # graph has computed.
                ends = self.backward_at[k] + len(walk.program_points) - walk.boundary - 1
            for key in walk.sizes.keys(value):
                until[key] = max(until[key], ends)
        return until
