"""Policies by module, resolved into the tags that selective checkpointing sets: every later pass keeps to those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import BudgetError, PlanError
from remat.graph.lowering import SavedKind, must_offload, must_recompute, must_save
from remat.graph.policies import (
    TAGGED_BY,
    Part,
    Policies,
    Treatment,
    module_names,
    no_match,
    region_of,
)
from remat.graph.replays import maker_of
from remat.graph.source import enclosing_modules, located, module_path
from remat.passes.core.analyses import Distances
from remat.passes.core.state import Classification, Costs, Memory, Positions, State
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.min_cut import RuntimeOptimalCut
from remat.solvers.graph_problem import GraphProblem, evaluate
from remat.solvers.hull import Hull
from remat.units import format_bytes

_TAGS = {
    Treatment.SAVE: CheckpointPolicy.MUST_SAVE,
    Treatment.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Treatment.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
}


def has_policies(state: State, policies: Policies) -> bool:
    """Whether options or code set a policy for a graph."""
    return bool(policies) or any(region_of(n) is not None for n in state.joint.graph.nodes)


def check_matched(policies: Policies, graphs: Sequence[fx.Graph], name: str) -> None:
    """Refuse patterns that match no module of any graph of a step.

    Raises:
        PlanError: there is one; the message names the nearest modules.
    """
    nodes = [node for graph in graphs for node in graph.nodes]
    missing = policies.unmatched(nodes)
    if missing:
        error = PlanError(no_match(missing, module_names(nodes), name))
        error.option = "policies"
        raise error


def tag_policies(state: State, policies: Policies, deciding: Budgeted | None) -> None:
    """Tag the nodes of a graph as policies ask; nodes of no part, such as sums of gradients, stay free.

    - save, offload: no operator of the part runs again, unless the runtime-optimal cut runs it again too: cheap
      operators that fuse into backward's kernels. What backward reads of the part is saved, then; what it does not
      read is not.
    - recompute: no value that only the part itself reads in forward is saved. Its results stay free, and so does what
      cannot run again: random operators without a replay, collectives, effects, undeclared operators.
    - a budget: the values of the module that are not saved by the cheapest decision within its bytes, which saves all
      that it likes outside of the module, are recomputed.

    Args:
        state: a graph without dead code and common subexpressions, which is changed in place.
        policies: those of the options; the code's own are found in the graph.
        deciding: who decides which values of a module with a budget are saved; None: a saved plan says it.

    Raises:
        BudgetError: the budget of a module is below what has to be saved of it.
        PlanError: a tag of the user's code contradicts a policy.
    """
    parts = policies.parts(state.index.nodes)
    _set_tags(state, dict(_tags(state, parts)))
    if deciding is not None:
        _set_tags(state, dict(_tags_of_budgets(state, parts, deciding)))


def _set_tags(state: State, tags: Mapping[int, Part]) -> None:
    nodes = state.index.nodes
    with state.edit(preserves=(Positions, Classification, Distances, Memory, Costs)) as edit:
        for i, part in tags.items():
            meta = nodes[i].meta
            meta["recompute"] = _TAGS.get(part.policy.treatment, CheckpointPolicy.MUST_RECOMPUTE)
            meta[TAGGED_BY] = str(part.policy)
        edit.modified = bool(tags)


def _tags(state: State, parts: Sequence[Part | None]) -> Iterator[tuple[int, Part]]:
    """Positions of the nodes to be tagged."""
    index, storages, roles = state.index, state.storages, state.roles
    lowered = state.lowered()
    problem = lowered.problem
    used = {part.policy.treatment for part in parts if part is not None}
    again: set[int] = set()
    if used & {Treatment.SAVE, Treatment.OFFLOAD}:
        again.update(evaluate(problem, state.get(RuntimeOptimalCut())).recomputed)
    can_run = _can_run(problem)
    results = _results(state, parts) if Treatment.RECOMPUTE in used else {}
    for i, part in enumerate(parts):
        if part is None or part.policy.treatment not in _TAGS or storages.owner[i] != i:
            continue
        treatment, node, at = part.policy.treatment, index.nodes[i], lowered.of_position[i]
        if node.op != "call_function" or at < 0 or lowered.kind[at] is not SavedKind.VALUE:
            continue
        if treatment is Treatment.RECOMPUTE and (i in results or storages.alive[i]):
            continue
        # Of a tuple that forward makes, backward alone may read some elements.
        in_forward = roles.required_forward[index.position[maker_of(node)]]
        if in_forward:
            _refuse_contradiction(node, part)
        if not can_run[at]:
            continue
        is_kept = in_forward and at not in again and problem.savable[at] and problem.size[at]
        if is_kept or treatment is Treatment.RECOMPUTE:
            yield i, part


def _can_run(problem: GraphProblem) -> bytearray:
    """The nodes that can run again, as far as what they read can be saved or run again."""
    found = bytearray(len(problem))
    for k, reads in enumerate(problem.inputs):
        found[k] = problem.recomputable[k] and all(problem.savable[j] or found[j] for j in reads)
    return found


def _tags_of_budgets(
    state: State, parts: Sequence[Part | None], deciding: Budgeted
) -> Iterator[tuple[int, Part]]:
    """Positions of the nodes that the budgets of their modules leave no room for."""
    budgets = _budgets(state, parts)
    if not budgets:
        return
    lowered = state.lowered(deciding.cost)
    can_run = _can_run(lowered.problem)
    for part, inside in budgets.items():
        # What lies outside of the module is free, so that its bytes alone are weighed.
        sizes = [s if k in inside else 0 for k, s in enumerate(lowered.problem.size)]
        problem = replace(lowered.problem, size=tuple(sizes))
        least = Hull.of(problem).vertices[0].saved_bytes
        if least > part.policy.saved_bytes:
            raise BudgetError(
                f"{part.policy} leaves '{part.name}' {format_bytes(part.policy.saved_bytes)}, but at least "
                f"{format_bytes(least)} ({least} bytes) of its values must be saved: raise it to that, or loosen what "
                "must be saved in it"
            )
        saved = set(deciding.solved(problem.within(part.policy.saved_bytes)).saved)
        for k in inside:
            if can_run[k] and k not in saved:
                yield lowered.position[k], part
                # What makes a tuple runs again where an element of it does.
                yield state.index.position[maker_of(state.index.nodes[lowered.position[k]])], part


def _budgets(state: State, parts: Sequence[Part | None]) -> dict[Part, list[int]]:
    """Nodes of the graph problem that count against the budget of each module that has one."""
    found: dict[Part, list[int]] = {
        part: [] for part in parts if part is not None and part.policy.treatment is Treatment.BUDGET
    }
    if found:
        lowered, of_module = state.lowered(), {part.name: part for part in found}
        for k, (kind, at) in enumerate(zip(lowered.kind, lowered.position, strict=True)):
            if kind is SavedKind.VALUE and lowered.problem.size[k]:
                for name in enclosing_modules(module_path(state.index.nodes[at])):
                    if name in of_module:
                        found[of_module[name]].append(k)
    return found


def check_budgets(state: State, policies: Policies) -> None:
    """Refuse a decision that saves more of a module than its budget.

    Raises:
        BudgetError: it does.
    """
    if state.decision is None or all(p.treatment is not Treatment.BUDGET for p in policies.given):
        return
    problem, saved = state.lowered().problem, set(state.decision.saved)
    away = {value.name for value in state.decision.offloads}
    for part, inside in _budgets(state, policies.parts(state.index.nodes)).items():
        kept = [k for k in inside if problem.names[k] in saved - away]
        nbytes = sum(problem.size[k] for k in kept)
        if nbytes > part.policy.saved_bytes:
            raise BudgetError(
                f"{part.policy} does not hold for '{part.name}': this plan saves {format_bytes(nbytes)} ({nbytes} "
                "bytes) of its values, some of which must run once; raise it to that"
            )


def _results(state: State, parts: Sequence[Part | None]) -> Mapping[int, None]:
    """Owners of the memory that parts hand to code outside of them, in forward."""
    index, owner = state.index, state.storages.owner
    found: dict[int, None] = {}
    for i, part in enumerate(parts):
        if part is None:
            continue
        for u in index.users[i]:
            if state.roles.required_forward[u] and not _is_inside(index.nodes[u], parts[u], part):
                found[owner[i]] = None
    return found


def _is_inside(node: fx.Node, own: Part | None, part: Part) -> bool:
    """Whether a node belongs to a part, or to a module in it that another policy is for."""
    if own == part or part.policy.in_code:
        return own == part
    return part.name in enclosing_modules(module_path(node))


def _refuse_contradiction(node: fx.Node, part: Part) -> None:
    """Refuse a policy where the user's code has tagged a node otherwise.

    Raises:
        PlanError: the tag says otherwise.
    """
    tag = node.meta.get("recompute")
    if tag is None:
        return
    wanted = part.policy.treatment
    against = must_save(node) if wanted is Treatment.RECOMPUTE else must_recompute(node)
    if wanted is Treatment.OFFLOAD:
        against = against or (must_save(node) and not must_offload(node))
    if against:
        raise PlanError(
            f"{part.policy} contradicts the tag {tag.name} that the model's own checkpointing sets on "
            f"'{node.name}' in '{part.name}': leave one of them out\n  {located(node)}"
        )
