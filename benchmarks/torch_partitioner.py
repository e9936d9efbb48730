"""PyTorch's partitioner on a captured joint graph: its decisions, scored by remat's evaluator.

The partitioner runs as it is, on a copy of the graph, with its defaults (knapsack ``dp``, runtimes from ``flops``). A
decision is read off the two modules by names; names of the joint graph survive in both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners

import remat
from benchmarks.experiment import timed
from remat.errors import ProblemError
from remat.graph.joint import Role, role_of
from remat.graph.liveness import saved_storages
from remat.graph.lowering import Lowered, SavedKind
from remat.passes.core.state import State
from remat.solvers.graph_problem import Evaluation, evaluate

Modules = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """What the partitioner made of one joint graph at one budget.

    Attributes:
        saved: names of the nodes whose values forward hands to backward, inputs included.
        twice: names of the operators that both modules run.
        saved_bytes: bytes of the storages handed over, as `remat` counts them on any two modules.
        merged: nodes that the partitioner merged away before it cut.
        seconds: time it took.
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
    _splits: dict[float, Split] = field(default_factory=dict)

    def split(self, budget: float) -> Split:
        """What a copy of the graph is split into at a budget from 0 to 1; computed once."""
        if budget not in self._splits:
            self._splits[budget] = self._split(budget)
        return self._splits[budget]

    def _split(self, budget: float) -> Split:
        fresh = self.joint.copy()
        before = len(fresh.graph.nodes)
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
            seconds=seconds,
        )


def split_by_pytorch(
    joint: remat.JointGraph, budget: float | None, module: fx.GraphModule
) -> Modules:
    """Runs PyTorch's partitioner on a module of a joint graph, which it takes apart."""
    settings = {"activation_memory_budget": budget, "activation_memory_budget_solver": "dp"}
    with functorch_config.patch(**settings):
        return partitioners.min_cut_rematerialization_partition(
            module,
            [],
            num_fwd_outputs=joint.num_fwd_outputs,
            static_lifetime_input_indices=list(joint.static_inputs),
        )


def partition(joint: remat.JointGraph, budget: float | None) -> Modules:
    """Runs PyTorch's partitioner on a joint graph, which it takes apart, down to generated code."""
    return generated(split_by_pytorch(joint, budget, joint.graph_module))


def generated(modules: Modules) -> Modules:
    """Forces the code of both modules to be generated."""
    for module in modules:
        module.recompile()
        _ = module.code
    return modules


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
