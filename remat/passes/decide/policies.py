"""Apply the user's policies for modules: tag nodes as selective checkpointing does.

A policy saves, offloads or recomputes the values of a module, or limits the module's saved bytes. Later
passes obey the tags that a policy sets on nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from remat.errors import BudgetError, PlanError
from remat.graph.capture.source import enclosing_modules, located, module_path
from remat.graph.policies import (
    TAGGED_BY,
    Part,
    Policies,
    Treatment,
    module_names,
    no_match,
    region_of,
)
from remat.graph.problems.lowering import (
    Lowered,
    SavedKind,
    must_offload,
    must_recompute,
    must_save,
)
from remat.graph.problems.replays import maker_of
from remat.passes.core.state import Classification, Costs, Distances, Memory, Positions, State
from remat.passes.decide.budgeted import Budgeted
from remat.passes.decide.min_cut import RuntimeOptimalCut
from remat.solvers.graph.hull import Hull
from remat.solvers.graph.problem import GraphProblem, evaluate
from remat.units import format_bytes

_TAGS = {
    Treatment.SAVE: CheckpointPolicy.MUST_SAVE,
    Treatment.OFFLOAD: CheckpointPolicy.MUST_CPU_OFFLOAD,
    Treatment.RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
}


def has_policies(state: State, policies: Policies) -> bool:
    """Return whether ``policies`` is not empty, or the code of the graph uses `remat.region`."""
    return bool(policies) or any(region_of(n) is not None for n in state.joint.graph.nodes)


def check_matched(policies: Policies, graphs: Sequence[fx.Graph], name: str) -> None:
    """Check that the pattern of each policy matches a module in at least one of a step's graphs.

    Raises:
        PlanError: a pattern matches no module. The message names the nearest modules.
    """
    nodes = [node for graph in graphs for node in graph.nodes]
    missing = policies.unmatched(nodes)
    if missing:
        raise PlanError(no_match(missing, module_names(nodes), name), option="policies")


def tag_policies(state: State, policies: Policies) -> None:
    """Tag, in place, the nodes of a joint graph according to the policies of modules and regions.

    A region is code under `remat.region`.

    - Policy save or offload: an expensive operator of the module or region runs only once. The
      operator's value is saved, or offloaded, if backward reads the value. Cheap operators are those
      that the runtime-optimal cut recomputes. Under policy save, cheap operators may run again. Under
      policy offload, cheap operators must run again, so that no value of the module is saved on the
      device.
    - Policy recompute: a value that forward reads only inside the module or region is not saved. A
      value that forward also reads outside the module or region gets no tag. Operators that must run
      only once get no tag: random operators that cannot be replayed, collectives, operators with
      effects, and operators that are not declared pure (`remat.declare_pure`).

    `tag_budgets` sets the tags for budgets of modules. Nodes outside of all modules and regions
    with a policy, such as sums of gradients, get no tag.

    Args:
        state: a state whose joint graph has no dead code and no common subexpressions.
        policies: the option ``policies`` of `remat.plan`. The policies of regions come from
            annotations in the graph instead.

    Raises:
        PlanError: a tag of the user's code contradicts a policy.
    """
    _set_tags(state, dict(_tags(state, policies.parts(state.index.nodes))))


def _set_tags(state: State, tags: Mapping[int, tuple[Part, CheckpointPolicy]]) -> None:
    nodes = state.index.nodes
    with state.edit(preserves=(Positions, Classification, Distances, Memory, Costs)) as edit:
        for i, (part, tag) in tags.items():
            meta = nodes[i].meta
            meta["recompute"] = tag
            meta[TAGGED_BY] = str(part.policy)
        edit.modified = bool(tags)


def _tags(
    state: State, parts: Sequence[Part | None]
) -> Iterator[tuple[int, tuple[Part, CheckpointPolicy]]]:
    """For all policies except budgets, yield the position, the module and the tag of each node to tag."""
    index, storages, roles = state.index, state.storages, state.roles
    lowered = state.lowered()
    problem = lowered.problem
    used = {part.policy.treatment for part in parts if part is not None}
    again: set[int] = set()
    if used & {Treatment.SAVE, Treatment.OFFLOAD}:
        again.update(evaluate(problem, state.get(RuntimeOptimalCut())).recomputed)
    can_run = _can_run(problem)
    results = _results(state, parts) if Treatment.RECOMPUTE in used else set()
    for i, part in enumerate(parts):
        if part is None or part.policy.treatment not in _TAGS or storages.owner[i] != i:
            continue
        treatment, node, at = part.policy.treatment, index.nodes[i], lowered.of_position[i]
        if node.op != "call_function" or at < 0 or lowered.kind[at] is not SavedKind.VALUE:
            continue
        if treatment is Treatment.RECOMPUTE and (i in results or storages.alive[i]):
            continue
        # An element counts as forward if forward computes its tuple, even if only backward reads it.
        in_forward = roles.required_forward[index.position[maker_of(node)]]
        if in_forward:
            _refuse_contradiction(node, part)
        is_kept = in_forward and at not in again and problem.savable[at] and problem.size[at]
        if not can_run[at] and not (is_kept and treatment is Treatment.OFFLOAD):
            continue
        if is_kept or treatment is Treatment.RECOMPUTE:
            yield i, (part, _TAGS[treatment])
        elif treatment is Treatment.OFFLOAD and not storages.alive[i]:
            # The value is too cheap to copy, or only backward needs it. Without a tag, a plan might save the
            # value on the device.
            yield i, (part, CheckpointPolicy.MUST_RECOMPUTE)


def _can_run(problem: GraphProblem) -> bytearray:
    """Return a bytearray with 1 at each node of the graph problem that can run again."""
    again = bytearray(len(problem))
    for k, reads in enumerate(problem.inputs):
        again[k] = problem.recomputable[k] and all(problem.savable[j] or again[j] for j in reads)
    return again


def tag_budgets(
    state: State, policies: Policies, deciding: Budgeted, *, at_budget: bool = False
) -> None:
    """Tag values as MUST_RECOMPUTE, so that no module saves more bytes than its budget allows.

    Args:
        state: a state on which `tag_policies` has run.
        policies: the option ``policies`` of `remat.plan`.
        deciding: the pass whose solver decides which values of a module are saved.
        at_budget: whether only the decision at the budget of ``deciding`` must keep to the budgets of
            modules. If True, values of a module are tagged only if that decision exceeds the module's
            budget. If False, every later decision must keep to the budgets of modules, whatever its
            budget.

    Raises:
        BudgetError: a module must save more bytes than its budget, or no decision is within the
            budget of ``deciding``.
    """
    budgets = _budgets(state, policies)
    cuts: list[set[int]] = []
    if budgets and not at_budget:
        hull = Hull.of(state.lowered(deciding.cost).problem)
        cuts += [set(hull.reduction.invert(hull.ends[1].saved)), {*state.get(RuntimeOptimalCut())}]
    while budgets:
        lowered = state.lowered(deciding.cost)
        over = budgets
        if at_budget:
            # Tags in one module move saved bytes to other modules, so decide again after each round.
            solution, _ = deciding.decide(state, deciding.limits(state))
            over = {
                part: inside
                for part, inside in budgets.items()
                if _bytes(lowered.problem, inside, solution.saved) > part.policy.saved_bytes
            }
        tags: dict[int, tuple[Part, CheckpointPolicy]] = {}
        for part, inside in over.items():
            for at in _left_out(lowered, part, inside, deciding, cuts):
                # An element of a tuple is recomputed by the operator that returns the tuple.
                for again in (at, state.index.position[maker_of(state.index.nodes[at])]):
                    tags[again] = part, CheckpointPolicy.MUST_RECOMPUTE
        _set_tags(state, tags)
        if not over:
            return
        budgets = {part: inside for part, inside in budgets.items() if part not in over}


def _bytes(problem: GraphProblem, inside: Iterable[int], saved: Iterable[int]) -> int:
    return sum(problem.size[k] for k in {*inside}.intersection(saved))


def _left_out(
    lowered: Lowered,
    part: Part,
    inside: Sequence[int],
    deciding: Budgeted,
    cuts: Iterable[set[int]],
) -> list[int]:
    """Return the positions of a module's values that must be recomputed to meet the module's budget."""
    problem, room = lowered.problem, part.policy.saved_bytes
    allowed: set[int] = set()
    # Values that earlier decisions save stay savable while they fit. A solver decides on the others, as if values
    # outside of the module took no bytes.
    for saved in cuts:
        more = allowed | saved.intersection(inside)
        allowed = more if _bytes(problem, inside, more) <= room else allowed
    counted = {*inside} - allowed
    sizes = [size if k in counted else 0 for k, size in enumerate(problem.size)]
    own, room = replace(problem, size=tuple(sizes)), room - _bytes(problem, inside, allowed)
    least = Hull.of(own).least_bytes
    if least > room:
        raise BudgetError(
            f"{part.policy} leaves '{part.name}' {format_bytes(part.policy.saved_bytes)}, but at least "
            f"{format_bytes(least)} ({least} bytes) of its values must be saved: raise it to that, or loosen what "
            "must be saved in it"
        )
    allowed |= set(deciding.solved(own.within(room)).saved)
    can_run = _can_run(problem)
    return [lowered.position[k] for k in inside if can_run[k] and k not in allowed]


def _budgets(state: State, policies: Policies) -> dict[Part, list[int]]:
    """Return a dict from each module with a budget to the nodes of the graph problem whose bytes the budget limits."""
    if all(p.treatment is not Treatment.BUDGET for p in policies.given):
        return {}
    parts = policies.parts(state.index.nodes)
    limited: dict[Part, list[int]] = {
        part: [] for part in parts if part is not None and part.policy.treatment is Treatment.BUDGET
    }
    lowered, of_module = state.lowered(), {part.name: part for part in limited}
    for k, (kind, at) in enumerate(zip(lowered.kind, lowered.position, strict=True)):
        if kind is SavedKind.VALUE and lowered.problem.size[k]:
            for name in enclosing_modules(module_path(state.index.nodes[at])):
                if name in of_module:
                    limited[of_module[name]].append(k)
    return limited


def check_budgets(state: State, policies: Policies) -> None:
    """Check that the state's decision saves no more bytes in each module than the module's budget.

    Offloaded values do not count as saved bytes of a module.

    Args:
        state: the state; without a decision, nothing is checked.
        policies: the option ``policies`` of `remat.plan`.

    Raises:
        BudgetError: a module saves more bytes than its budget.
    """
    budgets = _budgets(state, policies)
    if state.decision is None or not budgets:
        return
    problem, saved = state.lowered().problem, set(state.decision.saved)
    away = {value.name for value in state.decision.offloads}
    for part, inside in budgets.items():
        counted = [k for k in inside if problem.names[k] in saved - away]
        nbytes = sum(problem.size[k] for k in counted)
        if nbytes > part.policy.saved_bytes:
            raise BudgetError(
                f"{part.policy} does not hold for '{part.name}': this plan saves {format_bytes(nbytes)} ({nbytes} "
                "bytes) of its values, some of which must run once; raise it to that"
            )


def _results(state: State, parts: Sequence[Part | None]) -> set[int]:
    """For modules and regions with a policy, return the values that forward reads outside their module or region."""
    index, owner = state.index, state.storages.owner
    results: set[int] = set()
    for i, part in enumerate(parts):
        if part is None:
            continue
        for u in index.users[i]:
            if state.roles.required_forward[u] and not _is_inside(index.nodes[u], parts[u], part):
                results.add(owner[i])
    return results


def _is_inside(node: fx.Node, own: Part | None, part: Part) -> bool:
    """Return whether a node belongs to a module or region; a module includes all of its submodules."""
    if own == part or part.policy.in_code:
        return own == part
    return part.name in enclosing_modules(module_path(node))


def _refuse_contradiction(node: fx.Node, part: Part) -> None:
    """Refuse a tag of the user on a node if the tag contradicts the policy of the node's module or region."""
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
