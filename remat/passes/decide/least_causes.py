"""Explain, for messages, why no plan of a graph can save fewer bytes than `SavedLimits.least_bytes`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from remat.graph import ops, purity
from remat.graph.problems.lowering import Lowered, SavedKind, must_save, tag_of
from remat.graph.problems.replays import maker_of
from remat.passes.core.state import State
from remat.units import some_of

#: Largest number of operators that a message names; further operators are only counted.
MOST_NAMES = 3


def least_causes(state: State, least: Sequence[int]) -> tuple[str, str]:
    """Return the reasons why no decision saves fewer bytes than ``least``, and remedies.

    Args:
        state: the state with the joint graph.
        least: the nodes of the graph problem that the decision with the fewest saved bytes saves.

    Returns:
        The reasons as text, and the remedies as text, both for the end of a sentence. An example is
        "values are tagged MUST_SAVE" and "loosen what is tagged MUST_SAVE". The text of the remedies is
        empty if there is no remedy.
    """
    lowered = state.lowered()
    causes = list(_roots(lowered, least))
    tagged = _tagged(state)
    undeclared: Counter[str] = Counter()
    reasons: dict[str, str] = {}  # maps each reason to its remedy; empty text if there is none
    for i in causes:
        at = lowered.position[i]
        maker = maker_of(state.index.nodes[at])
        if lowered.kind[i] is SavedKind.GENERATOR_STATE:
            reasons["random operators need the state of their generator"] = ""
        elif lowered.kind[i] is SavedKind.SNAPSHOT and at in state.storages.user_mutated:
            reasons["reread_inputs=False keeps backward from reading inputs"] = (
                "leave reread_inputs at True if inputs are not overwritten before backward"
            )
        elif lowered.kind[i] is SavedKind.SNAPSHOT:
            reasons["forward writes to inputs that backward reads as they were"] = ""
        elif at in tagged:
            reasons[f"values are tagged {tagged[at]}"] = f"loosen what is tagged {tagged[at]}"
        elif opaque := ops.opaque_operators(maker):
            undeclared.update(map(purity.name_of, opaque))
        elif ops.is_random(maker):
            reasons["random operators cannot be replayed"] = ""
        elif state.index.position[maker] in lowered.fixed:
            reasons["backward must branch as forward did"] = ""
        elif ops.is_effectful(maker):
            reasons["operators have effects"] = ""
        elif ops.is_collective(maker):
            reasons["collectives do not run twice"] = ""
        else:
            reasons["memory is written in place after it is read"] = ""
    if undeclared:
        count = sum(undeclared.values())
        names = some_of(tuple(undeclared), MOST_NAMES)
        does = "values come" if count > 1 else "a value comes"
        fact = f"{count} {does} from operators that are not declared pure ({names})"
        act = "declare with remat.declare_pure those that only depend on their inputs"
        reasons = {fact: act, **reasons}
    if not reasons:
        reasons["what it keeps cannot be computed again"] = ""
    todo = ", or ".join(filter(None, reasons.values()))
    return "; ".join(reasons), todo


def _roots(lowered: Lowered, saved: Sequence[int]) -> Iterator[int]:
    """Yield the nodes that cannot be recomputed and therefore make a decision save bytes."""
    problem, chosen = lowered.problem, frozenset(saved)
    seen: set[int] = set()
    for start in saved:
        stack = [start] if problem.size[start] else []
        while stack:
            i = stack.pop()
            if i in seen or (i != start and i in chosen):
                continue
            seen.add(i)
            if problem.recomputable[i]:
                stack.extend(problem.inputs[i])
            elif problem.size[i] or not problem.savable[i]:  # saving 0 bytes costs nothing
                yield i


def _tagged(state: State) -> dict[int, str]:
    """Return a dict from position to tag, for each node that must be saved because of the node's tag."""
    marked = [(i, tag_of(node)) for i, node in enumerate(state.index.nodes) if must_save(node)]
    # The memory of a view is that of its owner, so the owner has the tag too.
    return {at: tag for i, tag in marked for at in (i, state.storages.owner[i])}
