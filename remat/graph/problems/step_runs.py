"""Record in which order the graphs of a step run, and which values the runs exchange."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from remat.graph.joint import JointGraph, Turn, primals_of


class StepRuns:
    """The runs of all graphs of one step, in their order."""

    def __init__(self) -> None:
        # `_returned_by` maps a tensor to (index of the graph run that returned it, index among the outputs of that run).
        # `_received_by` maps a tensor to (index of the first graph run that received it, index among the arguments).
        # Keys are weak: otherwise a run on real tensors would keep all activations alive.
        self._returned_by: MutableMapping[torch.Tensor, tuple[int, int]] = WeakTensorKeyDictionary()
        self._received_by: MutableMapping[torch.Tensor, tuple[int, int]] = WeakTensorKeyDictionary()
        self._turns: list[tuple[int, Turn]] = []  # (index of the graph, its run), in run order

    def add(
        self, graph: int, joint: JointGraph, args: Sequence[Any], outputs: Iterable[Any]
    ) -> None:
        """Record one run of the step's graph number ``graph``, with its arguments and outputs."""
        tensors = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        turn = Turn(at=len(self._turns))
        # A `Turn` counts positions among the primals. They equal positions among the arguments only if there
        # are as many primals as arguments.
        if len(primals_of(joint)) == len(args):
            received = tuple(
                (i, *self._returned_by[a]) for i, a in tensors if a in self._returned_by
            )
            shared = tuple((i, *self._received_by[a]) for i, a in tensors if a in self._received_by)
            turn = turn._replace(received=received, shared=shared)
        self._turns.append((graph, turn))
        for i, value in tensors:
            if value not in self._returned_by:
                self._received_by.setdefault(value, (turn.at, i))
        for k, value in enumerate(outputs):
            if isinstance(value, torch.Tensor):
                self._returned_by[value] = (turn.at, k)

    def joints(
        self,
        graphs: Sequence[JointGraph],
        held_by_caller: Iterable[torch.Tensor],
        graph_of: Sequence[int] | None = None,
    ) -> list[JointGraph]:
        """Return copies of the joint graphs, which also state each graph's runs and the values that runs exchange.

        Args:
            graphs: the joint graphs of the step.
            held_by_caller: tensors that the step's caller holds.
            graph_of: the graph of each run. Given once backward has reached the first run, when it is known
                which outputs nobody holds. Parts of the runs of a graph may count as graphs of their own.
        """
        received = {(j, k) for _, turn in self._turns for _, j, k in turn.received}
        caller_holds = {self._returned_by[v] for v in held_by_caller if v in self._returned_by}
        alive = None if graph_of is None else received.union(self._returned_by.values())
        turns: list[list[Turn]] = [[] for _ in graphs]
        graph_of = [graph for graph, _ in self._turns] if graph_of is None else graph_of
        for graph, (_, turn) in zip(graph_of, self._turns, strict=True):
            returned = tuple(k for at, k in sorted(caller_holds & received) if at == turn.at)
            outputs = range(0 if alive is None else graphs[graph].num_fwd_outputs)
            dropped = tuple(k for k in outputs if (turn.at, k) not in (alive or ()))
            turns[graph].append(turn._replace(returned=returned, dropped=dropped))
        repeats = len(self._turns) > len(set(graph_of))
        updated = list(graphs)
        for graph, joint in enumerate(graphs):
            if not turns[graph]:
                continue
            # `received` and `shared` describe the first run only. If a graph of the step runs several times,
            # `turns` describes every run.
            first = turns[graph][0]
            updated[graph] = replace(
                joint,
                received=tuple((i, graph_of[at], k) for i, at, k in first.received),
                shared=tuple((i, graph_of[at], k) for i, at, k in first.shared),
                returned=tuple(dict.fromkeys(k for t in turns[graph] for k in t.returned)),
                dropped=first.dropped,
                runs=len(turns[graph]),
                turns=tuple(turns[graph]) if repeats else (),
            )
        return updated
