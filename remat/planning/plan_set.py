"""One byte budget for all graphs of a step: a model with graph breaks, planned together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from torch import fx

from remat.errors import BudgetError, PlanError
from remat.graph.joint import JointGraph, output_node
from remat.graph.storages import storage_bytes
from remat.passes.decide.budgeted import RegionBudget, least_decision
from remat.passes.decide.least_causes import least_causes
from remat.planning.frontier import Decided, Sweep
from remat.planning.pipelines import prepare
from remat.planning.plan import Plan, format_cost
from remat.torch_compat import pytree
from remat.units import Budget, format_bytes

if TYPE_CHECKING:
    from remat.graph.costs import CostModel
    from remat.passes.packing.pairs import SavedTensorHooks
    from remat.solvers.base import Solver

#: Version of the JSON form.
JSON_VERSION = 1
#: How often the budget that unused room leaves is handed out again, at most.
ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSet(Sequence[Plan]):
    """The plans of all graphs of one step, under one budget.

    Attributes:
        plans: one for each graph, in the order in which the graphs run.
        passed_bytes: bytes of the activations that one graph hands to a later one and that either
            keeps for backward, each counted once.
        capacity: the budget in bytes.
    """

    plans: tuple[Plan, ...]
    passed_bytes: int
    capacity: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that all graphs together keep from forward to backward."""
        return sum(p.saved_bytes for p in self.plans) + self.passed_bytes

    @property
    def recompute_cost(self) -> int:
        """Summed cost of what runs twice, in the unit of the plans."""
        return sum(p.recompute_cost for p in self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    @overload
    def __getitem__(self, i: int) -> Plan: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, i: int | slice) -> Plan | tuple[Plan, ...]:
        return self.plans[i]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def explain(self) -> str:
        """All plans as text, under a line for their sum."""
        unit = self.plans[0].unit
        head = (
            f"{len(self)} graphs: {format_bytes(self.saved_bytes)} saved of "
            f"{format_bytes(self.capacity)} allowed, {format_bytes(self.passed_bytes)} of it passed "
            f"from graph to graph; {format_cost(self.recompute_cost, unit)} recomputed"
        )
        return "\n\n".join([head, *(p.explain() for p in self.plans)])

    def to_json(self) -> str:
        """The plans as JSON, without their modules; `torch.compile` takes it as ``options["plan"]``."""
        data = {
            "remat_plans": JSON_VERSION,
            "capacity": self.capacity,
            "passed_bytes": self.passed_bytes,
            "plans": [json.loads(p.to_json()) for p in self.plans],
        }
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PlanSet:
        """Reads what `to_json` wrote.

        Raises:
            PlanError: the text is no set of plans, cut off, of a newer version, or has wrong fields.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise PlanError(f"this is no saved set of plans: {error}") from None
        if not isinstance(data, dict) or "remat_plans" not in data:
            raise PlanError(
                "this is no saved set of plans: expected JSON with the key 'remat_plans'"
            )
        if data["remat_plans"] != JSON_VERSION:
            raise PlanError(
                f"this set of plans is of version {data['remat_plans']!r}; this remat reads version "
                f"{JSON_VERSION}"
            )
        wrong = sorted({"remat_plans", "capacity", "passed_bytes", "plans"} ^ data.keys())
        numbers = [data.get("capacity"), data.get("passed_bytes")]
        if wrong or any(type(x) is not int for x in numbers) or not isinstance(data["plans"], list):
            raise PlanError(
                "saved set of plans: expected integers 'capacity' and 'passed_bytes' and a list "
                f"'plans'; missing or unknown: {wrong}"
            )
        if not data["plans"]:
            raise PlanError("saved set of plans: it holds no plan")
        plans = tuple(Plan.from_json(json.dumps(p)) for p in data["plans"])
        return cls(plans=plans, passed_bytes=data["passed_bytes"], capacity=data["capacity"])


def plan_together(
    joints: Sequence[JointGraph],
    *,
    budget: Budget,
    solver: Solver,
    cost: CostModel,
    time_limit: float | None = None,
    count_outputs: bool = False,
    hooks: SavedTensorHooks | None = None,
    reread_inputs: bool = True,
) -> PlanSet:
    """Plans all graphs of a step under one budget, by merging their frontiers.

    Args:
        joints: the graphs, in the order in which they run: ``remat.capture(…, fullgraph=False)``.
        budget: bytes for all of them together, or a share of what their runtime-optimal partitions
            save together. A graph whose code sets a budget of its own is decided by that alone:
            its bytes are taken off first, and a share is one of the other graphs.
        solver: as in `remat.plan`.
        cost: as in `remat.plan`.
        time_limit: seconds for each decision; None: no clock.
        count_outputs: as in `remat.plan`.
        hooks: as in `remat.plan`.
        reread_inputs: as in `remat.plan`.

    Raises:
        BudgetError: no plans save as little, or the budget is one on the peak.
        PlanError: there are no graphs.
    """
    if not joints:
        raise PlanError("there are no graphs to plan: remat.plan was given an empty list")
    if budget.peak_bytes is not None:
        raise BudgetError(
            "a budget on the peak is one for a single graph; several graphs share bytes or a share "
            "of the saved activations"
        )
    sweeps = [
        Sweep(
            prepare(j, count_outputs=count_outputs, hooks=hooks, reread_inputs=reread_inputs),
            fingerprint=j.fingerprint,
            solver=solver,
            cost=cost,
            time_limit=time_limit,
        )
        for j in joints
    ]
    passed = _Passed(joints)
    own = {k: d for k, s in enumerate(sweeps) if (d := _by_its_region(s)) is not None}
    free = [s for k, s in enumerate(sweeps) if k not in own]

    def with_own(decided: Iterable[Decided]) -> list[Decided]:
        others = iter(decided)
        return [own[k] if k in own else next(others) for k in range(len(sweeps))]

    taken = sum(d.saved_bytes for d in own.values())
    smallest = with_own(s.at(s.least_bytes) for s in free)
    least = sum(d.saved_bytes for d in smallest) + passed.kept(smallest)
    full = sum(s.full_bytes for s in free) + passed.all_bytes
    shared = 0 if budget.nbytes is not None else taken
    limits = {"full": max(full, least - shared), "least": least - shared}
    why = _why_least(free) if budget.below(**limits) else ("", "")
    capacity = shared + budget.capacity(**limits, why=why)
    best, reserve = smallest, passed.all_bytes
    room = capacity - taken
    # Where every graph's cheapest decision fits, there is nothing to share out.
    most = [max(s.hull.ends[1].saved_bytes, s.least_bytes) for s in free]
    cheapest = sum(most) + passed.all_bytes <= room
    if cheapest:
        best = with_own(s.at(c) for s, c in zip(free, most, strict=True))
    elif full <= room:
        best = with_own(s.at(s.full_bytes) for s in free)
    for _ in range(0 if cheapest or not free else ROUNDS):
        shares = _shares(free, room - reserve)
        if shares is None:
            break
        found = with_own(s.at(c) for s, c in zip(free, shares, strict=True))
        kept = passed.kept(found)
        fits = sum(d.saved_bytes for d in found) + kept <= capacity
        if fits and sum(d.cost for d in found) < sum(d.cost for d in best):
            best = found
        if kept >= reserve:
            break
        reserve = kept
    return PlanSet(
        plans=tuple(s.finish(d, budget=str(budget)) for s, d in zip(sweeps, best, strict=True)),
        passed_bytes=passed.kept(best),
        capacity=capacity,
    )


def _why_least(sweeps: Sequence[Sweep]) -> tuple[str, str]:
    """Why the graphs together cannot save less, and what would lower that, each reason once."""
    texts = [least_causes(s.state, least_decision(s.state)) for s in sweeps if s.least_bytes]
    because, todo = ([text[k] for text in texts if text[k]] for k in (0, 1))
    return "; ".join(dict.fromkeys(because)), ", or ".join(dict.fromkeys(todo))


def _by_its_region(sweep: Sweep) -> Decided | None:
    """The decision for a graph whose code sets a budget of its own; None where it sets none."""
    own = sweep.state.get(RegionBudget())
    if own is None:
        return None
    capacity = Budget(share=own).capacity(full=sweep.full_bytes, least=sweep.least_bytes)
    decided = sweep.at(capacity)
    return replace(decided, choice=replace(decided.choice, region_budget=own))


def _shares(sweeps: Sequence[Sweep], room: int) -> list[int] | None:
    """How many bytes each graph gets, by the cheapest choice of one point on each frontier.

    None where not even the smallest points fit together.
    """
    merged: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for sweep in sweeps:
        points = [(d.saved_bytes, d.cost) for d in sweep.pareto()]
        options = sorted(
            (nbytes + b, cost + c, (*chosen, b))
            for nbytes, cost, chosen in merged
            for b, c in points
            if nbytes + b <= room
        )
        merged = []
        for option in options:
            if not merged or option[1] < merged[-1][1]:
                merged.append(option)
        every = max(1, len(merged) // 2_000)  # more than that tells nothing apart
        merged = [*merged[::every], *([merged[-1]] if merged and every > 1 else [])]
    if not merged:
        return None
    shares = list(merged[-1][2])
    # What is left goes to whom it helps: the graph that recomputes most.
    left = room - sum(shares)
    neediest = max(range(len(sweeps)), key=lambda i: (sweeps[i].at(shares[i]).cost, -i))
    shares[neediest] += left
    return shares


class _Passed:
    """The activations that one graph hands to a later one."""

    def __init__(self, joints: Sequence[JointGraph]) -> None:
        self._bytes: dict[tuple[int, int], int] = {}
        self._made: dict[tuple[int, int], str] = {}
        self._read: dict[tuple[int, int], list[tuple[int, str]]] = {}
        for k, joint in enumerate(joints):
            primals = [n for n in joint.graph.nodes if n.op == "placeholder"]
            for position, producer, output in joint.received:
                if producer >= k or position >= len(primals):
                    continue
                outputs: Any = output_node(joints[producer].graph).args[0]
                made: fx.Node = pytree.tree_leaves(outputs)[output]
                key = (producer, output)
                self._bytes[key] = storage_bytes(made.meta.get("val"))
                self._made[key] = made.name
                self._read.setdefault(key, []).append((k, primals[position].name))

    @property
    def all_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self._bytes.values())

    def kept(self, decided: Sequence[Decided]) -> int:
        """Bytes of those that some graph keeps for backward, each counted once."""
        saved = [set(d.decision.saved) for d in decided]
        return sum(
            nbytes
            for key, nbytes in self._bytes.items()
            if self._made[key] in saved[key[0]]
            or any(name in saved[k] for k, name in self._read[key])
        )
