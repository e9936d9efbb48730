"""PyTorch's partitioner on a captured joint graph: its decisions, scored by remat's evaluator.

The partitioner runs as it is, on a copy of the graph, with its defaults (knapsack ``dp``, runtimes from ``flops``). A
decision is read off the two modules by names; names of the joint graph survive in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners

import remat
from remat.errors import ProblemError
from remat.graph.joint import Role, role_of
from remat.graph.memory.liveness import saved_storages
from remat.graph.problems.lowering import SavedKind
from remat.passes.core.state import State
from remat.plugins.registry import registry
from remat.solvers.graph.problem import Evaluation, evaluate

Modules = tuple[fx.GraphModule, fx.GraphModule]


def split_by(
    partitioner: Callable[..., Modules], joint: remat.JointGraph, module: fx.GraphModule
) -> Modules:
    """Runs a partitioner on a module of a joint graph, which it takes apart."""
    outputs, inputs = joint.num_fwd_outputs, list(joint.static_inputs)
    return partitioner(module, [], num_fwd_outputs=outputs, static_lifetime_input_indices=inputs)


def pytorchs(budget: float | None) -> Callable[..., Modules]:
    """PyTorch's partitioner at a budget from 0 to 1."""

    def split(*args: Any, **kwargs: Any) -> Modules:
        settings = {"activation_memory_budget": budget, "activation_memory_budget_solver": "dp"}
        with functorch_config.patch(**settings):
            return partitioners.min_cut_rematerialization_partition(*args, **kwargs)

    return split


def generated(modules: Modules) -> Modules:
    """Forces the code of both modules to be generated."""
    for module in modules:
        module.recompile()
        _ = module.code
    return modules


def partition(joint: remat.JointGraph, budget: float | None) -> Modules:
    """What PyTorch's partitioner makes of a joint graph, which it takes apart, down to generated code."""
    return generated(split_by(pytorchs(budget), joint, joint.graph_module))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A decision, as it is read off two modules.

    Attributes:
        saved: names of the nodes whose values forward hands to backward, inputs included.
        twice: names of the operators that both modules run.
        saved_bytes: bytes of the storages handed over, as `remat` counts them on any two modules.
    """

    saved: tuple[str, ...]
    twice: tuple[str, ...]
    saved_bytes: int

    @classmethod
    def of(cls, joint: remat.JointGraph, modules: Modules) -> Split:
        forward, backward = modules
        given = backward.graph.find_nodes(op="placeholder")
        return cls(
            saved=tuple(n.name for n in given if role_of(n) in (Role.PRIMAL, Role.FORWARD_SEED)),
            twice=run_twice(modules),
            saved_bytes=sum(saved_storages(forward, joint.num_fwd_outputs).values()),
        )


def run_twice(modules: Modules) -> tuple[str, ...]:
    """Names of the operators that both modules run."""
    first, again = (
        dict.fromkeys(node.name for node in half.graph.nodes if node.op == "call_function")
        for half in modules
    )
    return tuple(name for name in again if name in first)


def score(state: State, cost: str, split: Split) -> tuple[Evaluation, int, str | None]:
    """Scores a decision of PyTorch's on our graph problem of the same joint graph, under a cost model.

    Where PyTorch saves a view, its owner counts as saved: the view keeps the memory.

    Returns:
        Its bytes and its cost; how many of the bytes are states of generators, which PyTorch does not keep (it draws
        other numbers in backward); why the decision breaks our rules, if it does. It is then scored with every
        operator recomputable.
    """
    lowered = state.lowered(registry().cost_model(cost))
    problem, storages = lowered.problem, state.storages
    states = {i for i, k in enumerate(lowered.kind) if k is SavedKind.GENERATOR_STATE}
    saved = set(states)
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
    return evaluation, sum(problem.size[i] for i in states & set(evaluation.saved)), illegal
