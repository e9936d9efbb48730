"""Plans: the decision for one joint graph, its modules, and its figures by the one yardstick."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from remat.errors import PlanError, RematError
from remat.graph.collection import without_collection
from remat.graph.costs import CostModel
from remat.graph.liveness import own_outputs, saved_storages, simulate_peak, timeline
from remat.graph.lowering import Decision, SavedKind
from remat.graph.refills import told
from remat.graph.verify import Split, verify
from remat.passes.core.choice import DecisionInfo
from remat.passes.core.state import State
from remat.report.explanation import counted, explain
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.hull import Hull
from remat.units import Budget, bytes_of_share, format_bytes

#: Version of the JSON form; a newer one is refused.
JSON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Plan:
    """What one training step keeps, what it computes again, and what that comes to.

    Attributes:
        saved: names of the joint graph's nodes whose values forward hands to backward, inputs and
            outputs included.
        snapshots: inputs of which forward keeps a copy, because it mutates them, or because they may
            be refilled before backward.
        recomputed: names of the nodes that run in forward and again in backward.
        saved_bytes: bytes of the distinct storages that forward hands to backward, beyond inputs
            and outputs.
        peak_bytes: most bytes alive at once over forward, then backward; inputs and parameters
            included.
        recompute_cost: summed cost of ``recomputed``, in ``unit``.
        recompute_bound: a proven lower bound on the cost of every plan that saves no more than
            ``capacity`` bytes, in ``unit``.
        unit: unit of both costs.
        capacity: the budget in bytes.
        full_bytes: bytes that the runtime-optimal partition saves: what a ratio is a share of.
        least_bytes: the least bytes that any plan saves.
        budget: the budget as it was asked for.
        solver: what decided: a solver, or ``min-cut``, the cut by rules, where no solver was asked or
            that costs less.
        cost: the cost model.
        items: nodes that the solver decided, 0 where none was asked.
        deterministic: False only if a clock, not counted work, ended the search.
        solve_s: seconds that the solver took.
        graph: name of the joint graph.
        fingerprint: digest of the joint graph that the plan is for.
        fallbacks: calls that the cost model could not price its own way, each with the reason.
        reread_inputs: whether backward may read inputs again that are no parameters or buffers.
        reread: names of the inputs that it does read again although eager autograd would not have
            saved them: who refills one between forward and backward is refused by autograd.
        lower: the lowering that the joint graph was traced for; empty in files written before it
            was recorded.
        torch: the version of PyTorch that traced it; likewise.
        operators: digest of the operators of that graph, in their order; likewise.
        region_budget: the share that the code set by ``region_activation_memory_budget``, which held
            instead of a share and beside bytes; empty where it set none.
        least_because: why no plan saves less than ``least_bytes``, where a share of less was raised
            to that; else empty.
    """

    saved: tuple[str, ...]
    snapshots: tuple[str, ...]
    recomputed: tuple[str, ...]
    saved_bytes: int
    peak_bytes: int
    recompute_cost: int
    recompute_bound: int
    unit: str
    capacity: int
    full_bytes: int
    least_bytes: int
    budget: str
    solver: str
    cost: str
    items: int
    deterministic: bool
    solve_s: float
    graph: str
    fingerprint: str
    fallbacks: tuple[str, ...] = ()
    reread_inputs: bool = True
    reread: tuple[str, ...] = ()
    lower: str = ""
    torch: str = ""
    region_budget: str = ""
    least_because: str = ""
    operators: str = ""
    _modules: tuple[fx.GraphModule, fx.GraphModule] | None = None
    _problem: GraphProblem | None = None
    _again: Callable[[], Plan] | None = None

    @property
    def forward(self) -> fx.GraphModule:
        """Forward: its own outputs, then what it saves."""
        return self._pair()[0]

    @property
    def backward(self) -> fx.GraphModule:
        """Backward: what was saved and the tangents in, one gradient or None per input out."""
        return self._pair()[1]

    @property
    def gap(self) -> int:
        """How far from optimal the plan can be at most, in ``unit``."""
        return self.recompute_cost - self.recompute_bound

    @property
    def decision(self) -> Decision:
        return Decision(saved=self.saved, snapshots=self.snapshots)

    def __repr__(self) -> str:
        return (
            f"<plan for {self.graph}: {format_bytes(self.saved_bytes)} saved, "
            f"{format_cost(self.recompute_cost, self.unit)} recomputed, by {self.solver}>"
        )

    def _pair(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._complete()
        if self._modules is None:
            raise PlanError(
                "this plan was read from a file and has no modules; give it its graph with "
                "remat.plan(joint, plan=plan)"
            )
        return self._modules

    def _complete(self) -> None:
        """Makes the modules of a plan that came out of a cache, now that somebody asks for them."""
        if self._modules is None and self._again is not None:
            made = self._again()
            object.__setattr__(self, "_modules", made._modules)
            object.__setattr__(self, "_problem", made._problem)

    def to_json(self) -> str:
        """The plan as JSON, without its modules."""
        fields = {k: getattr(self, k) for k in _JSON_FIELDS}
        return json.dumps({"remat_plan": JSON_VERSION, **fields}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads a plan that `to_json` wrote.

        Raises:
            PlanError: the text is no plan, cut off, of a newer version, or has wrong fields.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise PlanError(f"this is not a saved plan: {error}") from None
        if not isinstance(data, dict) or "remat_plan" not in data:
            raise PlanError("this is not a saved plan: expected JSON with the key 'remat_plan'")
        version = data.pop("remat_plan")
        if version != JSON_VERSION:
            raise PlanError(
                f"this plan is of version {version!r}; this remat reads version {JSON_VERSION}"
            )
        data = {**_LATER_FIELDS, **data}  # an older plan says nothing of them
        missing = sorted(_JSON_FIELDS.keys() - data.keys())
        unknown = sorted(data.keys() - _JSON_FIELDS.keys())
        if missing or unknown:
            raise PlanError(f"saved plan: fields missing: {missing}, unknown: {unknown}")
        values: dict[str, Any] = {}
        for name, kind in _JSON_FIELDS.items():
            value = data[name]
            if kind is tuple and isinstance(value, list) and all(type(v) is str for v in value):
                value = tuple(value)
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise PlanError(
                    f"saved plan: field '{name}' is {type(value).__name__}, expected {kind.__name__}"
                )
            values[name] = value
        return cls(**values)

    def explain(self) -> str:
        """The plan as text: its figures, each kept activation, and what is recomputed and why.

        A kept activation is shown with its bytes, its source line, and what recomputing it alone
        would cost. What repeats from layer to layer is one row.
        """
        with contextlib.suppress(RematError):  # its figures are there even without its modules
            self._complete()
        share = f" ({self.saved_bytes / self.full_bytes:.0%} of" if self.full_bytes else " (of"
        lines = [
            f"plan for {self.graph}, budget {Budget.parse(self.budget).label}, cost model {self.cost}",
            f"  saved       {format_bytes(self.saved_bytes)}{share} "
            f"{format_bytes(self.full_bytes)} that the runtime-optimal partition saves; "
            f"{format_bytes(self.capacity)} allowed, {format_bytes(self.least_bytes)} the least possible)",
            f"  recomputed  {self.recomputed_told}",
            f"  peak        {format_bytes(self.peak_bytes)}, inputs and parameters included",
            f"  decided by  {self.solver}"
            + (f" over {self.items} items in {self.solve_s:.3f} s" if self.items else ""),
        ]
        if raised := self.raised_told:
            lines.insert(2, f"  raised      {raised}")
        if self.region_budget:
            lines.insert(1, self._region_told())
        if self.fallbacks:
            lines += ["  not priced by the cost model itself:"]
            lines += [f"    {text}" for text in self.fallbacks]
        if self.reread:
            lines += [
                "  reads inputs again in backward that eager autograd would not have saved: who refills",
                "  one between forward and backward gets an error; reread_inputs=False leaves them alone",
            ]
            lines += [f"    {self._input_told(name)}" for name in self.reread]
        if self._modules is not None and self._problem is not None:
            show_cost = partial(format_cost, unit=self.unit)
            lines += explain(self.forward, self._problem, self.recomputed, show_cost)
        return "\n".join(lines)

    @property
    def raised_told(self) -> str:
        """What a share was raised to and why, for people; empty where it was not raised."""
        share = Budget.parse(self.region_budget or self.budget)
        full, least = max(self.full_bytes, self.least_bytes), self.least_bytes
        known = self.least_because and share.share is not None and self.capacity == least
        if not known or not share.below(full=full, least=least):
            return ""
        return (
            f"{share.label} of {format_bytes(full)} is {format_bytes(bytes_of_share(share.share or 0.0, full))}; "
            f"{format_bytes(least)} is the least possible, because {self.least_because}"
        )

    @property
    def recomputed_told(self) -> str:
        """How much runs twice and what it costs, for people."""
        nodes = counted(len(self.recomputed), "node")
        if not self.recompute_cost:
            return f"{nodes}, at no cost" if self.recomputed else "nothing"
        bound = format_cost(self.recompute_bound, self.unit)
        return (
            f"{nodes}, views included, {format_cost(self.recompute_cost, self.unit)} "
            f"(no plan within the budget needs less than {bound})"
        )

    def _region_told(self) -> str:
        share = Budget.parse(self.region_budget)
        own = share.capacity(full=max(self.full_bytes, self.least_bytes), least=self.least_bytes)
        shared = Budget.parse(self.budget).share is not None
        return (
            f"  region      the code sets {self.region_budget} for the whole graph by "
            f"region_activation_memory_budget, {format_bytes(own)}; it holds "
            f"{'instead of' if shared else 'beside'} the budget"
        )

    def _input_told(self, name: str) -> str:
        return name if self._modules is None else told(self._modules[0].graph, name)

    def plot(self, path: str | Path) -> None:
        """Draws memory over the step and what fills its peak, as ``.svg`` or ``.png``.

        Raises:
            PlanError: the plan was read from a file, or the picture cannot be written.
            ProblemError: the path has another suffix.
        """
        from remat.report.memory_plot import draw_step

        forward, backward = self._pair()
        peak_budget = Budget.parse(self.budget).peak_bytes
        shown = self.budget if peak_budget is None else f"{format_bytes(peak_budget)} of peak"
        draw_step(
            timeline(forward, backward, own_outputs(forward)),
            path,
            title=f"{self.graph}, budget {shown}",
            saved_budget=self.capacity if peak_budget is None else None,
            peak_budget=peak_budget,
        )


_JSON_FIELDS: dict[str, type] = {
    "graph": str,
    "fingerprint": str,
    "budget": str,
    "solver": str,
    "cost": str,
    "unit": str,
    "capacity": int,
    "full_bytes": int,
    "least_bytes": int,
    "saved_bytes": int,
    "peak_bytes": int,
    "recompute_cost": int,
    "recompute_bound": int,
    "items": int,
    "deterministic": bool,
    "solve_s": float,
    "saved": tuple,
    "snapshots": tuple,
    "recomputed": tuple,
    "fallbacks": tuple,
    "reread_inputs": bool,
    "reread": tuple,
    "lower": str,
    "torch": str,
    "region_budget": str,
    "least_because": str,
    "operators": str,
}
#: Fields that plans did not always have, with what they stand for where they lack.
_LATER_FIELDS: dict[str, Any] = {
    "reread_inputs": True,
    "reread": [],
    "region_budget": "",
    "least_because": "",
    "operators": "",
    "lower": "",
    "torch": "",
}


@without_collection
def finish(state: State, *, cost: CostModel, budget: str, fingerprint: str) -> Plan:
    """Scores and verifies a partitioned state: the end of every way to a plan.

    Raises:
        PlanError: a rule of the verifier is broken.
    """
    assert state.decision is not None
    assert state.forward is not None
    assert state.backward is not None
    lowered = state.lowered(cost)
    problem = lowered.problem
    scored = evaluate(problem, lowered.saved_of(state.decision))
    n = state.joint.num_fwd_outputs
    saved_bytes = sum(
        saved_storages(
            state.forward, n, count_outputs=state.count_outputs, memories=state.joint.memories
        ).values()
    )
    choice = state.choice or DecisionInfo()
    capacity = saved_bytes if choice.capacity is None else choice.capacity
    verify(
        Split(
            joint=state.joint,
            forward=state.forward,
            backward=state.backward,
            capacity=capacity,
            count_outputs=state.count_outputs,
            saved_bytes=saved_bytes,
            refilled=frozenset() if state.reread_inputs else state.refillable,
        )
    )
    state.forward.recompile()
    state.backward.recompile()
    kept = [i for i in scored.saved if lowered.kind[i] is SavedKind.VALUE]
    saved = tuple(problem.names[i] for i in kept)
    region = choice.region_budget
    priced = [state.index.nodes[i] for i in dict.fromkeys(lowered.position)]
    return Plan(
        saved=saved,
        snapshots=state.decision.snapshots,
        recomputed=tuple(problem.names[i] for i in scored.recomputed if problem.in_forward[i]),
        saved_bytes=saved_bytes,
        peak_bytes=simulate_peak(state.forward, state.backward, n, state.joint.memories).nbytes,
        recompute_cost=scored.recompute_cost,
        recompute_bound=min(
            scored.recompute_cost,
            max(choice.recompute_bound, Hull.of(problem).edge(capacity).bound(capacity)),
        ),
        unit=problem.unit,
        capacity=capacity,
        full_bytes=choice.full_bytes if choice.full_bytes is not None else saved_bytes,
        least_bytes=choice.least_bytes if choice.least_bytes is not None else 0,
        budget=budget,
        solver=choice.solver,
        cost=str(cost),
        items=choice.items,
        deterministic=choice.deterministic,
        solve_s=choice.elapsed_s,
        graph=state.joint.name,
        fingerprint=fingerprint,
        fallbacks=tuple(cost.fallbacks(priced)),
        reread_inputs=state.reread_inputs,
        reread=tuple(name for name in saved if state.reread_inputs and name in state.refillable),
        lower=state.joint.lower,
        torch=torch.__version__,
        region_budget="" if region is None else str(Budget(share=region)),
        least_because=choice.least_because,
        operators=state.operators,
        _modules=(state.forward, state.backward),
        _problem=problem,
    )


def format_cost(cost: float, unit: str) -> str:
    """A cost for people."""
    if unit == "ps":
        for name, scale in (("s", 1e12), ("ms", 1e9), ("µs", 1e6), ("ns", 1e3)):
            if cost >= scale:
                return f"{cost / scale:.4g} {name}"
        return f"{cost:.0f} ps"
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if cost >= scale:
            return f"{cost / scale:.4g} {prefix}{unit}"
    return f"{cost:.0f} {unit}"
