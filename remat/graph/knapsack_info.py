"""Views of a joint graph around its knapsack candidates.

Names are those of ``torch/_functorch/_activation_checkpointing/graph_info_provider.py``. What differs:
every view keeps the order of the graph, so that nothing depends on hash seeds, and an edge of the
contracted view stands for a path on which no other candidate lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import networkx as nx
from torch import fx

from remat.errors import ProblemError


class GraphInfoProvider:
    """A joint graph with the memories and runtimes of its candidates for recomputation.

    Args:
        graph_nodes_in_order: names of all nodes.
        graph_edges: (producer, user) pairs of names.
        all_recomputable_banned_nodes: names of the candidates: what a knapsack decides on.
        all_node_runtimes: runtime of each candidate, in any unit; or recorded ones, in their order.
        all_node_memories: memory of each candidate, in any unit; or recorded ones, in their order.
        recorded_knapsack_input_memories: memories in the order of the candidates.
        recorded_knapsack_input_runtimes: runtimes in the order of the candidates.
        joint_graph: the graph itself, for whoever wants it back; nothing is read off it.

    Raises:
        ProblemError: neither form of memories or runtimes is given, or a name is unknown.
    """

    def __init__(
        self,
        graph_nodes_in_order: Sequence[str],
        graph_edges: Sequence[tuple[str, str]],
        all_recomputable_banned_nodes: Sequence[str],
        all_node_runtimes: Mapping[str, float] | None = None,
        all_node_memories: Mapping[str, float] | None = None,
        recorded_knapsack_input_memories: Sequence[float] | None = None,
        recorded_knapsack_input_runtimes: Sequence[float] | None = None,
        joint_graph: fx.Graph | None = None,
    ) -> None:
        self.joint_graph = joint_graph
        self.graph_nodes_in_order = list(graph_nodes_in_order)
        self.graph_edges = list(graph_edges)
        self.all_recomputable_banned_nodes = list(all_recomputable_banned_nodes)
        known = set(self.graph_nodes_in_order)
        for name in [
            *self.all_recomputable_banned_nodes,
            *(n for e in self.graph_edges for n in e),
        ]:
            if name not in known:
                raise ProblemError(
                    f"node '{name}' is used, but it is not among graph_nodes_in_order"
                )
        self.all_node_runtimes = self._by_name(
            "runtimes", all_node_runtimes, recorded_knapsack_input_runtimes
        )
        self.all_node_memories = self._by_name(
            "memories", all_node_memories, recorded_knapsack_input_memories
        )

    @classmethod
    def initialize_from_graph(
        cls,
        joint_graph: fx.Graph,
        all_recomputable_banned_nodes: Sequence[fx.Node],
        recorded_knapsack_input_memories: Sequence[float],
        recorded_knapsack_input_runtimes: Sequence[float],
    ) -> GraphInfoProvider:
        """Reads nodes and edges off a joint graph."""
        return cls(
            graph_nodes_in_order=[n.name for n in joint_graph.nodes],
            graph_edges=[(n.name, user.name) for n in joint_graph.nodes for user in n.users],
            all_recomputable_banned_nodes=[n.name for n in all_recomputable_banned_nodes],
            recorded_knapsack_input_memories=recorded_knapsack_input_memories,
            recorded_knapsack_input_runtimes=recorded_knapsack_input_runtimes,
            joint_graph=joint_graph,
        )

    #: PyTorch's spelling.
    inialize_from_graph = initialize_from_graph

    def _by_name(
        self, what: str, given: Mapping[str, float] | None, recorded: Sequence[float] | None
    ) -> dict[str, float]:
        if given is not None:
            missing = [n for n in self.all_recomputable_banned_nodes if n not in given]
            if missing:
                raise ProblemError(f"all_node_{what} lacks the candidate '{missing[0]}'")
            return dict(given)
        if recorded is None or len(recorded) != len(self.all_recomputable_banned_nodes):
            raise ProblemError(
                f"give all_node_{what}, or recorded_knapsack_input_{what} with one entry for each of "
                f"the {len(self.all_recomputable_banned_nodes)} candidates"
            )
        return dict(zip(self.all_recomputable_banned_nodes, recorded, strict=True))

    @cached_property
    def full_joint_nx_graph(self) -> nx.DiGraph:
        """All nodes and edges, without the output."""
        graph = nx.DiGraph()
        graph.add_nodes_from(n for n in self.graph_nodes_in_order if n != "output")
        graph.add_edges_from(e for e in self.graph_edges if "output" not in e)
        return graph

    @cached_property
    def recomputable_node_only_graph(self) -> nx.DiGraph:
        """The candidates and the edges right between them."""
        candidates = set(self.all_recomputable_banned_nodes)
        graph = nx.DiGraph()
        graph.add_nodes_from(self.all_recomputable_banned_nodes)
        graph.add_edges_from(
            e for e in self.graph_edges if e[0] in candidates and e[1] in candidates
        )
        return graph

    @cached_property
    def recomputable_node_only_graph_with_larger_graph_context(self) -> nx.DiGraph:
        """The candidates, with paths through other nodes contracted to edges."""
        full = self.full_joint_nx_graph
        candidates = set(self.all_recomputable_banned_nodes)
        graph = nx.DiGraph()
        graph.add_nodes_from(self.all_recomputable_banned_nodes)
        for start in self.all_recomputable_banned_nodes:
            stack, seen = list(full.successors(start)), set()
            while stack:
                node = stack.pop()
                if node in seen:
                    continue
                seen.add(node)
                if node in candidates:
                    graph.add_edge(start, node)
                else:
                    stack.extend(full.successors(node))
        return graph

    @cached_property
    def simplified_fx_joint_graph(self) -> fx.Graph:
        """The same nodes and edges as an FX graph without operators, for drawing."""
        inputs: dict[str, list[str]] = {n: [] for n in self.graph_nodes_in_order}
        for a, b in self.graph_edges:
            inputs[b].append(a)
        graph = fx.Graph()
        made: dict[str, fx.Node] = {}
        for name in self.graph_nodes_in_order:
            if inputs[name]:
                node = graph.call_function(_collect, tuple(made[i] for i in inputs[name]))
                node.name = name
            else:
                node = graph.placeholder(name)
            made[name] = node
        return graph

    def get_non_ac_peak_memory(self) -> float:
        """Memory of all candidates: what saving everything takes."""
        return sum(self.get_knapsack_memory_input())

    def get_theoretical_max_runtime(self) -> float:
        """Runtime of all candidates: what recomputing everything takes."""
        return sum(self.get_knapsack_runtime_input())

    def get_knapsack_memory_input(self) -> list[float]:
        return [self.all_node_memories[n] for n in self.all_recomputable_banned_nodes]

    def get_knapsack_runtime_input(self) -> list[float]:
        return [self.all_node_runtimes[n] for n in self.all_recomputable_banned_nodes]


def _collect(*values: object) -> tuple[object, ...]:
    return values
