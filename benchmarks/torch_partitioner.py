"""PyTorch's partitioner on a captured joint graph: what it decides, and what that comes to by our yardstick.

The partitioner runs as it is, on a copy of the graph, with its defaults (knapsack ``dp``, runtimes
from ``flops``). Its minimum cuts do not depend on the budget, but for the last one: a cut that was
computed for one budget is handed out again for the next, and its seconds are counted again. A
decision is read off the two modules by names; names of the joint graph survive in both.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch.utils._ordered_set import OrderedSet

import remat
from remat.errors import ProblemError
from remat.graph.joint import Role, role_of
from remat.graph.liveness import saved_storages
from remat.graph.lowering import Lowered, SavedKind
from remat.passes.core.state import State
from remat.solvers.graph_problem import Evaluation, evaluate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """What the partitioner made of one joint graph at one budget.

    Attributes:
        saved: names of the nodes whose values forward hands to backward, inputs included.
        twice: names of the operators that both modules run.
        saved_bytes: bytes of the storages handed over, as `remat` counts them on any two modules.
        merged: nodes that the partitioner merged away before it cut.
        seconds: time it took; cuts that were remembered count with the time they once took.
    """

    saved: tuple[str, ...]
    twice: tuple[str, ...]
    saved_bytes: int
    merged: int
    seconds: float


@dataclass(slots=True)
class TorchPartitioner:
    """PyTorch's partitioner on one joint graph, at any number of budgets."""

    joint: remat.JointGraph
    _cuts: dict[Any, tuple[list[str], list[str], float]] = field(default_factory=dict)
    _splits: dict[float, Split] = field(default_factory=dict)
    _remembered_s: float = 0.0

    def split(self, budget: float) -> Split:
        """What a copy of the graph is split into at a budget from 0 to 1; computed once."""
        if budget not in self._splits:
            self._splits[budget] = self._split(budget)
        return self._splits[budget]

    def _split(self, budget: float) -> Split:
        fresh = self.joint.copy()
        before = len(fresh.graph.nodes)
        self._remembered_s = 0.0
        with self._remembering():
            seconds, _, (forward, backward) = timed(lambda: partition(fresh, budget))
        handed = [
            n
            for n in backward.graph.nodes
            if n.op == "placeholder" and role_of(n) in (Role.PRIMAL, Role.FORWARD_SEED)
        ]
        ran = {n.name for n in forward.graph.nodes if n.op == "call_function"}
        return Split(
            saved=tuple(n.name for n in handed),
            twice=tuple(
                n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in ran
            ),
            saved_bytes=sum(saved_storages(forward, self.joint.num_fwd_outputs).values()),
            merged=before - len(fresh.graph.nodes),
            seconds=seconds + self._remembered_s,
        )

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """Within the block, PyTorch's cuts are computed once for the same options and bans."""
        original = partitioners.solve_min_cut

        def solve_min_cut(
            graph: fx.Graph, info: Any, options: Any, dont_ban: OrderedSet[fx.Node] | None = None
        ) -> tuple[list[fx.Node], OrderedSet[fx.Node]]:
            key = (astuple(options), frozenset(n.name for n in dont_ban or ()))
            if key in self._cuts:
                saved, banned, seconds = self._cuts[key]
                by_name = {n.name: n for n in graph.nodes}
                self._remembered_s += seconds
                return [by_name[n] for n in saved], OrderedSet(by_name[n] for n in banned)
            start = time.perf_counter()
            found = original(graph, info, options, dont_ban)
            seconds = time.perf_counter() - start
            self._cuts[key] = ([n.name for n in found[0]], [n.name for n in found[1]], seconds)
            return found

        partitioners.solve_min_cut = solve_min_cut
        try:
            yield
        finally:
            partitioners.solve_min_cut = original


def partition(joint: remat.JointGraph, budget: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Runs PyTorch's partitioner on a joint graph, which it takes apart, down to generated code."""
    settings = {"activation_memory_budget": budget, "activation_memory_budget_solver": "dp"}
    with functorch_config.patch(**settings):
        return generated(
            partitioners.min_cut_rematerialization_partition(
                joint.graph_module,
                [],
                num_fwd_outputs=joint.num_fwd_outputs,
                static_lifetime_input_indices=list(joint.static_inputs),
            )
        )


def generated(
    modules: tuple[fx.GraphModule, fx.GraphModule],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forces the code of both modules to be generated."""
    for module in modules:
        module.recompile()
        _ = module.code
    return modules


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds and processor seconds of ``run`` with garbage collection off, and its result."""
    gc.collect()
    gc.disable()
    try:
        start, start_cpu = time.perf_counter(), time.process_time()
        result = run()
        return time.perf_counter() - start, time.process_time() - start_cpu, result
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A decision of PyTorch's by our evaluator.

    Attributes:
        evaluation: its bytes and its cost.
        state_bytes: how many of the bytes are states of generators that PyTorch does not keep: it
            draws again in backward, and other numbers, where we keep the state.
        illegal: why the decision breaks our rules, None where it keeps them. It is then scored with
            every operator recomputable.
    """

    evaluation: Evaluation
    state_bytes: int
    illegal: str | None


def score(state: State, lowered: Lowered, split: Split) -> Score:
    """Scores a decision of PyTorch's on our graph problem of the same joint graph.

    Where PyTorch saves a view, its owner counts as saved: the view keeps the memory.
    """
    problem, storages = lowered.problem, state.storages
    saved: set[int] = {i for i, k in enumerate(lowered.kind) if k is SavedKind.GENERATOR_STATE}
    for name in split.saved:
        at = state.index.by_name[name]
        for i in (lowered.of_position[storages.owner[at]], lowered.of_position[at]):
            if i >= 0 and problem.savable[i]:
                saved.add(i)
                break
    illegal = None
    try:
        evaluation = evaluate(problem, saved)
    except ProblemError as error:
        illegal = str(error)
        anything = tuple(k is SavedKind.VALUE for k in lowered.kind)
        evaluation = evaluate(replace(problem, recomputable=anything), saved)
    states = (i for i in evaluation.saved if lowered.kind[i] is SavedKind.GENERATOR_STATE)
    return Score(
        evaluation=evaluation, state_bytes=sum(problem.size[i] for i in states), illegal=illegal
    )
