"""Plan all graphs of one step, such as those of a model with graph breaks, under one budget.

Planning chooses one decision from the frontier of each graph, so that the graphs together stay within the budget at the
least cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from remat.errors import BudgetError, PlanError
from remat.graph.joint import JointGraph, outputs_of, primals_of
from remat.graph.memory.liveness_of_graphs import highest_of_graphs
from remat.graph.memory.storages import storage_bytes
from remat.graph.problems.lowering import Decision
from remat.graph.verify import Split
from remat.passes.decide.budgeted import LeastDecision
from remat.passes.decide.least_causes import least_causes
from remat.passes.decide.policies import check_matched
from remat.planning.context import GraphContext, check_joint
from remat.planning.plan_set import PlanSet
from remat.planning.planner import Planner
from remat.planning.request import PlanRequest
from remat.planning.search.candidates import Candidate, combine
from remat.planning.search.effort import DEFAULT
from remat.planning.search.offload_costs import check_host_memory
from remat.planning.search.proposals import search_of
from remat.planning.search.search import Search
from remat.planning.search.several_graphs import SeveralGraphs
from remat.units import Budget


def plan_graphs(joints: Sequence[JointGraph], request: PlanRequest) -> PlanSet:
    """Plan all graphs of a step under one budget, by choosing one decision from the frontier of each graph.

    Args:
        joints: the graphs in the order in which they run, as ``remat.capture(…, fullgraph=False)`` returns
            them.
        request: the options. The budget limits what all graphs together save, or the peak of the whole step. A ratio of
            saved bytes refers to what the runtime-optimal partitions of all graphs save. The user's code may set a
            ratio as the budget of a single graph. Under a requested budget on saved bytes, only the ratio from the
            user's code limits such a graph. A requested number of bytes is reduced by what graphs with such a ratio
            save. A requested ratio applies to graphs without a ratio from the user's code. Under a requested budget on
            the peak, the ratio from the user's code applies in addition.

    Returns:
        The plans of all graphs, with bytes and costs of the whole step.

    Raises:
        BudgetError: the graphs together cannot save as few bytes as the budget allows, or no plans were found within
            the peak.
        PlanError: ``joints`` is empty, or does not hold all graphs of one step in order.
        ProblemError: the request has a saved plan, a pipeline or chunks of the loss, which are for a single graph; or
            an entry of ``joints`` is no joint graph.
    """
    planner = set_planner(joints, request)
    return planner.within_peak() if request.budget.on_peak else planner.within_bytes()


def set_planner(joints: Sequence[JointGraph], request: PlanRequest) -> SetPlanner:
    """Return the planner of all graphs of a step; arguments and errors are those of `plan_graphs`."""
    request.check("several graphs")
    if not joints:
        raise PlanError("there are no graphs to plan: remat.plan was given an empty list")
    for joint in joints:
        check_joint(joint)
    # Passed values are matched by position, so another order would plan another step.
    _refuse_strange_order(joints)
    if request.policies:
        check_matched(request.policies, [joint.graph for joint in joints], joints[0].name)
        # A pattern may match modules of one graph only, so graphs are not checked one by one.
        request = replace(request, has_matched=True)
    return SetPlanner(joints, request)


class SetPlanner:
    """Planner that chooses one decision for each graph of a step, so that all together stay within one budget."""

    def __init__(self, joints: Sequence[JointGraph], request: PlanRequest) -> None:
        self._request, self._passed = request, _Passed(joints)
        contexts = [GraphContext.of(joint, request) for joint in joints]
        self._runs = [joint.runs for joint in joints]
        searches = [*map(search_of, contexts)]
        if request.host_memory is not None:
            parts = self._parts_of_host(searches, request.host_memory)
            contexts = [
                c.with_request(replace(c.request, host_memory=n))
                for c, n in zip(contexts, parts, strict=True)
            ]
            searches = [*map(search_of, contexts)]
        self._planners, self._graphs = [*map(Planner, searches)], SeveralGraphs(searches)

    def within_bytes(self) -> PlanSet:
        """Plan all graphs of a step under a budget on saved bytes: a number, or a ratio as in `plan_graphs`."""
        planners, passed, budget = self._planners, self._passed, self._request.budget
        graphs = self._graphs
        # If the user's code sets a budget for a graph, only this budget counts for the graph. The requested budget
        # counts for the other graphs.
        by_region = {
            k: planner.decide(Budget(share=1.0))
            for k, planner in enumerate(planners)
            if planner.context.region_budget is not None
        }
        free = [p.search for k, p in enumerate(planners) if k not in by_region]
        runs = [r for k, r in enumerate(self._runs) if k not in by_region]

        def with_own(decided: Iterable[Candidate]) -> list[Candidate]:
            others = iter(decided)
            return [by_region[k] if k in by_region else next(others) for k in range(len(planners))]

        region_bytes = sum(self._runs[k] * d.saved_bytes for k, d in by_region.items())
        smallest = with_own(s.decisions.at(s.context.least_bytes) for s in free)
        least = graphs.saved_bytes(smallest) + passed.saved_bytes(smallest)
        full_bytes = (
            sum(r * s.context.full_bytes for r, s in zip(runs, free, strict=True))
            + passed.all_bytes
        )
        shared = 0 if budget.nbytes is not None else region_bytes
        limits = {"full_bytes": max(full_bytes, least - shared), "least": least - shared}
        why = _why_least(free) if budget.below(**limits) else ("", "")
        capacity = shared + budget.capacity(**limits, why=why)
        # Frontiers do not count activations that one graph passes to another, so their bytes are reserved. The first
        # round reserves the bytes of all of them; each further round, of those that the last decisions save.
        best, reserve = smallest, passed.all_bytes
        room = capacity - region_bytes
        # If the cheapest decisions of all graphs fit together, bytes need not be distributed.
        most = [max(s.context.hull.ends[1].saved_bytes, s.context.least_bytes) for s in free]
        cheapest = sum(r * b for r, b in zip(runs, most, strict=True)) + passed.all_bytes <= room
        is_budget_1 = full_bytes == room
        if full_bytes <= room:
            best = with_own(s.decisions.at_budget_one for s in free)
        if cheapest and not is_budget_1:
            best = with_own(s.decisions.at(c) for s, c in zip(free, most, strict=True))
        for _ in range(0 if cheapest or is_budget_1 or not free else DEFAULT.several.shared):
            shares = _shares(free, runs, room - reserve)
            if shares is None:
                break
            candidates = with_own(s.decisions.at(c) for s, c in zip(free, shares, strict=True))
            passed_bytes = passed.saved_bytes(candidates)
            fits = graphs.saved_bytes(candidates) + passed_bytes <= capacity
            if fits and graphs.cost(candidates) < graphs.cost(best):
                best = candidates
            # All reserved bytes are used, so another round would distribute the same bytes again.
            if passed_bytes >= reserve:
                break
            reserve = passed_bytes
        return self._finished(best, capacity, budget)

    def peak_of(self, decisions: Sequence[Decision]) -> int:
        """Return the simulated peak of the step under one decision for each graph, in bytes."""
        lowered = (p.context.lowered for p in self._planners)
        decided = [Candidate.of(low, d, 0) for low, d in zip(lowered, decisions, strict=True)]
        return self._graphs.peak(decided)

    def within_peak(self, budget: Budget | None = None) -> PlanSet:
        """Plan all graphs of a step under the peak budget ``budget``, or the request's budget if ``budget`` is None."""
        budget = budget or self._request.budget
        label, count = budget.label, len(self._planners)
        if self._request.hooks is not None:
            raise BudgetError(
                f"budget is {label}, one peak over {count} graphs, beside hooks on saved "
                "tensors: how much they hold between the graphs is not known; leave the hooks out, or give the "
                "budget in bytes or as a share"
            )
        best = self._graphs.search_within(budget)
        saved = self._graphs.saved_bytes(best) + self._passed.saved_bytes(best)
        return self._finished(best, max(saved, self._full_bytes), budget)

    def _parts_of_host(self, searches: Sequence[Search], host_memory: int) -> list[int]:
        """Divide the host's memory among the graphs of a step; return the bytes that each graph may use."""
        # The host's memory holds the values of all runs when forward ends, so bytes count once for each run. What remains
        # after the values that must be offloaded is divided by the bytes that each graph saves at budget 1.
        runs, must = self._runs, []
        for search in searches:
            tagged = search.context.tagged
            saved = set(search.decisions.at_budget_one.decision.saved) if tagged else ()
            values = (t.value for t in tagged if t.must and t.value.name in saved)
            must.append(sum(value.nbytes for value in values))
        rest = max(0, host_memory - sum(r * n for r, n in zip(runs, must, strict=True)))
        full_bytes = [s.context.full_bytes for s in searches]
        total = max(1, sum(r * n for r, n in zip(runs, full_bytes, strict=True)))
        return [m + rest * n // total for m, n in zip(must, full_bytes, strict=True)]

    def _finished(self, decided: Sequence[Candidate], capacity: int, budget: Budget) -> PlanSet:
        """Build the plan of each graph from the graph's decision; compute bytes and costs of the whole step."""
        planners, request, passed = self._planners, self._request, self._passed
        decided = [p.search.offloads.with_tagged(d) for p, d in zip(planners, decided, strict=True)]
        offloaded_bytes = sum(r * d.host_bytes for r, d in zip(self._runs, decided, strict=True))
        check_host_memory(request.host_memory, offloaded_bytes, f"{len(planners)} graphs")
        # A ratio of the peak stands for bytes of the whole step, so it limits no graph alone.
        each = zip(planners, decided, strict=True)
        plans = [replace(p.finish(d, budget, peak_limit=0), search="") for p, d in each]
        partitioned = [
            Split(joint=p.context.state.joint, forward=plan.forward, backward=plan.backward)
            for p, plan in zip(planners, plans, strict=True)
        ]
        baselines = [p.baseline for p in planners]
        has_baseline = request.hooks is None and all(b.peak_bytes for b in baselines)
        # With policies by module, the step without remat is not planned, so its peak is unknown.
        has_baseline = has_baseline and all(p.context.state.plain is None for p in planners)
        plan_set = PlanSet(
            plans=tuple(plans),
            passed_bytes=passed.saved_bytes(decided),
            capacity=capacity,
            peak_bytes=max(map(max, highest_of_graphs(partitioned))),
            budget=str(budget),
            runs=tuple(self._runs),
            without_peak_bytes=self._graphs.peak(
                [p.search.decisions.without_remat for p in planners]
            )
            if has_baseline
            else 0,
        )
        if has_baseline and not budget.on_peak and capacity < self._full_bytes:
            plan_set.before_after.warn_if_not_lower(
                f"budget {budget.label} for {len(plans)} graphs",
                capacity / self._full_bytes,
                of_graph=False,
                is_estimated=False,
            )
        return plan_set

    @property
    def _full_bytes(self) -> int:
        """Bytes that a step saves if each run of each graph saves its runtime-optimal partition."""
        full_bytes = sum(
            r * p.context.full_bytes for r, p in zip(self._runs, self._planners, strict=True)
        )
        return full_bytes + self._passed.all_bytes


def _refuse_strange_order(joints: Sequence[JointGraph]) -> None:
    """Raise an error unless the given graphs are all graphs of one step, given in the order in which they run."""
    for joint in joints:
        if joint.runs not in (1, len(joint.turns)):
            raise PlanError(
                f"'{joint.name}' runs {joint.runs} times in a step, and does not say in which order; capture the step "
                "again"
            )
    turns = sorted((turn, k) for k, joint in enumerate(joints) for turn in joint.turns)
    outputs = [joints[k].num_fwd_outputs for _, k in turns]
    for place, (turn, k) in enumerate(turns):
        earlier = all(at < place and output < outputs[at] for _, at, output in turn.received)
        if turn.at != place or not earlier:
            raise PlanError(
                f"run {turn.at} of the step, of graph {k} of {len(joints)}, '{joints[k].name}', comes at place {place} of "
                "the given graphs, or receives an output that no earlier run makes; expected all graphs of one step as "
                "remat.capture(…, fullgraph=False) returns them"
            )
    for k, joint in enumerate(joints):
        for _, producer, output in joint.received:
            if producer >= k or output >= joints[producer].num_fwd_outputs:
                raise PlanError(
                    f"graph {k} of {len(joints)}, '{joint.name}', receives output {output} of graph {producer}, "
                    "which does not come before it here; expected all graphs of one step in the order in which "
                    "remat.capture(…, fullgraph=False) returns them"
                )


def _why_least(searches: Sequence[Search]) -> tuple[str, str]:
    """Return two error texts: why a step's graphs cannot save fewer bytes, and what would let them save fewer."""
    texts = [
        least_causes(s.context.state, s.context.state.get(LeastDecision()))
        for s in searches
        if s.context.least_bytes
    ]
    because, todo = ([text[k] for text in texts if text[k]] for k in (0, 1))
    return "; ".join(dict.fromkeys(because)), ", or ".join(dict.fromkeys(todo))


def _shares(searches: Sequence[Search], runs: Sequence[int], room: int) -> list[int] | None:
    """Divide a limit of ``room`` saved bytes among graphs at the least total cost; None if the graphs need more."""

    def extend(k: int, saved: int, cost: int, decided: Candidate) -> tuple[int, int] | None:
        saved += runs[k] * decided.saved_bytes
        return (saved, cost + runs[k] * decided.cost) if saved <= room else None

    choices = combine([s.decisions.pareto() for s in searches], extend)
    if not choices:
        return None
    shares = [decided.saved_bytes for decided in choices[-1][2]]
    # The remaining bytes go to the graph that recomputes most.
    left = room - sum(r * b for r, b in zip(runs, shares, strict=True))
    needs = [r * s.decisions.at(b).cost for r, s, b in zip(runs, searches, shares, strict=True)]
    neediest = max(range(len(searches)), key=lambda i: (needs[i], -i))
    shares[neediest] += left // runs[neediest]
    return shares


class _Passed:
    """The activations that one graph of a step passes to a later graph, and the bytes of each activation."""

    def __init__(self, joints: Sequence[JointGraph]) -> None:
        self._bytes: dict[tuple[int, int], int] = {}
        self._producers: dict[tuple[int, int], str] = {}
        self._readers: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for k, joint in enumerate(joints):
            primals = primals_of(joint)
            for position, producer, output in joint.received:
                value: fx.Node = outputs_of(joints[producer].graph)[output]
                key = (producer, output)
                self._bytes[key] = storage_bytes(value.meta.get("val"))
                self._producers[key] = value.name
                self._readers.setdefault(key, []).append((k, primals[position].name))

    @property
    def all_bytes(self) -> int:
        """Bytes of all activations that one graph of the step hands to a later graph."""
        return sum(self._bytes.values())

    def saved_bytes(self, decided: Sequence[Candidate]) -> int:
        """Return the bytes of the passed activations that any graph saves; each activation is counted once."""
        saved = [set(d.decision.saved) for d in decided]
        return sum(
            nbytes
            for key, nbytes in self._bytes.items()
            if self._producers[key] in saved[key[0]]
            or any(name in saved[k] for k, name in self._readers[key])
        )
