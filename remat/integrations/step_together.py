"""Plan the graphs of a step together, once a step has shown which graphs it runs.

Blocks that are compiled one by one, and graphs between graph breaks, are planned one after the other. When the first
graph is compiled, remat does not know that other graphs follow. After a step, all graphs of the step and their runs
are known. If the step exceeds its budget, the graphs are planned together, and each graph is compiled again at its
next call. The runs of one graph, such as equal blocks, may get different plans. A graph with several plans is compiled
once for each of these plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import CodeType
from typing import Any

from remat import torch_compat
from remat.errors import BudgetError, BudgetWarning, warn
from remat.graph.joint import JointGraph
from remat.graph.ops import is_collective
from remat.graph.problems.lowering import Decision
from remat.graph.problems.step_runs import StepRuns
from remat.integrations.partition_options import PartitionOptions
from remat.planning.plan_set import PlanSet
from remat.planning.request import PlanRequest
from remat.planning.search.effort import DEFAULT
from remat.units import Budget, format_bytes

#: Key of a graph among all graphs of a step: its fingerprint, and the id of its code.
Key = tuple[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A graph of a step, with what is needed to plan it again.

    Attributes:
        joint: the joint graph; None if the compiled graph came from a cache, or has dynamic sizes.
        fingerprint: fingerprint of the joint graph.
        code: the code that Dynamo compiled. Equal blocks of a model that share their code share a few plans.
        decision: the decision that the graph was compiled with.
        options: the options that the graph was compiled with.
        backend: the backend that has these options.
    """

    joint: JointGraph | None
    fingerprint: str
    code: CodeType
    decision: Decision
    options: PartitionOptions
    backend: object

    @property
    def key(self) -> Key:
        """Key of the graph among all graphs of the step."""
        return self.fingerprint, id(self.code)


class StepTogether:
    """Record of the graphs that ran in one step, and of their runs, to plan these graphs together."""

    def __init__(self) -> None:
        self._runs: StepRuns | None = None
        # The graph of each run that is recorded.
        self._recorded: list[Member] = []
        # For each graph, the number of its runs in this step, and which of its plans each run of a step takes.
        self._ran = Counter[Key]()
        self._kinds: dict[Key, tuple[int, ...]] = {}
        # Backends that Dynamo has dropped with their code, until they compile a graph again.
        self._dropped_backends: dict[int, object] = {}

    def add(self, member: Member | None) -> None:
        """Begin to record runs, because a graph that can be planned with others was just compiled."""
        if member is None:
            return
        self._dropped_backends.pop(id(member.backend), None)
        self._runs = self._runs or StepRuns()

    def begin(self) -> None:
        """Begin to record a step: forget the runs of the last step."""
        self._recorded = []
        self._ran.clear()
        self._runs = None if self._runs is None else StepRuns()

    def ran(self, member: Member | None, arguments: Sequence[Any], outputs: Iterable[Any]) -> None:
        """Record that a graph of the step ran, with the arguments and outputs of this run."""
        if member is None:
            return
        self._ran[member.key] += 1
        if self._runs is None:
            return
        if member.joint is not None:  # each run is a graph of its own, until `plan` divides them
            self._runs.add(len(self._recorded), member.joint, arguments, outputs)
        self._recorded.append(member)

    def kinds(self, graph: Key) -> int:
        """Return the number of distinct plans that the runs of a graph use in one step."""
        return 1 + max(self._kinds.get(graph, (0,)))

    def kind(self, graph: Key, *, begins: bool) -> int:
        """Return the index, among the plans of a graph, of the plan that the graph's next run uses.

        Args:
            graph: the graph.
            begins: whether this run begins a step.
        """
        kinds = self._kinds[graph]
        # A step may have more runs than the planned one, for example two forwards before the backwards.
        return kinds[0 if begins else self._ran[graph] % len(kinds)]

    def can_plan(self, graphs: Iterable[Member | None]) -> bool:
        """Return whether a step's graphs can be planned together: each is a `Member`, and all have equal options."""
        registered = [*graphs]
        members = [m for m in registered if m is not None]
        if not members or len(members) < len(registered):
            return False
        request, most = _user_request(members[0]), DEFAULT.compiling.replans
        return all(
            _user_request(m) == request and m.options.graphs.replanned < most and not _must_agree(m)
            for m in members
        )

    def end(self) -> None:
        """Stop recording the runs of graphs, until another graph is compiled."""
        self._runs = None

    def plan(
        self, graphs: Sequence[Member | None], runs: int, peak_bytes: int, *, sharded: bool = False
    ) -> bool:
        """Plan the graphs of a step together, and drop the graphs' compiled code, so that the next call compiles anew.

        Args:
            graphs: the graphs that ran; None for one that cannot be planned with others.
            runs: number of runs of these graphs.
            peak_bytes: peak of the step in bytes.
            sharded: whether ``peak_bytes`` includes shards instead of whole parameters, as under FSDP.

        Returns:
            Whether the graphs will be compiled again.
        """
        if runs < 2 or not self.can_plan(graphs):
            return False
        if self._runs is None or runs != len(self._recorded):
            self._runs = StepRuns()  # a later step is recorded from its beginning
            return False
        members = [m for m in graphs if m is not None]
        ran, recorded, request = self._recorded, self._runs, _user_request(members[0])
        self.end()
        why = (
            f"a step takes {format_bytes(peak_bytes)} ({peak_bytes} bytes) in {runs} runs of compiled graphs, above its "
            f"budget, a {request.budget.label}"
        )
        if any(m.joint is None for m in ran):
            if not all(m.options.graphs.from_caches for m in members):
                return False
            for m in members:
                m.options.graphs.from_caches = False
            self._compile_again(members)
            again = "came from a cache or have dynamic sizes. They are traced again, for the sizes of the next step"
            warn(f"{why}. Its graphs {again}, to be planned together", BudgetWarning)
            return True
        try:
            plans, least, part_of = _planned(recorded, ran, request, peak_bytes, sharded=sharded)
        except Exception as error:  # training goes on with the plans that it has
            reason = f"its graphs cannot be planned together: {type(error).__name__}: {error}"
            warn(f"{why}, and {reason}", BudgetWarning)
            return False
        plans = self._by_kind(plans, [(m.key, part) for m, part in zip(ran, part_of, strict=True)])
        replans = 1 + max(m.options.graphs.replanned for m in members)
        # Equal graphs take the plans for their fingerprint in turn, whichever backend compiles the graphs.
        partitioned = Counter[str]()
        for m in members:
            saved = m.options.request.plan
            plan = _with_others(plans, saved if isinstance(saved, PlanSet) else None)
            m.options.request = replace(request, plan=plan, plans_others=True)
            m.options.graphs.partitioned = partitioned
            m.options.graphs.replanned = DEFAULT.compiling.replans if least else replans
        self._compile_again(members)
        warn(
            f"{why}. Its graphs are planned together now, and are compiled again when they run next{least}",
            BudgetWarning,
        )
        return True

    def _by_kind(self, planned: PlanSet, ran: Sequence[tuple[Key, int]]) -> PlanSet:
        """Return the distinct plans of each graph, and store which of these plans each run of the graph uses."""
        kinds: dict[Key, dict[Decision, list[int]]] = {}
        for key, part in ran:
            kinds.setdefault(key, {}).setdefault(planned[part].decision, []).append(part)
        for key, parts_of in kinds.items():
            order = [*parts_of]
            self._kinds[key] = tuple(
                order.index(planned[part].decision) for graph, part in ran if graph == key
            )
        each = [parts for parts_of in kinds.values() for parts in parts_of.values()]
        plans, runs = tuple(planned[parts[0]] for parts in each), tuple(map(len, each))
        return replace(planned, plans=plans, runs=runs)

    def _compile_again(self, members: Sequence[Member]) -> None:
        """Drop the compiled code of graphs; the next call of each graph compiles it again, with the same backend."""
        self._dropped_backends |= {id(m.backend): m.backend for m in members}
        for code in {m.code for m in members}:
            torch_compat.reset_code(code)
            # Strides that differed between equal blocks would now be dynamic, and the graph not the planned one.
            torch_compat.forget_sizes(code)


def _must_agree(member: Member) -> bool:
    """Return whether ranks could hang if their plans for a graph differed, because plans may recompute collectives."""
    if not member.options.with_others:
        return False
    return member.joint is None or any(map(is_collective, member.joint.graph.nodes))


def _user_request(member: Member) -> PlanRequest:
    """Return the planning options that the user gave for a graph, without plans that remat made afterwards."""
    request = member.options.request
    if not member.options.graphs.replanned:
        return request
    return replace(request, plan=None, plans_others=False)


def _planned(
    recorded: StepRuns,
    ran: Sequence[Member],
    request: PlanRequest,
    peak_bytes: int,
    *,
    sharded: bool,
) -> tuple[PlanSet, str, list[int]]:
    """Plan the graphs of a step together, with only a few distinct plans for the runs of each graph."""
    keys, effort = [m.key for m in ran], DEFAULT.several
    # Consecutive runs of a graph are planned as one; up to `parts`, each run is planned by itself.
    runs, nth = Counter(keys), [keys[:k].count(key) for k, key in enumerate(keys)]
    groups = [
        k * min(runs[key], effort.parts) // runs[key] for k, key in zip(nth, keys, strict=True)
    ]
    while True:
        names = [*zip(keys, groups, strict=True)]
        number = {name: k for k, name in enumerate(dict.fromkeys(names))}
        part_of = [number[name] for name in names]
        parts = [ran[part_of.index(k)] for k in number.values()]
        joints = recorded.joints([m.joint for m in parts if m.joint is not None], (), part_of)
        plans, least = _planned_parts(joints, parts, request, peak_bytes, sharded=sharded)
        saved = dict[Key, dict[Decision, int]]()
        for (key, _), k in number.items():
            saved.setdefault(key, {})[plans[k].decision] = plans[k].saved_bytes
        if max(map(len, saved.values())) <= effort.kinds:
            return plans, least, part_of
        # Decisions that save about as many bytes are replaced by one decision.
        levels = {key: [*of_decision.values()] for key, of_decision in saved.items()}
        groups = [
            _group(levels[key], plans[k].saved_bytes, effort.kinds)
            for key, k in zip(keys, part_of, strict=True)
        ]


def _group(levels: Iterable[int], level: int, most: int) -> int:
    """Divide the numbers ``levels`` into groups at the widest gaps; return the index of the group with ``level``."""
    distinct = sorted({*levels})
    gaps = sorted(pairwise(distinct), key=lambda gap: gap[0] - gap[1])
    return sum(above <= level for _, above in gaps[: most - 1])


def _planned_parts(
    joints: Sequence[JointGraph],
    members: Sequence[Member],
    request: PlanRequest,
    peak_bytes: int,
    *,
    sharded: bool,
) -> tuple[PlanSet, str]:
    """Plan graphs of a step together, one plan per graph; return the plans, and a text if these exceed the budget."""
    from remat.planning.set_planner import set_planner

    planner, limit = set_planner(joints, request), request.budget.peak_bytes or 0
    now = planner.peak_of([m.decision for m in members])
    # Fused code may take more than predicted, and outputs that the user holds take more. Shards take less.
    offset, less = now - peak_bytes, sharded or members[0].options.lower == "inductor"
    room = limit + (offset if sharded else min(0, offset))
    room -= limit // DEFAULT.compiling.margin if less else 0
    try:
        return planner.within_peak(Budget(peak_bytes=max(1, room))), ""
    except BudgetError as error:
        plans = planner.within_peak(Budget(peak_share=0.0))
        if plans.peak_bytes >= now:
            raise
        return (
            plans,
            f". No plans within the budget were found, so those with the least peak run: {error}",
        )


def _with_others(plans: PlanSet, before: PlanSet | None) -> PlanSet:
    """Return the plans of a step, and the earlier plans of graphs that run only in other steps."""
    if before is None:
        return plans
    own = {plan.fingerprint for plan in plans}
    others = [
        (plan, runs)
        for plan, runs in zip(before, before.runs or (1,) * len(before), strict=True)
        if plan.fingerprint not in own
    ]
    runs = (*(plans.runs or (1,) * len(plans)), *(runs for _, runs in others))
    # The numbers of the set are those of one step only, so the budget of the set is left empty.
    return replace(plans, plans=(*plans, *(plan for plan, _ in others)), runs=runs, budget="")
