"""Plan the graphs of a step together, once the first step has shown which graphs it runs.

Blocks that are compiled one by one, and graphs between graph breaks, are planned one after the other. The first graph is
compiled before anybody knows that others follow. After the first step, all graphs and their runs are known. If the step
exceeds its budget, its graphs are planned together, and their code is compiled again at its next call.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, RematError, warn
from remat.graph.joint import JointGraph
from remat.graph.lowering import Decision
from remat.graph.step_runs import StepRuns
from remat.integrations.partition_options import PartitionOptions
from remat.planning.search.effort import DEFAULT
from remat.units import Budget, format_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A graph of a step, with what is needed to plan it again.

    Attributes:
        joint: the joint graph; None if the compiled graph came from a cache.
        fingerprint: its digest.
        code: the code that Dynamo compiled. Equal blocks that share their code share a plan.
        decision: the decision that it was compiled with.
        options: the options of its compilation.
        backend: the backend, which has these options.
    """

    joint: JointGraph | None
    fingerprint: str
    code: CodeType
    decision: Decision
    options: PartitionOptions
    backend: object

    @property
    def key(self) -> tuple[str, int]:
        """What tells the graph from others of the step."""
        return self.fingerprint, id(self.code)


class StepTogether:
    """The graphs of one step, and their runs.

    A graph is known by any object that lives as long as its compiled code.
    """

    def __init__(self) -> None:
        self._members: weakref.WeakKeyDictionary[Any, Member] = weakref.WeakKeyDictionary()
        self._order: list[
            tuple[str, int]
        ] = []  # keys of the graphs, in the order of their first runs
        self._runs: StepRuns | None = None
        self._recorded = 0
        # Backends that Dynamo drops with their code, and that get the plans at the next call.
        self._kept: list[object] = []

    def add(self, graph: Hashable, member: Member) -> None:
        """Add a graph that was just compiled."""
        self._members[graph] = member
        self._runs = self._runs or StepRuns()

    def begin(self) -> None:
        """Begin a step."""
        self._order, self._recorded = [], 0
        self._runs = None if self._runs is None else StepRuns()

    def ran(self, graph: Hashable, arguments: Sequence[Any], outputs: Iterable[Any]) -> None:
        """Record a run of a graph."""
        member = self._members.get(graph)
        if self._runs is None or member is None:
            return
        if member.key not in self._order:
            self._order.append(member.key)
        place = self._order.index(member.key)
        if member.joint is not None:
            self._runs.add(place, member.joint, arguments, outputs)
        self._recorded += 1

    def can_plan(self, graphs: Iterable[Hashable]) -> bool:
        """Return whether the graphs of a step can be planned together: all are known, with equal options."""
        found = [self._members.get(graph) for graph in graphs]
        members = [m for m in found if m is not None]
        if self._runs is None or not members or len(members) < len(found):
            return False
        first, most = members[0].options, DEFAULT.compiling.replans
        return first.graphs.replanned < most and all(
            m.options.request == first.request and not m.options.with_others for m in members
        )

    def end(self) -> None:
        """Stop recording, until a further graph is compiled."""
        self._runs, self._kept = None, []

    def plan(self, graphs: Iterable[Hashable], runs: int, peak_bytes: int) -> bool:
        """Plan the graphs of a step together; their code is compiled again, under these plans, when it is called next.

        Args:
            graphs: the graphs that ran.
            runs: number of their runs.
            peak_bytes: bytes that the step took, for the message.

        Returns:
            Whether they have a plan now.
        """
        from remat.planning.plan_set import set_planner

        graphs = [*graphs]
        if not self.can_plan(graphs) or runs != self._recorded or runs < 2:
            return False
        assert self._runs is not None, "the step can be planned"
        members = [self._members[graph] for graph in graphs]
        graphs_of = [m.options.graphs for m in members]
        request = replace(members[0].options.request, plan=None, plans_others=False)
        joint_of = {m.key: m.joint for m in members}
        traced = [joint for key in self._order if (joint := joint_of[key]) is not None]
        recorded = self._runs
        self.end()
        taken = f"a step takes {format_bytes(peak_bytes)} ({peak_bytes} bytes) in {runs} runs of compiled graphs"
        above = f"above its budget, a {request.budget.label}"
        if len(traced) < len(self._order):
            for record in graphs_of:
                record.from_caches = False
            self._compile_again(members)
            warn(
                f"{taken}, {above}. Its graphs came from a cache; they are traced again to be planned together",
                BudgetWarning,
            )
            return True
        decision_of = {m.key: m.decision for m in members}
        joints, replans, least = recorded.joints(traced, ()), graphs_of[0].replanned + 1, ""
        try:
            planner = set_planner(joints, request)
            # The difference to the count: fused code takes less, and outputs that the user holds take more.
            offset = planner.peak_of([decision_of[key] for key in self._order]) - peak_bytes
            room = request.budget.peak_bytes or 0
            fused = members[0].options.lower == "inductor"
            room += offset - room // DEFAULT.compiling.margin if fused else min(0, offset)
            try:
                made = planner.within_peak(Budget(peak_bytes=max(1, room)))
            except BudgetError as error:
                made, replans = (
                    planner.within_peak(Budget(peak_share=0.0)),
                    DEFAULT.compiling.replans,
                )
                least = f". No plans within the budget were found, so those with the least peak run: {error}"
        except RematError as error:
            why = f"and its graphs cannot be planned together: {error}"
            warn(f"{taken}, {above}, {why}", BudgetWarning)
            return False
        # Equal graphs take their plans in turn, whichever backend compiles them.
        met = Counter[str]()
        for m in members:
            m.options.request = replace(request, plan=made, plans_others=True)
        for record in graphs_of:
            record.met, record.replanned = met, replans
        self._compile_again(members)
        warn(
            f"{taken}, {above}. Its graphs are planned together now, and are compiled again when they run next{least}",
            BudgetWarning,
        )
        return True

    def _compile_again(self, members: Sequence[Member]) -> None:
        """Drop the compiled code of graphs, so that their next calls compile them with the same backends."""
        self._kept = [m.backend for m in members]
        for code in {m.code for m in members}:
            torch_compat.reset_code(code)
